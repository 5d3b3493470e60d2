"""Engines one after the other on a GPU host: what each answers to fixed prompts, in a line of JSON.

The argument is a list of {"model", "layout", "dtype", "compiled", "prompt_gpu", "long", "share",
"shares", "experts", "linked", "split", "slots", "drafts", "linear_backend", "additional"};
an empty layout is stock vLLM on one GPU.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from typing import Any

from vllm import LLM, SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError

from ray_hetero.errors import RayHeteroError

PROMPTS = 32
TOKENS = 24


def prompts(vocabulary: int) -> list[dict[str, list[int]]]:
    """Token prompts of mixed length, the same for every engine.

    Together they are a step of more than 1,024 tokens, of which a last GPU stage leaves rows out.
    """
    lengths = [1 + (7 * row) % 83 for row in range(PROMPTS)]
    return [
        {"prompt_token_ids": [(11 * row + 7 * i * (row + 1)) % (vocabulary - 8) + 4
                              for i in range(length)]}
        for row, length in enumerate(lengths)
    ]  # fmt: skip


def long_prompts(vocabulary: int) -> list[dict[str, list[int]]]:
    """Prompts of up to 640 tokens, every other one beginning as the first does."""
    lengths = [640, 300, 513, 20, 129, 385, 70, 600, 257, 1, 33, 450]
    return [
        {"prompt_token_ids": [(11 * (row if row % 2 or i >= 256 else 0) + 7 * i * (1 + row % 2))
                              % (vocabulary - 8) + 4 for i in range(length)]}
        for row, length in enumerate(lengths)
    ]  # fmt: skip


def settings(run: dict[str, Any]) -> dict[str, Any]:
    """Arguments of the engine."""
    common = {
        "model": run["model"],
        "dtype": run["dtype"],
        "enforce_eager": not run["compiled"],
        "max_model_len": 1024 if run["long"] else 256,
        # Several engines share the GPU here, so none may size itself by what is free.
        "kv_cache_memory_bytes": 1 << 30,
        "gpu_memory_utilization": 0.2,
        "linear_backend": run["linear_backend"],
        # Prompts are tokens, and not every checkpoint has a tokenizer.
        "skip_tokenizer_init": True,
        "additional_config": run["additional"],
    }
    if run["drafts"]:
        common |= {"speculative_config": run["drafts"], "disable_log_stats": False}
    layout = run["layout"]
    if not layout:
        return common
    stages = [["gpu"]] if layout == "auto" else layout
    cpu = {"ranks_per_socket": run["shares"], "kv_cache_gib": 0.5}
    if run["prompt_gpu"]:
        cpu |= {
            "linear_kernel": "streaming",
            "compact_weights": True,
            "prefill_on_gpu": True,
            "prefill_on_gpu_tokens": 8,
            "decode_gpu_share": run["share"],
        }
    if run["long"]:
        # Prompts come in chunks, beside those that decode; small chunks stay on the cores.
        cpu["prefill_on_gpu_tokens"] = 64
        common["max_num_batched_tokens"] = 160
    experts: dict[str, Any] = {}
    if run["experts"]:
        # All fit on the GPU, so that auto would leave all there.
        experts = {"ranks": run["experts"], "layers": "all", "prefill_on_gpu": False}
    if run["linked"]:
        cpu |= {"linear_kernel": "streaming", "compact_weights": True}
        experts |= {"prefill_on_gpu": True, "prefill_on_gpu_tokens": 64}
        if run["split"]:
            experts["prefill_gpu_share"] = 0.5
        if run["compiled"]:
            # Steps in CUDA graphs are the sockets': chunks of prompts are not to be in them.
            common["compilation_config"] = {"max_cudagraph_capture_size": 32}
    if run["slots"]:
        cpu |= {"linear_kernel": "streaming", "compact_weights": True}
        experts |= {"slots_gib": 0.25, "slots": run["slots"]}
    gpu = {"in_mixed_groups": "graphs"} if run["compiled"] else {}
    return common | {
        "distributed_executor_backend": "ray_hetero",
        "pipeline_parallel_size": len(stages),
        "tensor_parallel_size": max(map(len, stages)),
        "additional_config": run["additional"]
        | {
            "ray_hetero": {
                "layout": layout,
                "cpu": cpu,
                "gpu": gpu,
                "experts": experts,
            }
        },
    }


def answer(run: dict[str, Any]) -> dict[str, Any]:
    """Start the engine and generate; what it said, or why it did not."""
    try:
        return _answer(run)
    # What an engine fails with while it is built in this process, or says of its own.
    except (
        RuntimeError, ValueError, AssertionError, AttributeError, KeyError, ImportError, TypeError,
        RayHeteroError, EngineDeadError,
    ) as error:  # fmt: skip
        return {"error": f"{type(error).__name__}: {error}"}


def _answer(run: dict[str, Any]) -> dict[str, Any]:
    start = time.monotonic()
    llm = LLM(**settings(run))
    started = time.monotonic()
    sampling = SamplingParams(
        temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=2, detokenize=False
    )
    vocabulary = llm.llm_engine.vllm_config.model_config.get_vocab_size()
    # The second time all prompts are in the prefix cache, but for their last blocks.
    rounds = [long_prompts(vocabulary)] * 2 if run["long"] else [prompts(vocabulary)]
    outputs = [
        output.outputs[0]
        for given in rounds
        for output in llm.generate(given, sampling, use_tqdm=False)
    ]
    config = llm.llm_engine.vllm_config
    return {
        "tokens": [list(output.token_ids) for output in outputs],
        # The two most likely tokens at each position, the likelier first.
        "top": [
            [sorted(((e.logprob, t) for t, e in at.items()), reverse=True)[:2]
             for at in output.logprobs]
            for output in outputs
        ],
        "drafted": counted(llm, "num_draft_tokens"),
        "accepted": counted(llm, "num_accepted_tokens"),
        "is_v2_runner": config.use_v2_model_runner,
        "linked_tokens": _most(llm, "linked_expert_tokens") if run["linked"] else 0,
        "slot_copied": _most(llm, "slot_copied") if run["slots"] else 0,
        # Tokens times layers that the cores have decoded, and the GPU for them.
        "native_tokens": _most(llm, "native_layer_tokens") if run["prompt_gpu"] else 0,
        "gpu_tokens": _most(llm, "gpu_layer_tokens") if run["prompt_gpu"] else 0,
        "is_async": config.scheduler_config.async_scheduling,
        "start_s": started - start,
        "seconds": time.monotonic() - start,
    }  # fmt: skip


def _most(llm: LLM, name: str) -> int:
    """One of the totals of steps, of the rank that has most."""
    return int(max(totals[name] for totals in llm.collective_rpc("step_totals")))


def counted(llm: LLM, name: str) -> int:
    """One of vLLM's counters of speculative decoding; 0 without any."""
    if llm.llm_engine.vllm_config.speculative_config is None:
        return 0
    return sum(
        int(getattr(metric, "value", 0))
        for metric in llm.get_metrics()
        if metric.name == f"vllm:spec_decode_{name}"
    )


def main() -> None:
    """Answer every run in its own line, as soon as it is there."""
    for run in json.loads(sys.argv[1]):
        print("ANSWER " + json.dumps(answer(run)), flush=True)
        gc.collect()


if __name__ == "__main__":
    main()

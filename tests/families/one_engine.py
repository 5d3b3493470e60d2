"""One engine over a small checkpoint, in a process forked from one that has imported vLLM."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from families import reference, stages
from families.checkpoints import write_checkpoint
from families.stock import stock_arguments
from ray_hetero.compat.models import model_registry

Json = dict[str, Any]

LENGTHS = (1, 70, 2, 33, 5, 150)
"""Tokens of the prompts."""
CACHE_MIB = 128
"""Room of each engine for keys and values."""
TOKENS = 12
"""Tokens that each prompt is answered with."""
STAGES = "stages"
"""In the place of an engine: the models of two stages beside the whole one."""
TRANSFORMERS = "transformers"
"""In the place of an engine: greedy tokens of Transformers' class, without a cache."""
KINDS = ("stock", STAGES, "pipeline", "tensor", "experts")
"""How each architecture is asked."""
WRITE = "checkpoint"
"""In the place of an engine: the checkpoint is written.  A child does that: one that is forked from
a process whose OpenMP threads have begun waits for them for ever."""


def prompts(vocabulary: int = 500) -> list[list[int]]:
    """Token prompts, the same on each call."""
    return [
        [(7919 * (place + 1) * (at + 1) + 31 * at) % (vocabulary - 8) + 8 for at in range(length)]
        for place, length in enumerate(LENGTHS)
    ]


def arguments(kind: str, directory: Path) -> Json:
    """Arguments of vLLM's for an engine of one of `KINDS`."""
    given = stock_arguments(directory)
    if kind == "stock":
        return given | {"kv_cache_memory_bytes": CACHE_MIB << 20}
    for stock_only in ("compilation_config", "enable_prefix_caching"):
        given.pop(stock_only, None)
    ours: Json = {
        "cpu": {"kv_cache_gib": CACHE_MIB / 1024, "ranks_per_socket": 2},
        "warmup": {"step_timeout_s": 120},
    }
    if kind == "experts":
        ours |= {"layout": [["gpu"]], "experts": {"ranks": 2}}
    else:
        given["pipeline_parallel_size" if kind == "pipeline" else "tensor_parallel_size"] = 2
        ours["layout"] = [["cpu"], ["cpu"]] if kind == "pipeline" else [["cpu", "cpu"]]
    return given | {
        "distributed_executor_backend": "ray_hetero",
        "additional_config": {"ray_hetero": ours},
    }


def _answer(kind: str, directory: Path) -> Json:
    if kind == WRITE:
        write_checkpoint(directory, directory.name)
        return {}
    if kind == TRANSFORMERS:
        return reference.greedy(directory, prompts(), TOKENS)
    # Stock vLLM, too, is to load models that read images.
    model_registry.load_models_without_torchvision()
    if kind == STAGES:
        stages.check(directory)
        return {}
    from vllm import LLM, SamplingParams

    engine = LLM(**arguments(kind, directory))
    sampling = SamplingParams(
        temperature=0.0, max_tokens=TOKENS, detokenize=False, ignore_eos=True, logprobs=2
    )
    given: Any = [{"prompt_token_ids": prompt} for prompt in prompts()]
    outputs = [one.outputs[0] for one in engine.generate(given, sampling, use_tqdm=False)]
    return {
        "tokens": [list(one.token_ids) for one in outputs],
        "logprobs": [
            [{str(token): entry.logprob for token, entry in at.items()} for at in one.logprobs]
            for one in outputs
        ],
    }


def _child(kind: str, directory: Path, answer: Path, log: Path) -> None:
    os.setsid()
    with log.open("ab", buffering=0) as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    try:
        found = _answer(kind, directory)
    # Whatever an architecture ends with is its row of the table.
    except BaseException as error:  # noqa: BLE001
        import traceback

        traceback.print_exc()
        found = {"error": str(error), "type": type(error).__name__}
    answer.write_text(json.dumps(found))
    if kind != "stock" and "ray" in sys.modules:
        sys.modules["ray"].shutdown()
    os._exit(0)


def ask(kind: str, directory: Path, work: Path, limit_s: float) -> Json:
    """Start an engine, ask it, and end it.

    Args:
        kind: one of `KINDS`.
        directory: the checkpoint.
        work: folder for its log and its answer.
        limit_s: longest time for all of that.

    Returns:
        {"tokens", "logprobs"} with an entry for each prompt, or {"error", "type"}.

    """
    work.mkdir(parents=True, exist_ok=True)
    answer, log = work / f"{kind}.json", work / f"{kind}.log"
    for old in (answer, log):
        old.unlink(missing_ok=True)
    process = multiprocessing.get_context("fork").Process(
        target=_child, args=(kind, directory, answer, log)
    )
    began = time.monotonic()
    process.start()
    process.join(limit_s)
    if process.is_alive():
        os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()
        found: Json = {"error": f"no answer in {limit_s:g} s", "type": "TimeoutError"}
    elif answer.exists():
        found = json.loads(answer.read_text())
    else:
        found = {"error": f"its process ended with {process.exitcode}", "type": "ProcessError"}
    return found | {"seconds": round(time.monotonic() - began, 1)}

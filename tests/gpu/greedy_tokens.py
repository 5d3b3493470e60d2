"""One engine on a GPU host: greedy tokens and logprobs of fixed prompts, as one line of JSON."""

from __future__ import annotations

import argparse
import json
from typing import Any

PROMPTS = 32


def prompts(vocabulary: int) -> list[dict[str, list[int]]]:
    """Token prompts of mixed length, the same for every engine."""
    lengths = [1 + (7 * row) % 60 for row in range(PROMPTS)]
    return [
        {"prompt_token_ids": [(11 * row + 7 * i * (row + 1)) % (vocabulary - 8) + 4
                              for i in range(length)]}
        for row, length in enumerate(lengths)
    ]  # fmt: skip


def main() -> None:
    """Start the engine, generate, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--layout", default="", help="empty: stock vLLM on one GPU")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--cpu-shares", type=int, default=4)
    options = parser.parse_args()
    from vllm import LLM, SamplingParams

    settings: dict[str, Any] = {
        "model": options.model,
        "dtype": options.dtype,
        "enforce_eager": not options.compile,
        "max_model_len": 256,
        # Several engines share the GPU here, so none may size itself by what is free.
        "kv_cache_memory_bytes": 2 << 30,
        "gpu_memory_utilization": 0.2,
    }
    if options.layout:
        layout = json.loads(options.layout)
        config = {
            "layout": layout,
            "cpu": {"ranks_per_socket": options.cpu_shares, "kv_cache_gib": 1.0},
        }
        settings |= {
            "distributed_executor_backend": "ray_hetero",
            "pipeline_parallel_size": len(layout),
            "tensor_parallel_size": len(layout[0]),
            "additional_config": {"ray_hetero": config},
        }
    llm = LLM(**settings)
    vocabulary = llm.get_tokenizer().vocab_size
    sampling = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=2)
    answers = [output.outputs[0] for output in llm.generate(prompts(vocabulary), sampling)]
    print(
        "ANSWER "
        + json.dumps(
            {
                "tokens": [list(answer.token_ids) for answer in answers],
                # The two most likely tokens at each position, the likelier first.
                "top": [
                    [
                        sorted(((e.logprob, t) for t, e in at.items()), reverse=True)[:2]
                        for at in answer.logprobs
                    ]
                    for answer in answers
                ],
            }
        ),
        flush=True,
    )


if __name__ == "__main__":
    main()

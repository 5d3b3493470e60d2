"""Start an engine, ask it, stop it; again when the test has looked: MODEL FOLDER COUNT KEYS.

KEYS are those of the backend's configuration, as JSON, its layout among them.  After cycle N the
tokens are in FOLDER/stopped-N; the next one starts when FOLDER/go-N is there.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams

GREEDY = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True, "detokenize": False}


def _cycle(model: str, keys: dict[str, Any]) -> list[list[int]]:
    llm = LLM(
        model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        skip_tokenizer_init=True,
        kv_cache_memory_bytes=1 << 30,
        distributed_executor_backend="ray_hetero",
        pipeline_parallel_size=len(keys["layout"]),
        additional_config={"ray_hetero": keys},
    )
    given = [{"prompt_token_ids": list(range(8, 8 + length))} for length in (1, 40, 150)]
    outputs = llm.generate(given, SamplingParams(**GREEDY), use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def main() -> None:
    """Run the cycles."""
    model, folder, count, keys = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    for number in range(count):
        tokens = _cycle(model, json.loads(keys))
        gc.collect()
        part = folder / "part"
        part.write_text(json.dumps(tokens))
        part.rename(folder / f"stopped-{number}")
        while not (folder / f"go-{number}").exists():
            time.sleep(0.1)


if __name__ == "__main__":
    main()

"""An engine of ray_hetero, then one of vLLM's own, in one process: MODEL ANSWER.json."""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams
from vllm.engine.arg_utils import EngineArgs

VARIABLES = ("VLLM_USE_V2_MODEL_RUNNER",)
ARGUMENTS = {"max_model_len": 128, "enforce_eager": True, "skip_tokenizer_init": True}
OURS = {
    "distributed_executor_backend": "ray_hetero",
    "pipeline_parallel_size": 2,
    "additional_config": {"ray_hetero": {"cpu": {"kv_cache_gib": 0.5, "ranks_per_socket": 2}}},
}


def _runner(worker: Any) -> str:
    return type(worker.model_runner).__name__


def _run(model: str, **more: Any) -> dict[str, Any]:
    engine = LLM(model, **ARGUMENTS, **more)
    sampling = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    (output,) = engine.generate([{"prompt_token_ids": [1, 2, 3]}], sampling, use_tqdm=False)
    config = engine.llm_engine.vllm_config
    return {
        "tokens": list(output.outputs[0].token_ids),
        "v2": config.use_v2_model_runner,
        "variables": {name: os.environ.get(name) for name in VARIABLES},
        "runners": engine.collective_rpc(_runner),
    }


def main() -> None:
    model, answer = sys.argv[1:]
    would_be = EngineArgs(model, **ARGUMENTS).create_engine_config().use_v2_model_runner
    ours = _run(model, **OURS)
    gc.collect()
    stock = _run(model)
    Path(answer).write_text(json.dumps({"would_be": would_be, "ours": ours, "stock": stock}))


if __name__ == "__main__":
    main()

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
from vllm.v1.executor import Executor

VARIABLES = ("VLLM_USE_V2_MODEL_RUNNER",)
ARGUMENTS = {"max_model_len": 128, "enforce_eager": True, "skip_tokenizer_init": True}
OURS = {
    "distributed_executor_backend": "ray_hetero",
    "pipeline_parallel_size": 2,
    "additional_config": {"ray_hetero": {"cpu": {"kv_cache_gib": 0.5, "ranks_per_socket": 2}}},
}


def _runner(worker: Any) -> str:
    return type(worker.model_runner).__name__


def _watched(worker: Any) -> int:
    """Objects that the collector of a rank's process looks through."""
    return len(gc.get_objects())


def _chosen(config: Any) -> dict[str, Any]:
    """What vLLM's configuration decides for an engine."""
    module = sys.modules[type(config).__module__]
    has_triton = module.HAS_TRITON
    module.HAS_TRITON = True
    try:
        # Without Triton, as on most CPUs, vLLM has one runner only.
        v2_with_triton = config.use_v2_model_runner
    finally:
        module.HAS_TRITON = has_triton
    return {
        "v2": config.use_v2_model_runner,
        "v2_with_triton": v2_with_triton,
        "hash": config.compute_hash(),
        "executor": Executor.get_class(config).__qualname__,
        "worker": config.parallel_config.worker_cls,
        "async": config.scheduler_config.async_scheduling,
        "scheduler": str(config.scheduler_config.scheduler_cls),
    }


def _run(model: str, **more: Any) -> dict[str, Any]:
    engine = LLM(model, **ARGUMENTS, **more)
    sampling = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    (output,) = engine.generate([{"prompt_token_ids": [1, 2, 3]}], sampling, use_tqdm=False)
    config = engine.llm_engine.vllm_config
    return {
        "tokens": list(output.outputs[0].token_ids),
        "chosen": _chosen(config),
        "variables": {name: os.environ.get(name) for name in VARIABLES},
        "runners": engine.collective_rpc(_runner),
        "watched": engine.collective_rpc(_watched),
    }


def main() -> None:
    model, answer = sys.argv[1:]
    would_be = _chosen(EngineArgs(model, **ARGUMENTS).create_engine_config())
    ours = _run(model, **OURS)
    gc.collect()
    would_still_be = _chosen(EngineArgs(model, **ARGUMENTS).create_engine_config())
    stock = _run(model)
    found = {"ours": ours, "stock": stock, "would_be": [would_be, would_still_be]}
    Path(answer).write_text(json.dumps(found))


if __name__ == "__main__":
    main()

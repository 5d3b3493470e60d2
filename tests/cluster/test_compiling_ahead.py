"""Stages compile as soon as they are loaded, and not again when the warm-up schedule begins.

The GPU rank is pretended, see test_kinds.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engines import (
    TOTALS,
    Model,
    Stock,
    batch,
    engine,
    hetero,
    long_prompt,
    prompts,
    run_engines,
    tokens,
)
from leftovers import Scene

from ray_hetero.worker.last_layer import LEAST

pytestmark = [pytest.mark.timeout(1800), pytest.mark.slow]


def test_both_stages_compile_once_they_are_loaded(
    scene: Scene, logs: Path, model: Model, stock: Stock
) -> None:
    keys: dict[str, Any] = {
        "layout": [["cpu"], ["gpu"]], "cpu": {"ranks_per_socket": 2},
        "warmup": {"step_timeout_s": 300},
    }  # fmt: skip
    asked = engine(
        model("llama", "f32"), 2, 1, dtype="float32", max_model_len=1280,
        **(hetero(**keys) | {"enforce_eager": False}),
    )  # fmt: skip
    long = [long_prompt(LEAST + 76)]
    ray: dict[str, Any] = {
        "num_cpus": 2, "num_gpus": 1, "object_store_memory": 100 << 20, "include_dashboard": False
    }  # fmt: skip
    ((found, last_row, all_rows, totals),) = run_engines(
        scene,
        logs / "ahead",
        [(asked, [batch(prompts()), batch(long), batch(long, prompt_logprobs=0), TOTALS])],
        ray=ray,
        extra={"RAY_HETERO_PRETEND_GPU": "1", "VLLM_DISABLE_COMPILE_CACHE": "1"},
    )
    assert tokens(found) == stock("llama-f32")
    # Of the last layer, the GPU leaves rows out that nothing reads.
    assert tokens(last_row) == tokens(all_rows)
    assert [rank["left_out_mlp_tokens"] for rank in totals] == [0, len(long[0]) - 1]
    log = (logs / "ahead" / "log").read_text()
    assert "dummy forward pass while other ranks load" in log

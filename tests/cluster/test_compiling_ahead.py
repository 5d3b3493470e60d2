"""Stages compile as soon as they are loaded, and not again when the warm-up schedule begins.

The GPU rank is pretended, see test_kinds.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engines import Model, Stock, batch, engine, hetero, prompts, run_engines, tokens
from leftovers import Scene

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]


def test_both_stages_compile_once_they_are_loaded(
    scene: Scene, logs: Path, model: Model, stock: Stock
) -> None:
    keys: dict[str, Any] = {
        "layout": [["cpu"], ["gpu"]], "cpu": {"ranks_per_socket": 2},
        "warmup": {"step_timeout_s": 300},
    }  # fmt: skip
    asked = engine(
        model("llama", "f32"), 2, 1, dtype="float32", **(hetero(**keys) | {"enforce_eager": False})
    )
    ray: dict[str, Any] = {
        "num_cpus": 2, "num_gpus": 1, "object_store_memory": 100 << 20, "include_dashboard": False
    }  # fmt: skip
    ((found,),) = run_engines(
        scene,
        logs / "ahead",
        [(asked, [batch(prompts())])],
        ray=ray,
        extra={"RAY_HETERO_PRETEND_GPU": "1", "VLLM_DISABLE_COMPILE_CACHE": "1"},
    )
    assert tokens(found) == stock("llama-f32")
    log = (logs / "ahead" / "log").read_text()
    assert "dummy forward pass while other ranks load" in log

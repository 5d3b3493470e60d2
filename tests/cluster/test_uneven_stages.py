"""Stages of different size: greedy tokens are those of stock vLLM in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engines import IN_THIS_PROCESS, Json, Model, Stock, batch, engine, hetero, prompts, run_engines
from engines import tokens as tokens_of
from leftovers import Scene

pytestmark = pytest.mark.timeout(1800)

TWO_FEED_ONE = [["cpu", "cpu"], ["cpu"]]
MORE_LAYOUTS = {
    "one feeds two": [["cpu"], ["cpu", "cpu"]],
    "two sockets feed a gpu": [["cpu", "cpu"], ["gpu"]],
    "a gpu feeds two sockets": [["gpu"], ["cpu", "cpu"]],
    "three stages": [["cpu"], ["cpu", "cpu"], ["gpu"]],
    "gpus only": [["gpu", "gpu"], ["gpu"]],
}


def arguments(model: Path, layout: list[list[str]], **engine_arguments: Any) -> Json:
    """Of an engine with this layout; vLLM's own sizes are left out."""
    keys = {"layout": layout, "cpu": {"ranks_per_socket": sum(map(len, layout))}}
    return engine(model, **{"dtype": "float32", **hetero(**keys), **engine_arguments})


@pytest.mark.slow
def test_tokens_are_those_of_stock(scene: Scene, logs: Path, model: Model, stock: Stock) -> None:
    path = model("llama", "f32")
    run = (arguments(path, TWO_FEED_ONE), [batch(prompts())])
    (answers,) = run_engines(scene, logs / "uneven", [run], extra=IN_THIS_PROCESS)
    assert tokens_of(answers[0]) == stock("llama-f32")


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE_LAYOUTS)
def test_kinds_and_more_stages(
    name: str, scene: Scene, logs: Path, model: Model, stock: Stock
) -> None:
    ray = {"num_cpus": 2, "num_gpus": 3, "object_store_memory": 100 << 20,
           "include_dashboard": False}  # fmt: skip
    run = (arguments(model("llama", "f32"), MORE_LAYOUTS[name]), [batch(prompts())])
    folder = logs / name.replace(" ", "-")
    extra = {"RAY_HETERO_PRETEND_GPU": "1"}
    (answers,) = run_engines(scene, folder, [run], ray=ray, extra=extra)
    assert tokens_of(answers[0]) == stock("llama-f32")

"""Ranks of two kinds in one engine, the GPU ranks pretended: they compute on the CPU platform.

What needs no GPU is covered: which group talks how, the boundary between stages, agreement of
configurations, the warm-up schedule of mixed groups, and one answer from all ranks of a group.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import Model, Stock
from engines import Json, batch, engine, hetero, prompts, run_engines, tokens
from leftovers import Scene

pytestmark = pytest.mark.timeout(600)

LAYOUTS = {
    "cpu stage between gpu stages": [["gpu"], ["cpu"], ["gpu"]],
    "mixed stage": [["gpu", "cpu"]],
    "stages of two": [["cpu", "cpu"], ["gpu", "gpu"]],
}
SAMPLED = {"temperature": 1.0, "seed": 5, "max_tokens": 16, "logprobs": 0}


def _arguments(model: Path, layout: list[list[str]]) -> Json:
    ranks = sum(map(len, layout))
    keys = {"layout": layout, "cpu": {"ranks_per_socket": ranks}, "warmup": {"step_timeout_s": 60}}
    sizes = (len(layout), len(layout[0]))
    return engine(model, *sizes, dtype="float32", **hetero(**keys))


@pytest.fixture(scope="module")
def answers(scene: Scene, logs: Path, model: Model) -> dict[str, list[list[Json]]]:
    ray: dict[str, Any] = {
        "num_cpus": 2, "num_gpus": 4, "object_store_memory": 100 << 20, "include_dashboard": False
    }  # fmt: skip
    batches = [batch(prompts()), batch(prompts(), **SAMPLED)]
    runs = [(_arguments(model("llama", "f32"), kinds), batches) for kinds in LAYOUTS.values()]
    found = run_engines(scene, logs / "kinds", runs, ray=ray, extra={"RAY_HETERO_PRETEND_GPU": "1"})
    return dict(zip(LAYOUTS, found, strict=True))


@pytest.mark.parametrize("name", LAYOUTS)
def test_greedy_tokens_are_those_of_stock(
    name: str, answers: dict[str, list[list[Json]]], stock: Stock
) -> None:
    assert tokens(answers[name][0]) == stock("llama-f32")


@pytest.fixture(scope="module")
def rescored(
    scene: Scene, logs: Path, model: Model, answers: dict[str, list[list[Json]]]
) -> dict[str, list[Json]]:
    """Stock vLLM's logprobs of what each layout has sampled."""
    given = {
        name: [
            [*prompt, *sampled] for prompt, sampled in zip(prompts(), tokens(found[1]), strict=True)
        ]
        for name, found in answers.items()
    }
    batches = [batch(texts, max_tokens=1, prompt_logprobs=0) for texts in given.values()]
    run = (engine(model("llama", "f32"), dtype="float32"), batches)
    (found,) = run_engines(scene, logs / "rescored", [run])
    return dict(zip(given, found, strict=True))


@pytest.mark.parametrize("name", LAYOUTS)
def test_all_ranks_go_on_from_the_same_sampled_token(
    name: str, answers: dict[str, list[list[Json]]], rescored: dict[str, list[Json]]
) -> None:
    # A rank that fed itself another token would have shifted every logprob behind it.  Pretended
    # GPUs draw as CPUs do, so that ranks are made to agree is only seen on a real GPU.
    for answer, scored in zip(answers[name][1], rescored[name], strict=True):
        sampled = answer["tokens"][0]
        wanted = _values(scored["prompt_logprobs"][-len(sampled) :], sampled)
        assert _values(answer["logprobs"][0], sampled) == pytest.approx(wanted, abs=1e-3)


def _values(logprobs: list[dict[str, float]], sampled: list[int]) -> list[float]:
    return [at[str(token)] for at, token in zip(logprobs, sampled, strict=True)]

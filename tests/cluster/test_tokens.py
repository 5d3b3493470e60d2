"""Greedy tokens over several CPU ranks are those of stock vLLM in one process.

Pipelines compute the same numbers in the same order, so bf16 must agree exactly.  Tensor
parallelism adds partial sums up in another order, so it is compared in float32.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from engines import IN_THIS_PROCESS, Model, Stock, batch, engine, prompts, run_engines, tokens
from leftovers import Scene

pytestmark = pytest.mark.timeout(900)

EAGER = [
    ("llama-bf16", 2, 1),
    ("opt-bf16", 2, 1),
    ("llama-f32", 1, 2),
    ("opt-f32", 2, 2),
]
COMPILED = [("llama-bf16-compiled", 2, 1), ("opt-f32-compiled", 1, 2)]

Tokens = dict[str, list[list[int]]]


def _run(scene: Scene, directory: Path, model: Model, cases: list[tuple[str, int, int]]) -> Tokens:
    """All engines of a list, one after the other in one process as in a notebook."""
    runs = []
    for name, pipeline, tensor in cases:
        architecture, dtype, *compiled = name.split("-")
        arguments = engine(
            model(architecture, dtype),
            pipeline,
            tensor,
            dtype="float32" if dtype == "f32" else "bfloat16",
            enforce_eager=not compiled,
        )
        runs.append((arguments, [batch(prompts())]))
    # Faster; the engines of the other modules have a process of their own.
    answers = run_engines(scene, directory, runs, extra=IN_THIS_PROCESS)
    return {name: tokens(found[0]) for (name, _, _), found in zip(cases, answers, strict=True)}


@pytest.fixture(scope="module")
def eager(scene: Scene, logs: Path, model: Model) -> Tokens:
    return _run(scene, logs / "eager", model, EAGER)


@pytest.fixture(scope="module")
def compiled(scene: Scene, logs: Path, model: Model) -> Tokens:
    return _run(scene, logs / "compiled", model, COMPILED)


def _same(ours: list[list[int]], theirs: list[list[int]]) -> None:
    given = prompts()
    assert len({len(prompt) for prompt in given}) == len(given) == len(ours) == 16
    # Not a test if every prompt ends in the same rut.
    assert len({tuple(answer[-4:]) for answer in theirs}) > 8
    different = {
        f"prompt {number} of {len(given[number])} tokens": (mine, wanted)
        for number, (mine, wanted) in enumerate(zip(ours, theirs, strict=True))
        if mine != wanted
    }
    assert different == {}


@pytest.mark.parametrize(("name", "pipeline", "tensor"), EAGER)
def test_eager(name: str, pipeline: int, tensor: int, eager: Tokens, stock: Stock) -> None:
    _same(eager[name], stock(name))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "pipeline", "tensor"), COMPILED)
def test_compiled(name: str, pipeline: int, tensor: int, compiled: Tokens, stock: Stock) -> None:
    _same(compiled[name], stock(name))


def test_a_second_engine_in_the_same_process_left_nothing_of_the_first(
    eager: Tokens, scene: Scene
) -> None:
    assert len(eager) == len(EAGER)
    scene.assert_clean()

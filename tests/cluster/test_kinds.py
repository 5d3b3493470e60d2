"""Ranks of two kinds in one engine, the GPU ranks pretended: they compute on the CPU platform.

What needs no GPU is covered: which group talks how, the boundary between stages, agreement of
configurations, the warm-up schedule of mixed groups, and one answer from all ranks of a group.
A pretended GPU draws other random numbers than a CPU does, as a real one would.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from engines import (
    TOTALS,
    Json,
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

LAYOUTS = {
    "cpu stage between gpu stages": [["gpu"], ["cpu"], ["gpu"]],
    "mixed stage": [["gpu", "cpu"]],
    "stages of two": [["cpu", "cpu"], ["gpu", "gpu"]],
    "mixed stages": [["gpu", "cpu"], ["gpu", "cpu"]],
}
UNSHARED = "mixed stage in which every rank samples for itself"
SAMPLED = {"temperature": 1.0, "seed": 5, "max_tokens": 16, "logprobs": 0}
LONG = [long_prompt(LEAST + 76), prompts()[3]]
"""Prompts that are one step, in which a GPU of the last stage leaves rows of its last layer out."""
POSITIONS = 1280
"""More tokens than the longest sequence has."""
LAST_GPUS = {"cpu stage between gpu stages": 1, "stages of two": 2}
"""GPU ranks of a last stage without CPU ranks."""
OTHER_NUMBERS = """
import torch

class Generator(torch.Generator):
    def manual_seed(self, seed):
        return super().manual_seed(seed + 1)

torch.Generator = Generator
"""
"""Start-up code of a pretended GPU's process: its random numbers are not those of a CPU."""
NO_SHARING = """
from ray_hetero.compat.worker import model_runner

model_runner.share_samples = lambda model_runner: None
"""


def _start_up(directory: Path, *code: str) -> Json:
    """Environment of ranks whose Python begins with this code."""
    directory.mkdir()
    (directory / "sitecustomize.py").write_text("".join(code))
    path = [str(directory), os.environ.get("PYTHONPATH", "")]
    return {"env": {"PYTHONPATH": os.pathsep.join(filter(None, path))}}


def _long() -> list[Json]:
    """Long prompts, of which the last rows are read, and then all of them."""
    return [batch(LONG), batch(LONG, prompt_logprobs=0)]


def _arguments(model: Path, layout: list[list[str]], gpu: Json, cpu: Json) -> Json:
    ranks = sum(map(len, layout))
    keys = {
        "layout": layout, "gpu": gpu, "cpu": {"ranks_per_socket": ranks, **cpu},
        "warmup": {"step_timeout_s": 60},
    }  # fmt: skip
    sizes = (len(layout), len(layout[0]))
    return engine(model, *sizes, dtype="float32", max_model_len=POSITIONS, **hetero(**keys))


@pytest.fixture(scope="module")
def answers(scene: Scene, logs: Path, model: Model, tmp_path_factory: Any) -> dict[str, Any]:
    """What each layout answers: greedily, sampled, and to long prompts."""
    ray: dict[str, Any] = {
        "num_cpus": 2, "num_gpus": 4, "object_store_memory": 100 << 20, "include_dashboard": False
    }  # fmt: skip
    sites = tmp_path_factory.mktemp("sites")
    other = _start_up(sites / "gpu", OTHER_NUMBERS)
    runs = {name: (layout, other, {}) for name, layout in LAYOUTS.items()}
    runs[UNSHARED] = (
        LAYOUTS["mixed stage"],
        _start_up(sites / "unshared_gpu", OTHER_NUMBERS, NO_SHARING),
        _start_up(sites / "unshared_cpu", NO_SHARING),
    )
    batches = [batch(prompts()), batch(prompts(), **SAMPLED), *_long(), TOTALS]
    engines = [_arguments(model("llama", "f32"), *run) for run in runs.values()]
    engines[-1]["left"] = True
    found = run_engines(
        scene,
        logs / "kinds",
        [(one, batches) for one in engines],
        ray=ray,
        extra={"RAY_HETERO_PRETEND_GPU": "1"},
    )
    return dict(zip(runs, found, strict=True))


@pytest.mark.parametrize("name", LAYOUTS)
def test_greedy_tokens_are_those_of_stock(
    name: str, answers: dict[str, list[list[Json]]], stock: Stock
) -> None:
    assert tokens(answers[name][0]) == stock("llama-f32")


def test_an_engine_left_to_the_end_of_its_process_ends_before_ray(
    answers: dict[str, list[list[Json]]], logs: Path
) -> None:
    log = (logs / "kinds" / "log").read_text()
    assert len(answers) == log.count("starting resource teardown")
    assert "stopping the engine" not in log


@pytest.fixture(scope="module")
def rescored(
    scene: Scene, logs: Path, model: Model, answers: dict[str, list[list[Json]]]
) -> dict[str, list[Json]]:
    """Stock vLLM's logprobs of what each layout has sampled, and its answers to long prompts."""
    given = {
        name: [
            [*prompt, *sampled] for prompt, sampled in zip(prompts(), tokens(found[1]), strict=True)
        ]
        for name, found in answers.items()
    }
    batches = [batch(texts, max_tokens=1, prompt_logprobs=0) for texts in given.values()]
    stock = engine(model("llama", "f32"), dtype="float32", max_model_len=POSITIONS)
    (found,) = run_engines(scene, logs / "rescored", [(stock, [*batches, *_long()])])
    return dict(zip([*given, "last rows", "all rows"], found, strict=True))


@pytest.mark.parametrize("name", LAYOUTS)
def test_all_ranks_go_on_from_the_same_sampled_token(
    name: str, answers: dict[str, list[list[Json]]], rescored: dict[str, list[Json]]
) -> None:
    # A rank that fed itself another token would have shifted every logprob behind it.
    assert max(_differences(answers[name][1], rescored[name])) < 1e-3


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_last_gpu_computes_its_last_layer_for_rows_that_are_read(
    name: str, answers: dict[str, list[list[Json]]], rescored: dict[str, list[Json]]
) -> None:
    _, _, last_rows, all_rows, totals = answers[name]
    assert tokens(last_rows) == tokens(rescored["last rows"])
    assert tokens(all_rows) == tokens(rescored["all rows"])
    for found, stock in zip(all_rows, rescored["all rows"], strict=True):
        for mine, theirs in zip(found["prompt_logprobs"], stock["prompt_logprobs"], strict=True):
            assert mine == pytest.approx(theirs, abs=1e-3)
    left_out = [rank["left_out_mlp_tokens"] for rank in totals if rank["left_out_mlp_tokens"]]
    assert len(left_out) == LAST_GPUS.get(name, 0)
    # Of the long prompt, and of the short one if it is in the same step; none for logprobs.
    most = sum(map(len, LONG)) - len(LONG)
    assert all(len(LONG[0]) - 1 <= tokens_left_out <= most for tokens_left_out in left_out)


def test_the_ranks_of_a_mixed_stage_would_not_agree_by_themselves(
    answers: dict[str, list[list[Json]]], rescored: dict[str, list[Json]]
) -> None:
    assert tokens(answers[UNSHARED][0]) == tokens(answers["mixed stage"][0])
    assert max(_differences(answers[UNSHARED][1], rescored[UNSHARED])) > 0.1


def _differences(answers: list[Json], scored: list[Json]) -> list[float]:
    """Largest difference, for each prompt, of the sampled tokens' logprobs from stock vLLM's."""
    return [
        max(
            abs(left - right)
            for left, right in zip(
                _values(answer["logprobs"][0], answer["tokens"][0]),
                _values(stock["prompt_logprobs"][-len(answer["tokens"][0]) :], answer["tokens"][0]),
                strict=True,
            )
        )
        for answer, stock in zip(answers, scored, strict=True)
    ]


def _values(logprobs: list[dict[str, float]], sampled: list[int]) -> list[float]:
    return [at[str(token)] for at, token in zip(logprobs, sampled, strict=True)]

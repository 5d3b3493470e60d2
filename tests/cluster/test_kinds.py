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
CPU = "what a CPU samples"
SAMPLED = {"temperature": 1.0, "seed": 5, "max_tokens": 16, "logprobs": 0}
RANDOM = '''"""Random numbers of pretended GPUs differ from a CPU's, as those of real ones do."""
import torch
draw = torch.Tensor.exponential_
def exponential_(self, *args, **kwargs):
    draw(self, *args, **kwargs)
    return draw(self, *args, **kwargs)
torch.Tensor.exponential_ = exponential_
'''


def _arguments(model: Path, layout: list[list[str]], site: Path) -> Json:
    ranks = sum(map(len, layout))
    keys = {"layout": layout, "cpu": {"ranks_per_socket": ranks}, "warmup": {"step_timeout_s": 60}}
    keys["gpu"] = {"env": {"PYTHONPATH": str(site)}}
    sizes = (len(layout), len(layout[0]))
    return engine(model, *sizes, dtype="float32", **hetero(**keys))


@pytest.fixture(scope="module")
def answers(
    scene: Scene, logs: Path, model: Model, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[list[Json]]]:
    site = tmp_path_factory.mktemp("site")
    (site / "sitecustomize.py").write_text(RANDOM)
    ray: dict[str, Any] = {
        "num_cpus": 2, "num_gpus": 4, "object_store_memory": 100 << 20, "include_dashboard": False
    }  # fmt: skip
    batches = [batch(prompts()), batch(prompts(), **SAMPLED)]
    runs = [(_arguments(model("llama", "f32"), kinds, site), batches) for kinds in LAYOUTS.values()]
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
    """Stock vLLM's logprobs of what each layout has sampled, and what it samples itself."""
    given = {
        name: [
            [*prompt, *sampled] for prompt, sampled in zip(prompts(), tokens(found[1]), strict=True)
        ]
        for name, found in answers.items()
    }
    batches = [batch(texts, max_tokens=1, prompt_logprobs=0) for texts in given.values()]
    batches.append(batch(prompts(), **SAMPLED))
    run = (engine(model("llama", "f32"), dtype="float32"), batches)
    (found,) = run_engines(scene, logs / "rescored", [run])
    return dict(zip([*given, CPU], found, strict=True))


@pytest.mark.parametrize("name", LAYOUTS)
def test_all_ranks_go_on_from_the_same_sampled_token(
    name: str, answers: dict[str, list[list[Json]]], rescored: dict[str, list[Json]]
) -> None:
    # A rank that fed itself another token would have shifted every logprob behind it.
    for answer, scored in zip(answers[name][1], rescored[name], strict=True):
        sampled = answer["tokens"][0]
        wanted = _values(scored["prompt_logprobs"][-len(sampled) :], sampled)
        assert _values(answer["logprobs"][0], sampled) == pytest.approx(wanted, abs=1e-3)


def _values(logprobs: list[dict[str, float]], sampled: list[int]) -> list[float]:
    return [at[str(token)] for at, token in zip(logprobs, sampled, strict=True)]


def test_the_ranks_of_a_mixed_group_would_have_sampled_otherwise(
    answers: dict[str, list[list[Json]]], rescored: dict[str, list[Json]]
) -> None:
    # Else the test above proves nothing: the first rank decides, and draws as no CPU rank does.
    drawn = [tokens(answers[name][1]) for name in LAYOUTS]
    assert drawn[0] == drawn[1] == drawn[2]
    on_cpu = tokens(rescored[CPU])
    assert sum(a != b for a, b in zip(drawn[1], on_cpu, strict=True)) > len(on_cpu) / 2

"""Speculative decoding gives the tokens that there would be without it, and gives some at once.

Prompts are made of what the model says, so that looking for the last tokens in them finds what it
is going to say.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from drafters import write_draft_model, write_eagle3_head, write_eagle_head, write_mtp_model
from engines import (
    IN_THIS_PROCESS,
    Json,
    Model,
    Stock,
    batch,
    engine,
    hetero,
    metrics,
    run_engines,
    tokens,
)
from leftovers import Scene

from ray_hetero.cli.demo.model import DemoShape, write_demo_model

pytestmark = pytest.mark.timeout(2400)

DRAFTED = 3
"""Draft tokens of a request in a step."""
NGRAM = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}
COUNTS = "vllm:spec_decode"
SCARCE = {"max_num_seqs": 12, "block_size": 32, "num_gpu_blocks_override": 140}
"""Twelve prompts fit into the blocks, and their answers do not."""
LAYOUTS = {
    "one rank": [["cpu"]],
    "tensor parallel": [["cpu", "cpu"]],
    "pipeline": [["cpu"], ["cpu"]],
    "pipeline of groups": [["cpu", "cpu"], ["cpu", "cpu"]],
    "gpu stage last": [["cpu"], ["gpu"]],
    "gpu stage first": [["gpu"], ["cpu"]],
    "mixed stage": [["gpu", "cpu"]],
}
OF_DRAFTERS = ("tensor parallel", "pipeline", "gpu stage last", "mixed stage")
THREE_STAGES = [["cpu"], ["cpu"], ["cpu"]]

Drafters = Callable[[str], Json]
"""The fixture `drafters`: a speculative configuration, by its method."""


@pytest.fixture(scope="module")
def drafters(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Drafters:
    root, target = tmp_path_factory.mktemp("drafters"), model("llama", "f32")
    models = {
        "draft_model": write_draft_model(root / "draft"),
        "eagle": write_eagle_head(root / "eagle", target),
        "eagle3": write_eagle3_head(root / "eagle3", target),
    }

    def config(method: str) -> Json:
        given = NGRAM if method == "ngram" else {"method": method, "model": str(models[method])}
        return {**given, "num_speculative_tokens": DRAFTED}

    return config


@pytest.fixture(scope="module")
def repeating(stock: Stock) -> list[list[int]]:
    """Prompts of which each holds, one after the other, what the model has said before."""
    said = [token for answer in stock("llama-f32") for token in answer]
    return [(said[7 * at :] + said[: 5 * at])[: 380 - 9 * at] for at in range(12)]


def _speculating(model: Model, layout: list[list[str]], drafts: Json, **arguments: Any) -> Json:
    ranks = sum(map(len, layout))
    ours = hetero(layout=layout, cpu={"ranks_per_socket": ranks}, warmup={"step_timeout_s": 60})
    return engine(
        model("llama", "f32"), len(layout), len(layout[0]), dtype="float32",
        disable_log_stats=False, speculative_config=drafts, **{**ours, **arguments},
    )  # fmt: skip


def _accepted(counts: Sequence[Json]) -> float:
    """Share of the draft tokens that were accepted."""
    found = {name: value for count in counts for name, value in count.items()}
    drafted = found[f"{COUNTS}_num_draft_tokens"]
    assert drafted > 100
    return float(found[f"{COUNTS}_num_accepted_tokens"] / drafted)


def test_a_pipeline_gives_the_same_tokens_also_where_requests_lose_their_blocks(
    scene: Scene, logs: Path, model: Model, repeating: list[list[int]], drafters: Drafters
) -> None:
    asked = batch(repeating, max_tokens=100)
    runs = [
        (engine(model("llama", "f32"), dtype="float32"), [asked]),
        (_speculating(model, LAYOUTS["pipeline"], drafters("ngram"), **SCARCE),
         [asked, metrics(COUNTS), metrics("vllm:num_preemptions")]),
    ]  # fmt: skip
    (wanted,), (found, counts, preempted) = run_engines(
        scene, logs / "scarce", runs, extra=IN_THIS_PROCESS
    )
    assert tokens(found) == tokens(wanted)
    assert _accepted(counts) > 0.2
    assert preempted[0]["vllm:num_preemptions"] > 0


@pytest.fixture(scope="module")
def without(scene: Scene, logs: Path, model: Model, repeating: list[list[int]]) -> list[list[int]]:
    """What stock vLLM says without drafts."""
    run = (engine(model("llama", "f32"), dtype="float32"), [batch(repeating, max_tokens=40)])
    ((found,),) = run_engines(scene, logs / "without", [run], extra=IN_THIS_PROCESS)
    return tokens(found)


def _compare(
    scene: Scene, folder: Path, engines: Sequence[Json], asked: Json, wanted: list[list[int]],
) -> None:  # fmt: skip
    ray: Json = {
        "num_cpus": 2, "num_gpus": 2, "object_store_memory": 100 << 20, "include_dashboard": False
    }  # fmt: skip
    found = run_engines(
        scene,
        folder,
        [(one, [asked, metrics(COUNTS)]) for one in engines],
        ray=ray,
        extra={"RAY_HETERO_PRETEND_GPU": "1", **IN_THIS_PROCESS},
    )
    for answers, counts in found:
        assert tokens(answers) == wanted
        assert _accepted(counts) > 0.4


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_n_grams_in_every_layout(
    name: str, scene: Scene, logs: Path, model: Model, repeating: list[list[int]],
    without: list[list[int]], drafters: Drafters,
) -> None:  # fmt: skip
    ours = _speculating(model, LAYOUTS[name], drafters("ngram"))
    asked = batch(repeating, max_tokens=40)
    _compare(scene, logs / f"ngram-{name}".replace(" ", "-"), [ours], asked, without)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*OF_DRAFTERS, "gpu stage first"])
def test_suffixes_of_earlier_answers(
    name: str, scene: Scene, logs: Path, model: Model, repeating: list[list[int]],
    without: list[list[int]],
) -> None:  # fmt: skip
    pytest.importorskip("arctic_inference", reason="needs arctic-inference, which drafts for it")
    drafts = {"method": "suffix", "num_speculative_tokens": DRAFTED}
    ours = _speculating(model, LAYOUTS[name], drafts)
    asked = batch(repeating, max_tokens=40)
    _compare(scene, logs / f"suffix-{name}".replace(" ", "-"), [ours], asked, without)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["draft_model", "eagle", "eagle3"])
def test_drafters_on_the_last_stage(
    method: str, scene: Scene, logs: Path, model: Model, repeating: list[list[int]],
    without: list[list[int]], drafters: Drafters,
) -> None:  # fmt: skip
    layouts = [LAYOUTS[name] for name in OF_DRAFTERS]
    if method == "eagle3":
        # What a drafter reads of the first stage passes the second one.
        layouts.append(THREE_STAGES)
    ours = [_speculating(model, layout, drafters(method)) for layout in layouts]
    _compare(scene, logs / method, ours, batch(repeating, max_tokens=40), without)


def _in_bf16(model: Model, draft: Path, layout: str, **cpu: Any) -> Json:
    """An engine of the kernels of CPU ranks, which a draft model of the same format uses too."""
    drafts = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": DRAFTED}
    ours = _speculating(model, LAYOUTS[layout], drafts, **SCARCE)
    of_ranks = ours["additional_config"]["ray_hetero"]["cpu"]
    of_ranks |= cpu
    return ours | {"model": str(model("llama", "bf16")), "dtype": "bfloat16"}


OF_DRAFTER = re.compile(r"(\d+) layers of the draft model are computed as one operator")


def test_a_model_that_drafts_for_itself_is_right_in_every_draft(
    scene: Scene, logs: Path, model: Model, repeating: list[list[int]]
) -> None:
    ours = _in_bf16(model, model("llama", "bf16"), "pipeline")
    asked = [batch(repeating, max_tokens=60), metrics(COUNTS), metrics("vllm:num_preemptions")]
    ((_, counts, preempted),) = run_engines(
        scene, logs / "itself", [(ours, asked)], extra=IN_THIS_PROCESS
    )
    # Prompts, drafts of drafts, rejected ones and requests that lose their blocks: a wrong place of
    # a key or a value gives wrong drafts.
    assert _accepted(counts) > 0.97
    assert preempted[0]["vllm:num_preemptions"] > 0
    assert OF_DRAFTER.findall((logs / "itself" / "log").read_text(errors="replace")) == ["4"]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["one rank", "tensor parallel"])
def test_a_draft_model_as_one_operator_drafts_what_it_drafts_by_operators(
    scene: Scene, logs: Path, model: Model, repeating: list[list[int]], tmp_path: Path, layout: str
) -> None:
    half = write_demo_model(tmp_path / "half", shape=DemoShape(layers=2), dtype="bf16")
    asked = [batch(repeating, max_tokens=60), metrics(COUNTS)]
    engines = [_in_bf16(model, half, layout, fuse_layers=fuses) for fuses in (True, False)]
    folder = logs / f"half-{layout}".replace(" ", "-")
    (one, fused), (other, single) = run_engines(
        scene, folder, [(engine, asked) for engine in engines], extra=IN_THIS_PROCESS
    )
    assert 0.2 < _accepted(single) < 0.97
    assert abs(_accepted(fused) - _accepted(single)) < 0.04
    same = [mine == theirs for mine, theirs in zip(tokens(one), tokens(other), strict=True)]
    assert sum(same) >= len(same) - 2  # bfloat16: some tokens are as likely as others
    found = OF_DRAFTER.findall((folder / "log").read_text(errors="replace"))
    assert found == (["2"] if layout == "one rank" else [])


@pytest.mark.slow
def test_layers_of_the_models_own_checkpoint_draft(
    scene: Scene, logs: Path, model: Model, repeating: list[list[int]],
    without: list[list[int]], tmp_path: Path,
) -> None:  # fmt: skip
    path = write_mtp_model(tmp_path / "mtp", model("llama", "f32"))
    drafts = {"method": "mtp", "num_speculative_tokens": DRAFTED}
    layouts = [LAYOUTS[name] for name in ("pipeline", "mixed stage")]
    ours = [_speculating(model, layout, drafts) | {"model": str(path)} for layout in layouts]
    _compare(scene, logs / "mtp", ours, batch(repeating, max_tokens=40), without)


FEW = [100, 101, 102, 103]
"""The tiny vocabulary."""
SAMPLES = 1500
LENGTH = 3


@pytest.mark.slow
def test_sampled_tokens_have_the_distribution_that_they_have_without_drafts(
    scene: Scene, logs: Path, model: Model, drafters: Drafters
) -> None:
    given = [[FEW[(at * at + at // 3) % 4] for at in range(60)]]
    asked = batch(
        given, temperature=1.0, n=SAMPLES, max_tokens=LENGTH, allowed_token_ids=FEW, seed=None
    )
    pipeline = LAYOUTS["pipeline"]
    runs = [
        (engine(model("llama", "f32"), dtype="float32"), [asked, asked]),
        (_speculating(model, pipeline, drafters("ngram")), [asked, metrics(COUNTS)]),
    ]
    (first, second), (ours, counts) = run_engines(
        scene, logs / "sampled", runs, extra=IN_THIS_PROCESS
    )
    known = [_said(first), _said(second)]
    assert _distance(*known) < 5
    assert _distance(known[0] + known[1], _said(ours)) < 5
    # Drafts that are accepted whatever the model says would be seen.
    assert _distance(known[0] + known[1], _as_drafted(given[0], known[0])) > 50
    assert 0.05 < _accepted(counts) < 0.95


def _said(answers: list[Json]) -> Counter[tuple[int, ...]]:
    counted = Counter(tuple(sample) for sample in answers[0]["tokens"])
    assert counted.total() == SAMPLES
    assert {token for sample in counted for token in sample} <= set(FEW)
    return counted


def _as_drafted(prompt: list[int], said: Counter[tuple[int, ...]]) -> Counter[tuple[int, ...]]:
    """Samples of which the first tokens are kept; then comes what the prompt has behind them."""
    made: Counter[tuple[int, ...]] = Counter()
    for sample, count in said.items():
        at = prompt.index(sample[0])
        made[tuple(prompt[at : at + LENGTH])] += count
    return made


def _distance(known: Counter[tuple[int, ...]], other: Counter[tuple[int, ...]]) -> float:
    """By how many standard deviations two samples are further apart than samples of one
    distribution are on the average (Pearson's chi-squared test of homogeneity)."""
    ratio = (known.total() / other.total()) ** 0.5
    outcomes = known.keys() | other.keys()
    chi = sum(
        (other[one] * ratio - known[one] / ratio) ** 2 / (other[one] + known[one])
        for one in outcomes
    )
    freedom = len(outcomes) - 1
    return (chi - freedom) / (2 * freedom) ** 0.5

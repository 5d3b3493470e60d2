"""The planner's prices of speculative decoding."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from plan_cases import LLAMA_8B, LLAMA_70B, MIXTRAL_8X22B, config_of, device, llama, split_of, stage
from typer.testing import CliRunner

from placement.plan.drafts import Acceptance, Drafter, Source, tokens_of_step
from placement.plan.split import Split, price_drafts
from ray_hetero.cli.main import commands
from ray_hetero.compat.engine import draft_methods
from ray_hetero.compat.engine.draft_methods import DraftMethod
from ray_hetero.planning.drafters import drafter_of
from ray_hetero.preflight.unsupported_drafters import method_named

SMALL = llama(16, 2048, 8192, (32, 8))
"""The shape of a draft model of 1.2 billion weights."""
QUESTION = {"batch": 1, "context": 4096, "max_sequences": 1}
STAGES = [stage(device("Xeon 8480+")), stage(device("H100 SXM", gib=40))]
DATA = Path(__file__).parents[1] / "data"


def split_with(drafter: Drafter | None, **question: object) -> Split:
    asked = {**QUESTION, **question}
    return split_of(LLAMA_70B, STAGES, drafter=drafter, **asked)  # type: ignore[arg-type]


def test_tokens_of_a_step() -> None:
    # 1 + 0.7 + 0.49 + 0.343
    assert tokens_of_step(3, 0.7) == pytest.approx(2.533)
    assert tokens_of_step(0, 0.7) == 1
    assert tokens_of_step(7, 1.0) == 8


def test_verifying_costs_a_socket_little_and_drafting_from_a_model_its_steps() -> None:
    plain, ngrams = split_with(None), split_with(Drafter(3))
    assert ngrams.layers == plain.layers
    assert 1 < ngrams.step_s / plain.step_s < 1.1
    # Weights are read once, keys and values of a request too.
    for one, other in zip(plain.stages, ngrams.stages, strict=True):
        assert other.decode.weights == one.decode.weights
        assert other.decode.kv == one.decode.kv
    modelled = split_with(Drafter(3, SMALL))
    weights = SMALL.weight_bytes - sum(tensor.nbytes for tensor in SMALL.embedding)
    at_least = 3 * weights / (0.85 * 3350e9)
    assert at_least < modelled.stages[-1].decode.parts()["draft"] < 1.5 * at_least
    assert "draft" not in {
        name for name, seconds in modelled.stages[0].decode.parts().items() if seconds
    }


def test_a_drafter_lies_on_the_last_stage_which_is_a_gpu() -> None:
    plain, modelled = split_with(None), split_with(Drafter(3, SMALL))
    assert modelled.stages[-1].devices.kinds == {"gpu"}
    # A layer of the 70B shape has 1.71 GB, the draft model 3 GB with its vocabulary.
    assert plain.layers[-1] - modelled.layers[-1] == pytest.approx(2, abs=1)
    gpu = modelled.ranks[-1].memory
    known = replace(Drafter(1, SMALL)).weights(1, is_first=False)
    assert known == SMALL.weight_bytes
    assert gpu.weights > known
    assert gpu.kv > plain.ranks[-1].memory.kv * modelled.layers[-1] / plain.layers[-1]


def test_a_head_has_the_vocabulary_of_its_model() -> None:
    head = drafter_of("eagle", 3, config_of("llama", 1, 4096, 14336, (32, 8), 128256), LLAMA_8B)
    assert head is not None
    layer = LLAMA_8B.layers[0].nbytes
    embedding = sum(tensor.nbytes for tensor in LLAMA_8B.embedding)
    assert head.weights(1, is_first=True) == layer
    assert head.weights(1, is_first=False) == layer + embedding
    # Layers for it lie behind the others in the model's own checkpoint.
    mtp = drafter_of("mtp", 1, "no/such/checkpoint", LLAMA_8B)
    assert mtp is not None
    # A matrix of 8192 x 4096 combines both inputs, behind a norm each; and a norm ends it.
    assert mtp.weights(1, is_first=True) == layer + 2 * (8192 * 4096 + 3 * 4096)


def test_layers_that_draft_for_some_mixtures_are_like_their_first() -> None:
    first, *_, last = MIXTRAL_8X22B.layers
    small = replace(first, tensors=first.tensors[:1])
    target = replace(
        MIXTRAL_8X22B, layers=(small, *MIXTRAL_8X22B.layers[1:]), model_type="ernie4_5_moe"
    )
    combining = 2 * (2 * 6144 * 6144 + 3 * 6144)
    for like, model_type in ((small, "ernie4_5_moe"), (last, "deepseek_v3")):
        drafter = drafter_of("mtp", 1, None, replace(target, model_type=model_type))
        assert drafter is not None
        assert drafter.weights(1, is_first=True) == like.nbytes + combining


def test_a_row_is_all_that_planning_and_refusals_know_of_a_method(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: Any = SimpleNamespace(speculative_config={"method": "new"}, spec_method=None)
    head: Any = SimpleNamespace(hf_config=SimpleNamespace(eagle_config={"reads": False}))
    found: Any = SimpleNamespace(method="new", draft_model_config=head)
    assert method_named(asked) == "new"
    row = DraftMethod("new", Source.HEAD, layers_key="reads")
    monkeypatch.setitem(draft_methods.METHODS, "new", row)
    assert method_named(asked) is None
    config = config_of("llama", 1, 4096, 14336, (32, 8), 128256)
    assert drafter_of("new", 3, config, LLAMA_8B) == drafter_of("eagle", 3, config, LLAMA_8B)
    assert drafter_of("new", 3, config, LLAMA_8B) != drafter_of(None, 3, config, LLAMA_8B)
    assert not draft_methods.reads_layers(found)
    head.hf_config.eagle_config = {}
    assert draft_methods.reads_layers(found)


@pytest.mark.parametrize(
    ("method", "drafts", "model"),
    [("ngram", 3, None), ("suffix", 3, None), (None, 3, None), ("draft_model", 3, "no/such")],
)
def test_drafts_from_elsewhere_take_no_memory(
    method: str | None, drafts: int, model: str | None
) -> None:
    assert drafter_of(method, drafts, model, LLAMA_8B) == Drafter(3) or model is not None
    found = drafter_of(method, drafts, model, LLAMA_8B)
    assert found is not None
    assert found.weights(1, is_first=False) == 0
    assert drafter_of(method, 0, model, LLAMA_8B) is None


def test_the_best_number_of_drafts() -> None:
    split = split_with(None)
    sure, unsure, never = (
        price_drafts(LLAMA_70B, split, Drafter(3), Acceptance(chance)) for chance in (0.9, 0.3, 0.0)
    )
    assert sure.best.drafts > unsure.best.drafts > never.best.drafts == 0
    assert sure.asked.drafts == 3
    assert 3 < sure.speed(sure.asked) < sure.asked.tokens
    assert next(sure.lines()).startswith("speculative decoding: 3 drafts a request, each accepted")
    assert list(never.lines())[1] == "best here at this acceptance: no drafts"
    # Steps without drafts cost what they cost otherwise, and bring one token.
    seldom = price_drafts(LLAMA_70B, split, Drafter(3), Acceptance(0.9, 0.25))
    assert seldom.asked.tokens == pytest.approx(0.75 + 0.25 * sure.asked.tokens)
    assert seldom.asked.step_s == pytest.approx(0.75 * sure.plain.step_s + 0.25 * sure.asked.step_s)
    assert "3 drafts a request in 25% of its steps, each" in next(seldom.lines())
    # Many requests leave less to be had.
    many = price_drafts(
        LLAMA_70B, split_with(None, batch=32, context=256), Drafter(3), Acceptance(0.9)
    )
    assert many.speed(many.asked) < sure.speed(sure.asked)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("70b")
    config = config_of("llama", 80, 8192, 28672, (64, 8), 128256)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def planned(model: Path, *arguments: str) -> tuple[int, str]:
    topology = str(DATA / "h100_two_8480.yaml")
    found = CliRunner().invoke(commands, ["plan", str(model), "--topology", topology, *arguments])
    return found.exit_code, found.output


def test_the_command_prices_drafts(model: Path, tmp_path: Path) -> None:
    status, table = planned(model, "--speculative", "3,0.7")
    assert status == 0
    words = " ".join(table.split())
    assert "that verifies 3 drafts a request" in words
    assert "speculative decoding: 3 drafts a request, each accepted with 0.7: 2.53" in words
    seldom = " ".join(planned(model, "--speculative", "3,0.7,0.5")[1].split())
    assert "3 drafts a request in 50% of its steps, each accepted with 0.7: 1.77" in seldom
    draft = tmp_path / "config.json"
    draft.write_text(json.dumps(config_of("llama", 16, 2048, 8192, (32, 8), 128256)))
    status, text = planned(model, "--speculative", "3,0.7", "--draft-model", str(draft), "--json")
    assert status == 0
    content = json.loads(text)
    assert content["speculation"]["asked"]["drafts"] == 3
    assert content["stages"][-1]["decode_parts_s"]["draft"] > 0


@pytest.mark.parametrize(
    "given", ["3", "0,0.5", "3,1.5", "three,0.5", "3,nan", "", "65,0.5", "3,0.7,2", "3,0.7,1,1"]
)
def test_the_command_says_what_it_expects(model: Path, given: str) -> None:
    status, text = planned(model, "--speculative", given)
    assert status == 1
    assert "--speculative: expected drafts from 1 to 64" in text
    assert planned(model, "--draft-model", str(model))[0] == 1

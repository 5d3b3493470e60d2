"""An EAGLE head learns from a target's states, and is written as vLLM reads it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

sys.path[:0] = [
    str(Path(__file__).parents[3] / "benchmarks"),
    str(Path(__file__).parents[2] / "cluster"),
]

from drafters import write_eagle_head  # noqa: E402
from drafts_on_text import MODULES, QUESTIONS, speculation, texts  # noqa: E402
from train_draft_head import (  # noqa: E402
    CODE,
    Head,
    Recipe,
    batches,
    hits,
    loss_of,
    of_target,
    padded,
    prompts,
    train,
    write,
)

from ray_hetero.cli.demo.model import write_demo_model  # noqa: E402

RECIPE = Recipe(batch=2, noise=0.0)


@pytest.fixture
def target() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
        initializer_range=0.2,
    )  # fmt: skip
    return LlamaForCausalLM(config).bfloat16().eval().requires_grad_(False)


@pytest.fixture
def answers() -> list[torch.Tensor]:
    return [torch.randint(96, (length,)) for length in (9, 12, 5, 7)]


def test_nothing_that_is_asked_later_is_learnt() -> None:
    learnt = set(prompts())
    asked = {chat[0]["content"] for chats in texts().values() for chat in chats}
    assert set(QUESTIONS[:4]) < asked
    assert len(learnt) > 700
    assert not set(CODE) & set(MODULES)
    assert not learnt & asked


def test_a_head_learns_of_its_target(
    target: Any, answers: list[torch.Tensor], capsys: pytest.CaptureFixture[str]
) -> None:
    head = Head(target.config)
    rows, real = padded(answers)
    assert rows.shape == real.shape == (4, 12)
    assert real.sum(1).tolist() == [9, 12, 5, 7]
    embedded, states = of_target(target, rows)

    def loss() -> float:
        with torch.no_grad():
            found = loss_of(
                head(embedded[:, 1:], states[:, :-1]).bfloat16(), states[:, 1:], real[:, 1:],
                target, RECIPE,
            )  # fmt: skip
        return found.item()

    before, missed = loss(), hits(head, target, answers, RECIPE)
    # Always one step, and as many as two seconds allow.
    (told,) = train(head, target, answers, RECIPE, 2.0)
    assert told["steps"] == 1
    assert "'second'" in capsys.readouterr().out
    assert loss() < before
    assert all(0 <= share <= 1 for share in missed.values())


def test_padding_does_not_count(target: Any, answers: list[torch.Tensor]) -> None:
    head = Head(target.config)
    alone = [hits(head, target, [one], RECIPE) for one in answers[:2]]
    together = hits(head, target, answers[:2], RECIPE)
    tokens = [len(one) - 1 for one in answers[:2]]
    mean = sum(one["first"] * count for one, count in zip(alone, tokens, strict=True))
    assert together["first"] == pytest.approx(mean / sum(tokens))


def test_batches_are_of_similar_length(answers: list[torch.Tensor]) -> None:
    rows, real = next(batches(answers, RECIPE, torch.Generator().manual_seed(0)))
    lengths = sorted(real.sum(1).tolist())
    assert lengths in ([5, 7], [7, 9], [9, 12])
    assert rows.shape[1] == lengths[-1]


def test_a_head_has_the_names_that_vllm_reads(target: Any, tmp_path: Path) -> None:
    """Names of a written head are those of the heads with which engines are tested."""
    demo = write_demo_model(tmp_path / "demo")
    read = load_file(write_eagle_head(tmp_path / "known", demo) / "model.safetensors")
    write(Head(target.config), demo, tmp_path / "head")
    weights = load_file(tmp_path / "head" / "model.safetensors")
    assert set(weights) == set(read)
    assert weights["fc.weight"].shape == (64, 128)
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "head" / "config.json").read_text())["num_hidden_layers"] == 1
    found = speculation("head", tmp_path / "head")
    assert found == {
        "method": "eagle", "model": str(tmp_path / "head"), "num_speculative_tokens": 3
    }  # fmt: skip

"""Prompts that a rank would end with are refused before they become requests."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from vllm.exceptions import VLLMValidationError  # noqa: E402
from vllm.v1.engine.input_processor import InputProcessor  # noqa: E402

from ray_hetero.compat.engine import input_processor  # noqa: E402

VOCABULARY, HIDDEN = 512, 8


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's own, of an engine without a tokenizer."""
    name = "_validate_model_input"
    monkeypatch.setattr(InputProcessor, name, getattr(InputProcessor, name))
    for _ in range(2):
        input_processor.refuse_prompts_that_end_ranks()
    made: Any = InputProcessor.__new__(InputProcessor)
    made.model_config = SimpleNamespace(
        max_model_len=64, runner_type="generate", is_multimodal_model=False,
        get_vocab_size=lambda: VOCABULARY, get_hidden_size=lambda: HIDDEN,
    )  # fmt: skip
    made.skip_prompt_length_check, made.mm_encoder_cache_size = False, 0
    made.renderer = SimpleNamespace(validate_token_ids=lambda tokens: None)
    return made


def ask(processor: Any, kind: str = "token", **parts: Any) -> None:
    processor._validate_model_inputs(None, {"type": kind, **parts})


def test_tokens_are_those_of_the_model(processor: Any) -> None:
    ask(processor, prompt_token_ids=[0, 17, VOCABULARY - 1])
    for wrong in (VOCABULARY, 2**31, 2**63, -1):
        with pytest.raises(VLLMValidationError, match=rf"{wrong} is out of vocab.*from 0 to 511"):
            ask(processor, prompt_token_ids=[3, wrong, 5])


def test_tokens_of_images_are_not_looked_up(processor: Any) -> None:
    processor.model_config.is_multimodal_model = True
    ask(processor, prompt_token_ids=[3, VOCABULARY + 5])
    with pytest.raises(VLLMValidationError, match="-1 is out of vocabulary"):
        ask(processor, "multimodal", prompt_token_ids=[3, -1], mm_placeholders={})


@pytest.mark.parametrize(
    ("embeddings", "said"),
    [
        (torch.zeros(3, HIDDEN + 1), r"expected a tensor \[tokens, 8\].*got \(3, 9\)"),
        (torch.zeros(3, HIDDEN, 1), r"got \(3, 8, 1\)"),
        (torch.zeros(3, HIDDEN, dtype=torch.int64), r"floating-point numbers, got torch\.int64"),
        (torch.full((3, HIDDEN), math.nan), r"24 of 24 numbers are NaN or infinite"),
        (torch.tensor([[math.inf, *[0.0] * (HIDDEN - 1)]]), r"1 of 8 numbers"),
    ],
)
def test_embeddings_are_those_of_the_model(processor: Any, embeddings: Any, said: str) -> None:
    ask(processor, "embeds", prompt_embeds=torch.zeros(3, HIDDEN, dtype=torch.bfloat16))
    with pytest.raises(VLLMValidationError, match=said):
        ask(processor, "embeds", prompt_embeds=embeddings)


def test_tokens_among_embeddings_are_compared_too(processor: Any) -> None:
    given = {"prompt_embeds": torch.zeros(2, HIDDEN), "prompt_token_ids": [5, VOCABULARY]}
    ask(processor, "embeds", **given, is_token_ids=[True, False])
    with pytest.raises(VLLMValidationError, match="out of vocabulary"):
        ask(processor, "embeds", **given, is_token_ids=[False, True])

"""Speculative decoding over a GPU and CPU ranks: tokens of stock vLLM on the GPU without it."""

from __future__ import annotations

import pytest
from gpu_host import needs_gpus
from token_checks import Answer, Case, answers_of, check

pytestmark = [pytest.mark.gpu, needs_gpus(1)]

CASES = [
    Case("llama", "float32", "c/g", drafts="ngram"),
    Case("llama", "float32", "g/c", drafts="ngram"),
    Case("llama", "float32", "gc", drafts="ngram"),
    Case("llama", "float32", "c/g", drafts="draft_model"),
    Case("llama", "float32", "g/c", drafts="draft_model"),
    Case("llama", "float32", "gc", drafts="draft_model"),
    Case("llama", "float32", "c/g", drafts="eagle"),
    Case("llama", "float32", "g/c", drafts="eagle"),
    Case("llama", "float32", "gc", drafts="eagle"),
    Case("llama", "float32", "cc/g", drafts="eagle"),
    Case("llama", "float32", "c/g", drafts="eagle3"),
    Case("llama", "float32", "gc", drafts="eagle3"),
    Case("llama", "float32", "c/g", drafts="mtp"),
    Case("llama", "float32", "gc", drafts="mtp"),
    Case("llama", "bfloat16", "c/g", is_compiled=True, drafts="ngram"),
]


answers = answers_of(CASES, "drafts")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_tokens_are_those_without_drafts(case: Case, answers: dict[Case, Answer]) -> None:
    check(case, answers)
    answer = answers[case]
    assert answer["drafted"] > 0
    # What a model says is seldom in these prompts; a drafter knows what it is going to say.
    assert answer["accepted"] > (0 if case.drafts == "ngram" else 0.3 * answer["drafted"])

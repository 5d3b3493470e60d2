"""Tensor and pipeline parallelism over two GPUs, with and without CPU ranks beside them."""

from __future__ import annotations

from pathlib import Path

import pytest
from gpu_host import needs_gpus
from token_checks import Answer, Case, answers_of, check

pytestmark = [pytest.mark.gpu, needs_gpus(2)]

CASES = [
    Case("llama", "float32", "gg/cc"),
    Case("llama", "float32", "cc/gg"),
    Case("llama", "float32", "ggcc"),
    Case("llama", "float32", "gg"),
    Case("llama", "float32", "g/g"),
    Case("llama", "float32", "g/c/g"),
    Case("llama", "float32", "gc/gc"),
    Case("llama", "bfloat16", "cc/gg", is_compiled=True),
    Case("qwen3", "float32", "gg/cc"),
    Case("mixtral", "float32", "cc/gg"),
    # The first GPU of a stage hands the tokens over; the others add what they compute themselves.
    Case("mixtral", "float32", "gg", experts=1),
    Case("mixtral", "bfloat16", "gg", experts=2, is_compiled=True),
    Case("gpt_oss", "float32", "gg", experts=2),
    Case("mixtral", "float32", "g/g", experts=1),
    Case("qwen3_moe", "bfloat16", "gg", is_long=True, experts=2, is_linked=True),
    Case("qwen3_moe", "bfloat16", "gg", is_long=True, experts=2, is_linked=True, is_split=True),
]


answers = answers_of(CASES, "two_gpus")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_tokens_are_those_of_one_gpu(case: Case, answers: dict[Case, Answer], logs: Path) -> None:
    check(case, answers)
    if case.experts:
        log = "".join(path.read_text(errors="replace") for path in logs.glob("lane*"))
        assert "are computed by rank 2 (experts, socket" in log

"""Tokens of every layout over a GPU and CPU ranks against stock vLLM on the GPU alone."""

from __future__ import annotations

import pytest
from gpu_host import needs_gpus
from token_checks import Answer, Case, answers_of, check

pytestmark = [pytest.mark.gpu, needs_gpus(1)]

CASES = [
    Case("llama", "float32", "c/g"),
    Case("llama", "float32", "g/c"),
    Case("llama", "float32", "gc"),
    Case("llama", "float32", "g"),
    Case("llama", "float32", "c/g/c"),
    Case("llama", "float32", "cc/g"),
    Case("llama", "float32", "g/cc"),
    Case("llama", "float32", "auto"),
    Case("llama", "bfloat16", "c/g", is_compiled=True),
    Case("llama", "bfloat16", "gc", is_compiled=True),
    Case("qwen3", "bfloat16", "gc", is_compiled=True),
    Case("mixtral", "float32", "gc", is_compiled=True),
    Case("llama", "float32", "c/c"),
    Case("qwen3", "float32", "c/g"),
    Case("qwen3", "float32", "gc"),
    Case("mixtral", "float32", "c/g"),
    Case("mixtral", "float32", "gc"),
    Case("gemma", "float32", "c/g"),
    Case("gemma", "float32", "g/c"),
    Case("llama-int8", "bfloat16", "c/g"),
    Case("llama-int8", "bfloat16", "g/c"),
    Case("llama-int8", "bfloat16", "gc"),
    Case("llama-fp8", "bfloat16", "c/g"),
    Case("llama-fp8", "bfloat16", "c/g", linear_backend="marlin"),
    Case("llama-w4a16", "bfloat16", "c/g"),
]


answers = answers_of(CASES, "layouts")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_tokens_are_those_of_the_gpu_alone(case: Case, answers: dict[Case, Answer]) -> None:
    check(case, answers)


@pytest.mark.parametrize("case", [c for c in CASES if c.layout in ("g", "auto")], ids=str)
def test_a_world_without_cpu_ranks_runs_as_stock_does(
    case: Case, answers: dict[Case, Answer]
) -> None:
    for name in ("is_v2_runner", "is_async"):
        assert answers[case][name] == answers[case.reference][name]

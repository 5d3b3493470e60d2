"""Experts on sockets beside GPUs: tokens of the GPU alone, which runs as in stock vLLM."""

from __future__ import annotations

from pathlib import Path

import pytest
from gpu_host import needs_gpus
from token_checks import Answer, Case, answers_of, check

pytestmark = [pytest.mark.gpu, needs_gpus(1)]

CASES = [
    Case("mixtral", "float32", "g", experts=2),
    Case("mixtral", "float32", "g", experts=1, is_long=True),
    Case("mixtral", "float32", "g", experts=1, drafts="ngram"),
    Case("mixtral", "bfloat16", "g", experts=2, is_compiled=True),
    Case("mixtral", "bfloat16", "g", experts=1, is_compiled=True, is_long=True),
    Case("mixtral", "bfloat16", "g", experts=2, is_long=True, is_linked=True, is_split=True),
    Case("mixtral", "bfloat16", "g", experts=1, is_compiled=True, is_long=True, is_linked=True),
    Case("mixtral", "bfloat16", "g", experts=2, is_compiled=True, slots="always"),
    Case("mixtral", "bfloat16", "g", experts=1, is_compiled=True, slots="fixed", drafts="ngram"),
    Case("gpt_oss", "bfloat16", "g", experts=1, is_compiled=True, slots="always"),
    Case("qwen3_moe", "float32", "g", experts=2),
    Case("glm4_moe", "float32", "g", experts=2),
    Case("gpt_oss", "float32", "g", experts=2),
    # No latent attention of vLLM's on GPUs computes float32.
    Case("deepseek_v2", "bfloat16", "g", experts=2),
    Case("deepseek_v3", "bfloat16", "g", experts=2),
    Case("deepseek_v3", "bfloat16", "g", experts=1, is_compiled=True),
    Case("gpt_oss", "bfloat16", "g", experts=1, is_compiled=True),
]
"""With compiled ones handovers are in CUDA graphs."""


answers = answers_of(CASES, "experts")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_tokens_are_those_of_the_gpu_alone(
    case: Case, answers: dict[Case, Answer], logs: Path
) -> None:
    check(case, answers)
    log = "".join(path.read_text(errors="replace") for path in logs.glob("lane*"))
    assert "are computed by rank 1 (experts, socket" in log
    assert "refuses stream memory operations" not in log
    assert (answers[case]["linked_tokens"] > 0) == case.is_linked
    assert (answers[case]["slot_copied"] > 0) == bool(case.slots)
    if case.is_linked:
        assert "experts of steps of 64 tokens and more" in log
        assert ("together with the cores" in log) or not case.is_split
        assert "expanded by torch's operators" not in log


# Stock vLLM's choice with drafts is another one.
@pytest.mark.parametrize("case", [case for case in CASES if not case.drafts], ids=str)
def test_the_gpu_runs_as_in_stock_vllm(case: Case, answers: dict[Case, Answer]) -> None:
    for name in ("is_v2_runner", "is_async"):
        assert answers[case][name] == answers[case.reference][name]

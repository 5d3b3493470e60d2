"""Tensor and pipeline parallelism over two GPUs, with and without CPU ranks beside them."""

from __future__ import annotations

from pathlib import Path

import pytest
from gpu_host import IS_PRETENDED, Checkpoint, needs_gpus
from leftovers import Scene
from token_checks import Answer, Case, asked_for, check, run_cases, write_report

pytestmark = [pytest.mark.gpu, needs_gpus(2)]

LIMIT_S = 1500 if IS_PRETENDED else 290
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
]


@pytest.fixture(scope="module")
def answers(
    scene: Scene, logs: Path, checkpoint: Checkpoint, request: pytest.FixtureRequest
) -> dict[Case, Answer]:
    found = run_cases(scene, logs, checkpoint, asked_for(request, CASES), LIMIT_S)
    write_report(found, "two_gpus")
    return found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_tokens_are_those_of_one_gpu(case: Case, answers: dict[Case, Answer]) -> None:
    check(case, answers)

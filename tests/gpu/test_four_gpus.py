"""Four and eight GPUs in one stage or several, beside expert ranks and CPU ranks.

Pretended GPUs have been asked the same in tests/cluster/test_many_gpus.py.
"""

from __future__ import annotations

import pytest
from gpu_host import needs_gpus
from token_checks import Answer, Case, answers_of, check

pytestmark = pytest.mark.gpu

CASES = [
    Case("llama", "float32", "cc/gggg"),
    Case("llama", "float32", "g/g/g/g"),
    Case("mixtral", "float32", "gggg", experts=1),
    Case("mixtral", "bfloat16", "gggg", experts=2, is_compiled=True),
    Case("mixtral", "float32", "gg/gg", experts=2),
    Case("qwen3_moe", "bfloat16", "gggg", is_long=True, experts=2, is_linked=True),
    Case("qwen3_moe", "bfloat16", "gggg", is_long=True, experts=2, is_linked=True, is_split=True),
]
WIDE = [
    Case("mixtral", "float32", "gggggggg", experts=2),
    Case("qwen3_moe", "bfloat16", "gggggggg", is_long=True, experts=2, is_linked=True),
]

answers = answers_of(CASES, "four_gpus")
wide_answers = answers_of(WIDE, "eight_gpus")


@needs_gpus(4)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_tokens_of_four_gpus_are_those_of_one(case: Case, answers: dict[Case, Answer]) -> None:
    check(case, answers)


@needs_gpus(8)
@pytest.mark.parametrize("case", WIDE, ids=str)
def test_tokens_of_eight_gpus_are_those_of_one(
    case: Case, wide_answers: dict[Case, Answer]
) -> None:
    check(case, wide_answers)

"""Today's mixtures as small random checkpoints, experts on sockets: tokens of the GPU alone.

A family for which stock vLLM has no kernel on the host is skipped with what vLLM says.  Answers
are in float32: logits of such weights in bfloat16 are near-ties at every other token.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from gpu_host import needs_gpus
from token_checks import Answer, Case, answers_of, check

pytestmark = [pytest.mark.gpu, needs_gpus(1)]

RECURRENT = ("Qwen3NextForCausalLM", "Qwen3_5MoeForCausalLM")
"""FlashInfer's kernel for their prompts is not on every host; Triton's is."""
NAMES = (
    *RECURRENT, "NemotronHForCausalLM", "MiniMaxM2ForCausalLM", "Gemma4ForCausalLM",
    "GptOssForCausalLM", "DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM", "DeepseekV4ForCausalLM",
)  # fmt: skip
SPARSE = ("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM", "DeepseekV4ForCausalLM")
"""Their attention has kernels for bfloat16 only."""
CASES = [
    Case(
        name,
        "bfloat16" if name in SPARSE else "float32",
        "g",
        experts=1,
        gdn_prefill_backend="triton" if name in RECURRENT else "",
    )
    for name in NAMES
]

answers = answers_of(CASES, "families")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.model)
def test_tokens_are_those_of_the_gpu_alone(
    case: Case, answers: dict[Case, Answer], logs: Path
) -> None:
    log = "".join(path.read_text(errors="replace") for path in logs.glob("lane*"))
    if "error" in answers[case.reference]:
        said = sorted(set(re.findall(r"core\.py:\d+\] (\w+Error: .*)", log)))
        pytest.skip(f"stock vLLM has not started on this GPU; its engines say {said}")
    check(case, answers)
    assert "are computed by rank 1 (experts, socket" in log

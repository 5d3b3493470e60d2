"""Today's mixtures as small random checkpoints, experts on sockets: tokens of the GPU alone.

A family for which stock vLLM has no kernel on the host is skipped with what vLLM says.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from gpu_host import needs_gpus
from token_checks import Answer, Case, answers_of, check

pytestmark = [pytest.mark.gpu, needs_gpus(1)]

RECURRENT = ("Qwen3NextForCausalLM", "Qwen3_5MoeForCausalLM")
"""FlashInfer's kernel for their prompts is not on every host; Triton's is."""
NAMES = (
    *RECURRENT, "NemotronHForCausalLM", "MiniMaxM2ForCausalLM", "Gemma4ForCausalLM",
    "GptOssForCausalLM", "DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM",
    "DeepseekV4ForCausalLM",
)  # fmt: skip
CASES = [
    Case(
        name, "bfloat16", "g", experts=1, gdn_prefill_backend="triton" if name in RECURRENT else ""
    )
    for name in NAMES
]

answers = answers_of(CASES, "families")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.model)
def test_tokens_are_those_of_the_gpu_alone(
    case: Case, answers: dict[Case, Answer], logs: Path
) -> None:
    alone = answers[case.reference]
    if "error" in alone:
        pytest.skip(f"stock vLLM on this GPU: {alone['error'].strip()[:400]}")
    check(case, answers)
    log = "".join(path.read_text(errors="replace") for path in logs.glob("lane*"))
    assert "are computed by rank 1 (experts, socket" in log

"""vLLM's FlashAttention 3 (Shah et al., 2024) in a CPU rank, whose own vLLM is the build for CPUs.

Uses: the operator of vLLM's CUDA build for it, by the names of its arguments, which are compared
with those that are known here when it is first used.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ray_hetero.log import logger

LIBRARY = Path("vllm", "vllm_flash_attn", "_vllm_fa3_C.abi3.so")
"""Path of the library in vLLM's CUDA build."""
HOPPER = 9
"""Compute capability, without its second number, of the GPUs that it is for."""
PLAIN: dict[str, Any] = {
    "window_size_left": -1, "window_size_right": -1, "softcap": 0.0, "is_rotary_interleaved": True,
    "num_splits": 0, "sm_margin": 0, "cp_world_size": 1, "cp_rank": 0,
}  # fmt: skip
"""Arguments without which attention is plain, as vLLM gives them; all others may be None."""
ASKED = frozenset({
    "q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "softmax_scale",
    "is_causal",
})  # fmt: skip

FlashAttention = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""Takes what `ASKED` names by these names: [tokens, heads, size] bf16, starts of the sequences
int32, numbers.  Answers values [tokens, heads, size] and their log-sum-exps [heads, tokens]."""


@functools.cache
def flash_attention_3(device: torch.device) -> FlashAttention | None:
    """The kernel for a GPU; None where the GPU is another one or the kernel is not to be had."""
    if torch.cuda.get_device_capability(device)[0] != HOPPER:
        return None
    # The first one is that of the CPU build, which has none.
    found = next((path for entry in sys.path if (path := Path(entry) / LIBRARY).is_file()), None)
    try:
        if found is None:
            raise OSError(f"there is no {LIBRARY} on this rank's path")
        torch.ops.load_library(str(found))
        operator = torch.ops._vllm_fa3_C.fwd.default
        plain = others(operator._schema)
    except (OSError, AttributeError, UnexpectedArgumentError) as error:
        logger.warning(
            "vLLM's FlashAttention 3 cannot be used for prompts (%s). torch's FlashAttention 2 is "
            "used instead: attention to thousands of tokens takes up to twice as long",
            error,
        )
        return None

    def attend(**asked: Any) -> tuple[torch.Tensor, torch.Tensor]:
        values, lse = operator(**plain, **asked)[:2]
        return values, lse

    return attend


class UnexpectedArgumentError(Exception):
    """The operator of this vLLM wants something that is not known here."""


def others(schema: Any) -> dict[str, Any]:
    """Arguments of the operator that are not among those asked for.

    Raises:
        UnexpectedArgumentError: it lacks an argument that is given here, or has one more that
            cannot be None.

    """
    arguments = {argument.name: argument for argument in schema.arguments}
    if missing := sorted((ASKED | PLAIN.keys()) - arguments.keys()):
        raise UnexpectedArgumentError(f"{schema.name} has no argument {', '.join(missing)}")
    given = dict(PLAIN)
    for name in arguments.keys() - ASKED - PLAIN.keys():
        if arguments[name].type.kind() != "OptionalType":
            raise UnexpectedArgumentError(f"{schema.name} wants an argument {name}")
        given[name] = None
    return given

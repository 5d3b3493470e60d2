"""States of layers that keep one of constant size for each request, as native calls take them.

vLLM keeps two tensors of a layer: inputs [states, taps - 1, channels] of its convolution, and what
its heads hold [states, …].
"""

from __future__ import annotations

from typing import Any

import torch

TYPES = (torch.float32, torch.bfloat16)
"""Types of what heads hold."""


def are_known(states: Any, inputs: tuple[int, ...], heads: tuple[int, ...]) -> bool:
    """Whether the states of a layer lie as native calls expect.

    Args:
        states: vLLM's of the layer, which may have none yet.
        inputs: shape of one state's inputs, which are bf16.
        heads: shape of what the heads of one state hold.

    """
    if len(states) != 2 or len(states[0]) != len(states[1]):
        return False
    found_inputs, found_heads = states
    return bool(
        found_inputs.dtype == torch.bfloat16
        and found_heads.dtype in TYPES
        and tuple(found_inputs.shape[1:]) == inputs
        and tuple(found_heads.shape[1:]) == heads
        and found_inputs[0].is_contiguous()
        and found_heads[0].is_contiguous()
    )


def native(states: Any, numbers: torch.Tensor) -> dict[str, Any]:
    """Arguments of a native call that say which states a step has.

    Args:
        states: vLLM's of the layer, which `are_known`.
        numbers: [tokens], int32, of the tokens' states; it must outlive the call.

    """
    inputs, heads = states
    return {
        "inputs": (inputs.data_ptr(), inputs.stride(0)),
        "heads": (heads.data_ptr(), heads.stride(0), heads.dtype == torch.float32),
        "states": len(heads),
        "numbers": numbers.data_ptr(),
        "m": len(numbers),
    }

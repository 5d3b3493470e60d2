"""vLLM's Gated DeltaNet on a CPU rank: what its weights are, and which states a step has."""

from __future__ import annotations

from typing import Any

import torch

from ray_hetero.compat.patching import original

ACTIVATIONS = ("silu", "swish", "sigmoid")
"""Functions of output gates that are known."""
UNITS = 256
"""Rows of a unit matrix that are multiplied at once."""


def why_unknown(module: Any) -> str:
    """Why a layer with a linear state does more than is known; or "".

    Args:
        module: vLLM's, from the products of its input to that of its output.

    Uses: `QwenGatedDeltaNetAttention` and `RMSNormGated`.
    """
    from vllm.model_executor.layers.layernorm import RMSNormGated
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import (
        QwenGatedDeltaNetAttention,
    )

    if type(module) is not QwenGatedDeltaNetAttention or hasattr(module, "in_proj_qkv"):
        return f"the linear state is another one ({type(module).__name__})"
    norm = module.norm
    if (
        type(norm) is not RMSNormGated
        or norm.activation not in ACTIVATIONS
        or norm.group_size is not None
        or not norm.norm_before_gate
        or norm.bias is not None
    ):
        return f"the norm of its heads is another one ({type(norm).__name__})"
    if module.activation != "silu" or module.conv1d.bias is not None:
        return "its convolution has a bias, or another activation"
    if module.disable_tp_for_ba_proj:
        return "each rank has the gates of all heads"
    if type(module.in_proj_ba.quant_method) is not UnquantizedLinearMethod:
        return "the product for its gates is quantised"
    return ""


def convolution(module: Any) -> torch.Tensor:
    """Weights of a layer's convolution, [channels, taps].

    Args:
        module: vLLM's, whose weights are loaded: some processors have them packed.

    Uses: `gdn_attention._unpacked_conv_weight`.
    """
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    found: torch.Tensor = original(gdn_attention, "_unpacked_conv_weight")(module)
    return found


def weight_of(linear: Any, dtype: torch.dtype) -> torch.Tensor:
    """Weight [N, K] of a small linear layer that vLLM's own kernels compute, in whichever form.

    Each product has one factor that is not zero, so that none is rounded.

    Args:
        linear: vLLM's, not quantised, whose weights are loaded.
        dtype: that its inputs have.

    """
    size = linear.input_size_per_partition
    rows = []
    for first in range(0, size, UNITS):
        units = torch.zeros(min(UNITS, size - first), size, dtype=dtype)
        units[:, first:].fill_diagonal_(1)
        rows.append(linear(units)[0])
    return torch.cat(rows).T.contiguous()


def states_of_tokens(metadata: Any, tokens: int) -> torch.Tensor | None:
    """Numbers of the states of a step's tokens, [tokens], int32, if each request decodes one token.

    Args:
        metadata: vLLM's of the step.
        tokens: of the step.

    Uses: `GDNAttentionMetadata`, whose requests without a state before are prompts.
    """
    from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata

    if (
        type(metadata) is not GDNAttentionMetadata
        or metadata.num_prefills
        or metadata.num_spec_decodes
        or metadata.num_accepted_tokens is not None
        or not metadata.num_decodes == metadata.num_decode_tokens == metadata.num_actual_tokens
        or metadata.num_actual_tokens > tokens
    ):
        return None
    found = metadata.non_spec_state_indices_tensor
    if found is None or found.dtype != torch.int32 or len(found) < metadata.num_actual_tokens:
        return None
    return numbers_of_rows(found[: metadata.num_actual_tokens], tokens)


def numbers_of_rows(found: torch.Tensor, rows: int) -> torch.Tensor:
    """Numbers of states, [rows], int32, of which those behind the given ones are 0.

    Args:
        found: [tokens], int32, maybe a column of a table.
        rows: of the step, as many as tokens or more.

    """
    if len(found) == rows and found.is_contiguous():
        return found
    numbers = torch.zeros(rows, dtype=torch.int32)
    numbers[: len(found)] = found
    return numbers

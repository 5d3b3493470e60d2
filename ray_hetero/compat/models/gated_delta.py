"""vLLM's Gated DeltaNet on a CPU rank: what its weights are, and which states a step has."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.nn import functional

from ray_hetero.compat.patching import original, replace

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


def verify_few_drafts() -> None:
    """Verify drafts of requests that have fewer than the most.

    Replaces: `gdn_attention._spec_forward`.
    Uses: `_custom_ops.fused_sigmoid_gating_delta_rule_update_spec_cpu`.
    Why: the state of a convolution has a column more for each of the most drafts.  In vLLM 0.32
    `_spec_forward` puts the inputs of a step at its end, and the next one begins at the column of
    the last token that was accepted, counted from its start.  Requests with fewer drafts, as
    n-grams give, get other tokens without a message, or the step ends with an error of sizes.
    Can go when: vLLM 0.32 is not supported; 0.33 writes them where they are read.
    """
    from vllm import _custom_ops
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    def make(stock: Any) -> Any:
        @functools.wraps(stock)
        def forward_few(
            layer: Any, attn_metadata_i: Any, mixed_qkv_spec: torch.Tensor, b_spec: torch.Tensor,
            a_spec: torch.Tensor, conv_buf: torch.Tensor, ssm_state: torch.Tensor, width: int,
            state_len: int,
        ) -> Any:  # fmt: skip
            count = attn_metadata_i.num_spec_decodes
            starts = attn_metadata_i.spec_query_start_loc[: count + 1].int()
            if bool((starts.diff() == state_len - width + 2).all()):
                return stock(
                    layer, attn_metadata_i, mixed_qkv_spec, b_spec, a_spec, conv_buf, ssm_state,
                    width, state_len,
                )  # fmt: skip
            numbers = attn_metadata_i.spec_state_indices_tensor[:count].int().contiguous()
            accepted = attn_metadata_i.num_accepted_tokens[:count].int().contiguous()
            y = convolved(
                mixed_qkv_spec, conv_buf, convolution(layer), layer.conv1d.bias, numbers[:, 0],
                accepted - 1, starts,
            )  # fmt: skip
            y = functional.silu(y) if layer.activation == "silu" else y
            query, key, value = layer.rearrange_mixed_qkv(y.to(mixed_qkv_spec.dtype))
            update = original(_custom_ops, "fused_sigmoid_gating_delta_rule_update_spec_cpu")
            return update(
                A_log=layer.A_log, dt_bias=layer.dt_bias, q=query.squeeze(0), k=key.squeeze(0),
                v=value.squeeze(0), a=a_spec, b=b_spec, initial_state_source=ssm_state,
                spec_state_indices=numbers, num_accepted_tokens=accepted, cu_seqlens=starts,
                use_qk_l2norm_in_kernel=True,
            )  # fmt: skip

        return forward_few

    replace(gdn_attention, "_spec_forward", make)


def convolved(
    x: torch.Tensor, states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
    numbers: torch.Tensor, first: torch.Tensor, starts: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """A convolution of some tokens of each request with those before them; states are updated.

    Args:
        x: [tokens, channels], tokens of a request one after the other.
        states: [states, channels, columns], of inputs in order; a request's new tokens are written
            behind those that its first new token is convolved with, one column to the left.
        weight: [channels, taps], the last of the token itself.
        bias: [channels].
        numbers: [requests], of the states; 0 for a request that is none.
        first: [requests], the column of the first input that its first token is convolved with.
        starts: [requests + 1], the first token of each request, and the number of tokens.

    Returns:
        [tokens, channels], float32.

    """
    taps, starts = weight.shape[1], starts.long()
    counts = starts.diff()
    most = int(counts.max())
    columns = first.long()[:, None, None] + torch.arange(taps - 1)
    numbers = numbers.long()
    before = states[numbers].gather(2, columns.expand(-1, states.shape[1], -1))
    # Requests with fewer tokens have others' behind them, which are never read.
    rows = (starts[:-1, None] + torch.arange(most)).clamp(max=len(x) - 1)
    inputs = torch.cat([before, x[rows].transpose(1, 2).to(states.dtype)], dim=2)
    states[numbers, :, : inputs.shape[2] - 1] = inputs[:, :, 1:]
    wide, weights = inputs.float(), weight.float()
    y = torch.zeros(()) if bias is None else bias.float()[:, None]
    for tap in range(taps):
        y = y + wide[:, :, tap : tap + most] * weights[:, tap, None]
    requests = torch.arange(len(counts)).repeat_interleave(counts)
    return y[requests, :, torch.arange(len(requests)) - starts[requests]]


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

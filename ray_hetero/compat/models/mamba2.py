"""vLLM's mixers of Mamba 2 beside CPU ranks: what they compute, and which states a step has."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch.nn import functional

from ray_hetero.compat.models.gated_delta import convolved, numbers_of_rows
from ray_hetero.compat.patching import replace

ACTIVATIONS = ("silu", "swish")
"""Functions of convolutions that are known."""


def keep_states_of_step_ends() -> None:
    """Let prefix caching keep the states of Mamba 2 where steps end, and nowhere else.

    Replaces: `MambaMixer2.get_kv_cache_spec`.
    Uses: `MambaSpec.num_prefill_checkpoint_blocks`, `MambaSpec.prefill_checkpoint_alignment`.
    Why: the specification says that the state inside of a prompt's last step can be kept too, for
    which MambaMixer2 reads the states of all chunks.  The operator for CPUs gives the state at the
    end alone, and the first prompt ends the engine with an IndexError.  Without such a block the
    scheduler ends a step where the state is to be kept.  All ranks of an engine have to say the
    same, those on GPUs too.
    Can go when: vLLM's CPU form of mamba_chunk_scan_combined_varlen gives the states of chunks.
    """
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
    from vllm.v1.kv_cache_interface import MambaSpec

    def make(stock: Any) -> Any:
        def get_kv_cache_spec(self: Any, vllm_config: Any) -> Any:
            spec = stock(self, vllm_config)
            if not isinstance(spec, MambaSpec):
                return spec
            return dataclasses.replace(
                spec, num_prefill_checkpoint_blocks=0, prefill_checkpoint_alignment=None
            )

        return get_kv_cache_spec

    replace(MambaMixer2, "get_kv_cache_spec", make)


def verify_drafts() -> None:
    """Let a decode step with drafts begin behind the last token that was accepted.

    Replaces: `mamba_mixer2.causal_conv1d_update`, `mamba_mixer2.selective_state_update`.
    Why: with speculative decoding a request has several tokens in a step.  What comes before the
    first one begins at a column of its convolution's state, and in one of several states of its
    heads, by the drafts that were accepted.  Of vLLM's forms for CPUs, causal_conv1d_update_cpu
    drops `num_accepted_tokens`, and selective_state_update leaves the state behind the last token
    where it has read one, which is the place of another.  Every request gets other tokens from its
    first drafts on, without a message.
    Can go when: causal_conv1d_update_cpu takes num_accepted_tokens, and selective_state_update
    writes the states of its tokens only.
    """
    from vllm.model_executor.layers.mamba import mamba_mixer2

    replace(mamba_mixer2, "causal_conv1d_update", _convolving)
    replace(mamba_mixer2, "selective_state_update", _updating)


def _convolving(stock: Any) -> Any:
    @functools.wraps(stock)
    def causal_conv1d_update(
        x: torch.Tensor, conv_state: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
        activation: str | None, *, conv_state_indices: torch.Tensor,
        num_accepted_tokens: torch.Tensor | None, query_start_loc: torch.Tensor | None,
        **given: Any,
    ) -> Any:  # fmt: skip
        if num_accepted_tokens is None or query_start_loc is None:
            return stock(
                x, conv_state, weight, bias, activation, conv_state_indices=conv_state_indices,
                num_accepted_tokens=None, query_start_loc=query_start_loc, **given,
            )  # fmt: skip
        y = convolved(
            x, conv_state, weight, bias, conv_state_indices[:, 0], num_accepted_tokens - 1,
            query_start_loc,
        )  # fmt: skip
        return (functional.silu(y) if activation else y).to(x.dtype)

    return causal_conv1d_update


def _updating(stock: Any) -> Any:
    @functools.wraps(stock)
    def selective_state_update(
        state: torch.Tensor, x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor,  # noqa: N803
        B: torch.Tensor, C: torch.Tensor, *given: Any, state_batch_indices: torch.Tensor,  # noqa: N803
        dst_state_batch_indices: torch.Tensor, out: torch.Tensor,
        num_accepted_tokens: torch.Tensor | None, cu_seqlens: torch.Tensor | None, **named: Any,
    ) -> None:  # fmt: skip
        if num_accepted_tokens is None or cu_seqlens is None:
            stock(
                state, x, dt, A, B, C, *given, state_batch_indices=state_batch_indices,
                dst_state_batch_indices=dst_state_batch_indices, out=out,
                num_accepted_tokens=None, cu_seqlens=cu_seqlens, **named,
            )  # fmt: skip
            return
        starts, counts = cu_seqlens.long(), cu_seqlens.diff()
        before = state_batch_indices.gather(1, num_accepted_tokens.long()[:, None] - 1)[:, 0]
        for place in range(int(counts.max())):
            requests = (counts > place).nonzero()[:, 0]
            rows = starts[requests] + place
            behind = dst_state_batch_indices[requests, place]
            # The operator changes the state that it reads, too.
            state[behind.long()] = state[before[requests].long()]
            y = out.new_empty(len(rows), *out.shape[1:])
            stock(
                state, x[rows], dt[rows], A, B[rows], C[rows], *given,
                state_batch_indices=behind[:, None], dst_state_batch_indices=behind[:, None],
                out=y, **named,
            )  # fmt: skip
            out[rows] = y
            before = dst_state_batch_indices[:, place]

    return selective_state_update


def is_mixer(module: Any) -> bool:
    """Whether a module is vLLM's mixer of Mamba 2, not a subclass of it."""
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

    return type(module) is MambaMixer2


def why_unknown(mixer: Any) -> str:
    """Why a mixer does more than is known; or "".

    Args:
        mixer: vLLM's, whose weights are loaded.

    Uses: `MambaMixer2` and `Mixer2RMSNormGated`.
    """
    from vllm.model_executor.layers.mamba.mamba_mixer2 import Mixer2RMSNormGated

    norm = mixer.norm
    if type(norm) is not Mixer2RMSNormGated:
        return f"the norm of its heads is another one ({type(norm).__name__})"
    if norm.use_rms_norm and (
        norm.n_groups % mixer.tp_size or (mixer.tp_size > 1 and norm.n_groups == 1)
    ):
        return "the norm of its heads is of those of several ranks"
    if mixer.activation not in ACTIVATIONS:
        return f"its convolution has another activation ({mixer.activation})"
    if mixer.use_replayssm:
        return "it keeps inputs in the place of states (--use-replayssm)"
    return ""


def states_of_tokens(metadata: Any, tokens: int) -> torch.Tensor | None:
    """Numbers of the states of a step's tokens, [tokens], int32, if each request decodes one token.

    Args:
        metadata: vLLM's of the step.
        tokens: of the step.

    Uses: `Mamba2AttentionMetadata`, whose requests without a state before are prompts.
    """
    from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionMetadata

    if (
        type(metadata) is not Mamba2AttentionMetadata
        or metadata.num_prefills
        or metadata.num_accepted_tokens is not None
        or metadata.num_decodes != metadata.num_decode_tokens
        or metadata.num_decodes > tokens
    ):
        return None
    found = metadata.state_indices_tensor_d
    if found is None or found.dtype != torch.int32 or found.shape != (metadata.num_decodes, 1):
        return None
    return numbers_of_rows(found[:, 0], tokens)

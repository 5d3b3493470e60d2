"""Which rows of a model's output vLLM reads, and modules that compute those rows only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ray_hetero.compat.patching import replace as replace_in

if TYPE_CHECKING:
    from vllm.config import VllmConfig

Compute = Callable[[torch.Tensor], torch.Tensor]


def are_of_last_tokens(vllm_config: VllmConfig) -> bool:
    """Whether vLLM reads the rows of requests' last tokens only, unless one asks for logprobs of
    its prompt.

    Both model runners sample from `hidden_states[logits_indices]`.  Poolers and drafters read all
    rows.  Several rows of a request are sampled where drafts are verified, and in diffusion models.
    A row of the model is not the same row of the step in micro-batches, with context parallelism,
    and in fast prefill.  Adapters and connectors follow the tokens of a whole step.

    Uses: `ModelConfig.runner_type`, `ModelConfig.is_diffusion`, `ParallelConfig.use_ubatching`,
    `ParallelConfig.decode_context_parallel_size`, `ParallelConfig.prefill_context_parallel_size`,
    `CacheConfig.kv_sharing_fast_prefill`.
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    return (
        model.runner_type == "generate"
        and not model.is_diffusion
        and vllm_config.speculative_config is None
        and vllm_config.lora_config is None
        and vllm_config.kv_transfer_config is None
        and parallel.decode_context_parallel_size == 1
        and parallel.prefill_context_parallel_size == 1
        and not parallel.use_ubatching
        and not vllm_config.cache_config.kv_sharing_fast_prefill
    )


def asks_for_prompt(sampling: Any) -> bool:
    """Whether a request wants logprobs of its prompt, for which all of its rows are read.

    Uses: `SamplingParams.prompt_logprobs`, `SamplingParams.prompt_logprob_token_ids`.

    Args:
        sampling: the request's `SamplingParams`; None of a request that is not sampled.

    """
    return sampling is not None and (
        sampling.prompt_logprobs is not None or sampling.prompt_logprob_token_ids is not None
    )


def of_last_tokens(attention: str) -> torch.Tensor | None:
    """The rows of the last tokens of this step's requests; None where they are not known.

    vLLM samples from the same `query_start_loc[1:] - 1`.  In a dummy run there is no metadata, and
    in micro-batches a list.  Other backends than the named ones may keep a part of the requests.
    Metadata padded with requests that have no tokens repeats the last row: `query_start_loc` goes
    on with the number of tokens.  Tokens that are padded lie behind all of these rows.

    Uses: `ForwardContext.attn_metadata`, `CPUAttentionMetadata.query_start_loc`,
    `FlashAttentionMetadata.query_start_loc`, `TritonAttentionMetadata.query_start_loc`.

    Args:
        attention: name of an attention layer of the model.

    """
    from vllm.forward_context import get_forward_context
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadata
    from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadata
    from vllm.v1.attention.backends.triton_attn import TritonAttentionMetadata

    by_layer = get_forward_context().attn_metadata
    metadata = by_layer.get(attention) if isinstance(by_layer, dict) else None
    known = (CPUAttentionMetadata, FlashAttentionMetadata, TritonAttentionMetadata)
    return metadata.query_start_loc[1:] - 1 if isinstance(metadata, known) else None


def attention_of_rows(layer: Any, metadata: Any, rows: torch.Tensor) -> Any:
    """Metadata of attention from the last tokens of a step's requests alone.

    The keys and values of the step are in the cache when its attention is computed.  A causal
    query at the end of its request reads all of them, as in a decode step.

    Uses: `FlashAttentionMetadata`, `CPUAttentionMetadata`, `cpu_attn_get_scheduler_metadata`,
    `CPUAttentionBackendImpl.sliding_window`, `CPUAttentionMetadataBuilder.isa`,
    `envs.VLLM_BATCH_INVARIANT`, `envs.VLLM_CPU_ATTN_SPLIT_KV`.

    Args:
        layer: vLLM's `Attention`.
        metadata: of the step.
        rows: as `of_last_tokens` gives them.

    Returns:
        None where attention depends on more, or where results may not depend on its shape.

    """
    from vllm import _custom_ops, envs
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadata
    from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadata

    if envs.VLLM_BATCH_INVARIANT or metadata.causal is not True:
        return None
    starts = torch.arange(len(rows) + 1, dtype=torch.int32, device=rows.device)
    alone = {"num_actual_tokens": len(rows), "max_query_len": 1, "query_start_loc": starts}
    if isinstance(metadata, FlashAttentionMetadata):
        if metadata.mm_prefix_query_range_tensor is not None or metadata.rswa_window is not None:
            return None
        return replace(metadata, scheduler_metadata=None, **alone)
    if not isinstance(metadata, CPUAttentionMetadata) or metadata.encoder_cache is not None:
        return None
    schedule = _custom_ops.cpu_attn_get_scheduler_metadata(
        num_reqs=len(rows),
        num_heads=layer.num_heads,
        num_kv_heads=layer.num_kv_heads,
        head_dim=layer.head_size,
        seq_lens=metadata.seq_lens,
        dtype=layer.dtype,
        query_start_loc=starts,
        causal=True,
        sliding_window_size=layer.impl.sliding_window,
        isa=layer.isa,
        enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
        kv_cache_dtype=layer.kv_cache_dtype,
    )
    return replace(metadata, scheduler_metadata=schedule, **alone)


def compute_mlp_by(mlp: Any, make: Callable[[Compute], Compute]) -> None:
    """Replace the function that computes an MLP, before its model is called first.

    Replaces: `forward` of the MLP of the last decoder layer.
    Why: the model computes all rows of a prompt's step in its last layer too, though only those of
    the requests' last tokens are read behind the attention.
    Can go when: vLLM computes the last layer for `logits_indices` only.

    Args:
        mlp: vLLM's module.
        make: makes the function from the module's own one.

    """
    replace_in(mlp, "forward", make)


def compute_linear_by(linear: Any, make: Callable[[Compute], Compute]) -> None:
    """Replace the function that computes a linear layer, as `compute_mlp_by` does of an MLP.

    Replaces: `forward` of the linear layer behind the attention of the last decoder layer.
    Why: as `compute_mlp_by`.
    Can go when: vLLM computes the last layer for `logits_indices` only.

    Uses: `LinearBase.return_bias`, `LinearBase.skip_bias_add`.

    Args:
        linear: vLLM's module.
        make: makes the function of rows from one that gives rows.

    """
    if linear.return_bias and linear.skip_bias_add:
        return

    def make_pair(forward: Callable[..., Any]) -> Callable[..., Any]:
        if not linear.return_bias:
            return make(forward)
        compute = make(lambda x: forward(x)[0])
        return lambda x: (compute(x), None)

    replace_in(linear, "forward", make_pair)


def attend_by(attention: Any, attend: Callable[..., torch.Tensor]) -> None:
    """Replace the function that computes an attention.

    Replaces: `forward` of the `AttentionImpl` of the last decoder layer.
    Why: as `compute_mlp_by`.
    Can go when: vLLM computes the last layer for `logits_indices` only.

    Uses: `FlashAttentionImpl.forward`, `CPUAttentionBackendImpl.forward`, `Attention.impl`.

    Args:
        attention: vLLM's `Attention`; one of another backend is left as it is.
        attend: is called with the backend's own function, and with its arguments.

    """
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl
    from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl

    if type(attention.impl) in (CPUAttentionBackendImpl, FlashAttentionImpl):
        replace_in(attention.impl, "forward", lambda forward: partial(attend, forward))

"""Which rows of a model's output vLLM reads, and a module that computes those rows only."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ray_hetero.compat.patching import replace

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig

Compute = Callable[["torch.Tensor"], "torch.Tensor"]


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


def compute_by(mlp: Any, make: Callable[[Compute], Compute]) -> None:
    """Have an MLP computed by another function, its model not having been called yet.

    Replaces: `forward` of the MLP of the last decoder layer.
    Why: the model computes all rows of a prompt's step in its last layer too, though only those of
    the requests' last tokens are read behind the MLP.
    Can go when: vLLM computes the MLP of the last layer for `logits_indices` only.

    Args:
        mlp: vLLM's module.
        make: makes the function from the module's own one.

    """
    replace(mlp, "forward", make)

"""States of hybrids that prefix caching keeps, in steps with drafts on CPUs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ray_hetero.compat.patching import original, replace


def copy_states_without_triton() -> None:
    """Copy states between blocks by vLLM's function for CPUs, with drafts as without them.

    Replaces: `mamba_utils._resolve_fused_precopy`, `mamba_utils.postprocess_mamba_align_gpu`.
    Uses: `mamba_utils.collect_mamba_copy_meta`, `mamba_utils.do_mamba_copy_block`; the buffers of
    `MambaBuffers` and `MambaSpecDecodeGPUContext`.
    Why: with prefix caching a request's states move on to another block where its tokens fill one.
    With speculative decoding two kernels of Triton do that, which CPUs have not: the first step
    ends the engine with a TypeError.
    Can go when: vLLM's CPU runner has forms of these kernels.
    """
    from vllm.v1.worker import mamba_utils

    replace(mamba_utils, "_resolve_fused_precopy", lambda _stock: _none)
    replace(mamba_utils, "postprocess_mamba_align_gpu", lambda _stock: _keep_full_blocks)


def _none(_context: Any) -> None:
    """Buffers of the kernel, of which there is none."""


def _keep_full_blocks(
    *, bufs: Any, num_reqs: int, num_accepted_tokens_gpu: Any, num_accepted_tokens_cpu_tensor: Any,
    input_batch: Any, kv_cache_config: Any, forward_context: Any, mamba_state_copy_funcs: Any,
) -> None:  # fmt: skip
    """Keep the state at the end of each block that accepted tokens have filled.

    Arguments as of `mamba_utils.postprocess_mamba_align_gpu`.
    """
    from vllm.v1.worker import mamba_utils

    context, copies = bufs.postprocess_align, bufs.preprocess
    size, copies.offset = copies.mamba_spec.block_size, 0
    tables = {
        group: input_batch.block_table[group].get_numpy_array() for group in copies.mamba_group_ids
    }
    left = num_accepted_tokens_gpu[:num_reqs].tolist()
    for row in range(num_reqs):
        running = int(
            context.num_computed_tokens_buf.np[row]
            + context.num_scheduled_tokens_buf.np[row]
            - context.num_draft_tokens_buf.np[row]
        )
        filled = (running + left[row] - 1) // size * size
        if filled < running:
            continue
        source, kept = int(context.mamba_state_idx_buf.np[row]), filled // size - 1
        if source == kept:
            left[row] = 1
        original(mamba_utils, "collect_mamba_copy_meta")(
            copies, kv_cache_config, mamba_state_copy_funcs, copies.mamba_group_ids, source, kept,
            filled - running,
            SimpleNamespace(block_ids={group: table[row] for group, table in tables.items()}),
            forward_context,
        )  # fmt: skip
    num_accepted_tokens_cpu_tensor[:num_reqs].copy_(num_accepted_tokens_cpu_tensor.new_tensor(left))
    original(mamba_utils, "do_mamba_copy_block")(copies)

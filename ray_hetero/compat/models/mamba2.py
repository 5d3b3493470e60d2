"""vLLM's mixers of Mamba 2 beside CPU ranks."""

from __future__ import annotations

import dataclasses
from typing import Any

from ray_hetero.compat.patching import replace


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

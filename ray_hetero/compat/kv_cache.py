"""vLLM's KV cache planning: the memory of a rank whose stage has another size than the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ray_hetero.compat.patching import original

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

KEPT = ("kv_cache_layout", "hash_block_size", "cache_hit_alignment_tokens")
"""What vLLM's engine has added to a rank's configuration of its KV cache."""


def with_heads(spec: KVCacheSpec, heads: Callable[[int], int]) -> KVCacheSpec:
    """A layer's KV cache with another number of heads a rank.

    Args:
        spec: of the layer.
        heads: from heads of a rank to those wanted.

    """
    from vllm.v1.kv_cache_interface import AttentionSpec, MLAAttentionSpec

    # The latent of MLA is one head, whole on every rank.
    if not isinstance(spec, AttentionSpec) or isinstance(spec, MLAAttentionSpec):
        return spec
    changes: dict[str, Any] = {"num_kv_heads": heads(spec.num_kv_heads)}
    if spec.num_head_slots is not None:
        changes["num_head_slots"] = heads(spec.num_head_slots)
    if spec.page_size_padded is not None:
        changes["page_size_padded"] = heads(spec.page_size_padded)
    return replace(spec, **changes)


def config_of_rank(
    config: KVCacheConfig, vllm_config: VllmConfig, heads: Callable[[int], int]
) -> KVCacheConfig:
    """A rank's KV cache with as many blocks and another number of heads.

    Replaces: nothing; changes what the engine has planned for a rank.
    Uses: `kv_cache_utils.get_kv_cache_config_from_groups`, `kv_cache_utils._pool_bytes_per_block`.
    Why: get_kv_cache_configs wants the layers of all ranks to be alike, and where stages differ in
    size their ranks keep different numbers of heads.
    Can go when: it takes specifications that differ between stages for every kind of attention.

    Args:
        config: what vLLM has planned for the rank.
        vllm_config: of the driver.
        heads: from the heads that were planned with to those of the rank.

    """
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

    build = original(kv_cache_utils, "get_kv_cache_config_from_groups")
    block_bytes = original(kv_cache_utils, "_pool_bytes_per_block")

    def own(spec: KVCacheSpec) -> KVCacheSpec:
        if not isinstance(spec, UniformTypeKVCacheSpecs):
            return with_heads(spec, heads)
        layers: Mapping[str, KVCacheSpec] = spec.kv_cache_specs
        return replace(
            spec, kv_cache_specs={name: with_heads(one, heads) for name, one in layers.items()}
        )

    groups = [
        replace(group, kv_cache_spec=own(group.kv_cache_spec)) for group in config.kv_cache_groups
    ]
    made = build(vllm_config, groups, config.num_blocks * block_bytes(vllm_config, groups))
    for name in KEPT:
        setattr(made, name, original(config, name))
    return made

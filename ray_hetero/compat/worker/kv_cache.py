"""vLLM's KV cache: of a rank whose stage has another size than the others, and where it lies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ray_hetero.compat.patching import original
from ray_hetero.compat.patching import replace as replace_with
from ray_hetero.log import logger
from ray_hetero.supported import is_since

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

KEPT = ("kv_cache_layout", "hash_block_size", "cache_hit_alignment_tokens")
"""Fields that vLLM's engine has added to a rank's configuration of its KV cache."""


def planning() -> Any:
    """vLLM's module that plans the KV cache: of its own since 0.33, before in kv_cache_utils."""
    name = "kv_cache_planning" if is_since("0.33") else "kv_cache_utils"
    return import_module(f"vllm.v1.core.{name}")


def block_size_on_cpu(driver: VllmConfig, usual: int) -> int:
    """Tokens of a KV block that vLLM's CPU platform chooses for the driver's model.

    Uses: `CacheConfig.DEFAULT_BLOCK_SIZE`.

    Args:
        driver: of a CPU driver, whose user has not set the size.
        usual: where nothing about the model asks for another.

    """
    import torch

    size: int = driver.cache_config.block_size
    if not is_since("0.33"):
        return size
    # Since 0.33 the platform keeps it open until the layers are made, which the driver never does.
    # Its attention to latents without AMX, whose size is the default one, it decides before; so it
    # does where the user asks for that attention.
    is_open = size == driver.cache_config.DEFAULT_BLOCK_SIZE
    is_asked_for = getattr(driver.attention_config.backend, "name", "") == "CPU_MLA"
    has_amx = torch.cpu._is_amx_tile_supported() and not is_asked_for
    return usual if is_open and (has_amx or not driver.model_config.use_mla) else size


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
    Uses: `kv_cache_utils.get_kv_cache_config_from_groups`, `kv_cache_utils._pool_bytes_per_block`;
    since 0.33 of kv_cache_planning.
    Why: get_kv_cache_configs wants the layers of all ranks to be alike, and where stages differ in
    size their ranks keep different numbers of heads.
    Can go when: it takes specifications that differ between stages for every kind of attention.

    Args:
        config: what vLLM has planned for the rank.
        vllm_config: of the driver.
        heads: from the heads that were planned with to those of the rank.

    """
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

    build = original(planning(), "get_kv_cache_config_from_groups")
    block_bytes = original(planning(), "_pool_bytes_per_block")

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


def place_in(memory: Callable[[int], torch.Tensor]) -> None:
    """Allocate a CPU rank's KV cache in memory that another rank of its group can map.

    Replaces: `gpu_model_runner.allocate_kv_cache`.
    Why: allocate_kv_cache takes private memory, and the first rank of a group has a GPU compute
    prompts whose keys and values it writes into the caches of all ranks.
    Can go when: what allocates the KV cache can be given.

    Args:
        memory: makes memory of at least so many bytes, uint8, zeroed; an OSError leaves the cache
            to vLLM.

    """
    import torch
    from vllm.v1.worker import gpu_model_runner

    def make(allocate: Any) -> Any:
        def allocate_kv_cache(config: Any, device: Any, *given: Any, **more: Any) -> Any:
            # Without memory, they say how layers lie in it.
            layers = allocate(config, torch.device("meta"), *given, **more)
            size = max((one.untyped_storage().nbytes() for one in layers.values()), default=0)
            try:
                storage = memory(size).untyped_storage()
            except OSError as error:
                logger.warning("the KV cache cannot be shared with other ranks: %s", error)
                return allocate(config, device, *given, **more)
            return {
                name: torch.empty(0, dtype=one.dtype).set_(
                    storage, one.storage_offset(), one.shape, one.stride()
                )
                for name, one in layers.items()
            }

        return allocate_kv_cache

    replace_with(gpu_model_runner, "allocate_kv_cache", make)

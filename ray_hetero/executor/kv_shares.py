"""The KV cache of stages of several sizes: what vLLM plans with, and what each rank keeps.

vLLM plans the KV cache for layers that are alike on all ranks.  A rank of a stage of two keeps half
the heads of a rank that is alone, so vLLM is told as many heads, and as many bytes, as if all
stages had the size of the smallest; blocks come out the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from placement.cluster.layout import Layout
from ray_hetero.compat.worker import kv_cache

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig


def heads_of_rank(kv_heads: int, ranks: int) -> int:
    """KV heads that each of so many ranks keeps; with more ranks than heads, several keep one."""
    return max(1, kv_heads // ranks)


class KvShares:
    """KV cache specifications of the ranks: their own, and those that vLLM plans with.

    Args:
        specs: by rank: of each layer, by name.
        layout: kinds and stages of all ranks.
        model: for the number of KV heads.

    """

    def __init__(self, specs: Sequence[dict[str, Any]], layout: Layout, model: ModelConfig) -> None:
        self.specs = specs
        """Specifications of the layers that each rank really keeps, by rank and name."""
        heads = model.get_total_num_kv_heads() or 1
        most = heads_of_rank(heads, min(layout.sizes))
        self._heads = [
            (heads_of_rank(heads, size), most) for size in layout.sizes for _ in range(size)
        ]
        """Heads that each rank keeps, and heads that vLLM plans with, by rank."""

    @property
    def common(self) -> list[dict[str, Any]]:
        """Specifications that vLLM plans with, by rank."""
        return [
            specs
            if own == planned
            else {
                name: kv_cache.with_heads(spec, partial(_scaled, planned, own))
                for name, spec in specs.items()
            }
            for specs, (own, planned) in zip(self.specs, self._heads, strict=True)
        ]

    def common_bytes(self, available: Sequence[int]) -> list[int]:
        """Bytes of the ranks in which as many blocks of what vLLM plans with have room."""
        return [
            nbytes * (_page_bytes(planned) or 1) // (_page_bytes(specs) or 1)
            for nbytes, specs, planned in zip(available, self.specs, self.common, strict=True)
        ]

    def own(self, configs: Sequence[Any], vllm_config: VllmConfig) -> list[Any]:
        """Configurations of the ranks' own caches, by rank, from those that vLLM has planned."""
        return [
            config
            if own == planned
            else kv_cache.config_of_rank(config, vllm_config, partial(_scaled, own, planned))
            for config, (own, planned) in zip(configs, self._heads, strict=True)
        ]


def _scaled(to: int, of: int, number: int) -> int:
    return number * to // of


def _page_bytes(specs: dict[str, Any]) -> int:
    return sum(int(spec.page_size_bytes) for spec in specs.values())

"""Memory of a rank for the KV cache, beside the bytes that one request takes of it.

vLLM ends a start in which the longest request has no room, and says by how much.  It knows neither
which rank is short nor that layers could be on another one; that is said here, just before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from placement.units import GIB
from ray_hetero.planning.planned_layers import LayerPlan

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def shortages(
    available: Sequence[int],
    specs: Sequence[Mapping[str, Any]],
    plan: LayerPlan,
    vllm_config: VllmConfig,
) -> list[str]:
    """Sentences about each rank in which a request of the longest length has no room.

    Args:
        available: bytes for the KV cache, by rank.
        specs: by rank: vLLM's specification of each layer's KV cache, by name.
        plan: layers of each stage.
        vllm_config: the engine's.

    """
    if vllm_config.cache_config.num_gpu_blocks_override is not None:
        return []
    found = []
    for rank, (room, of_layers) in enumerate(zip(available, specs, strict=True)):
        needed = sum(spec.max_memory_usage_bytes(vllm_config) for spec in of_layers.values())
        if room < needed:
            found.append(_shortage(rank, room, needed, plan, vllm_config))
    return found


def _shortage(rank: int, room: int, needed: int, plan: LayerPlan, vllm_config: VllmConfig) -> str:
    scheduler, world = vllm_config.scheduler_config, plan.world
    seat = world.seats[rank]
    layers = world.layers[seat.stage]
    remedies = [
        f"a smaller --max-model-len, --max-num-seqs ({scheduler.max_num_seqs}) or "
        f"--max-num-batched-tokens ({scheduler.max_num_batched_tokens}): a step of that size is "
        "tried first, and what it takes is kept free"
    ]
    if seat.kind == "gpu":
        remedies.append("a larger --gpu-memory-utilization")
    if len(world.layers) > 1 and layers > 1:
        others = _fewer(world.layers, seat.stage, _layers_too_many(rank, room, needed, plan))
        remedies.append(
            "fewer layers on this stage: --additional-config "
            f'\'{{"ray_hetero": {{"layers": {others}}}}}\' in place of {list(world.layers)}'
        )
    return (
        f"{world.describe(rank)} has {max(0, room) / GIB:.2f} GiB left for its KV cache, and one "
        f"request of {vllm_config.model_config.max_model_len} tokens takes {needed / GIB:.2f} GiB "
        f"in its {layers} layers. Give {'; or '.join(remedies)}."
    )


def _layers_too_many(rank: int, room: int, needed: int, plan: LayerPlan) -> int:
    """Layers that have to go; their weights are taken as what all of the rank's take, by layer."""
    count = plan.world.layers[plan.world.seats[rank].stage]
    each = needed / count
    if plan.split is not None:
        each += next(one for one in plan.split.ranks if one.rank == rank).memory.weights / count
    return min(count - 1, -int(-(needed - room) // each))


def _fewer(layers: Sequence[int], stage: int, count: int) -> list[int]:
    """Layers of each stage when a stage's neighbour takes some of its."""
    found = list(layers)
    found[stage] -= count
    found[stage - 1 if stage else 1] += count
    return found

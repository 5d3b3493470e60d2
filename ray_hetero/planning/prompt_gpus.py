"""GPUs that compute prompts for CPU ranks: which, with how much memory, and how fast.

What the ranks themselves do is in offload/prefill/offload_gpu.py and gpu_layers.py, and in
offload/group/group_layers.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from placement.cluster.assignment import Seat
from placement.host.topology import Host
from placement.plan.devices import DeviceFigures, PromptGpu, StageDevices
from ray_hetero.compat.models.fused_architectures import FUSED_MODEL_TYPES
from ray_hetero.config import CpuConfig, HeteroConfig
from ray_hetero.planning.engine_facts import EngineFacts
from ray_hetero.planning.plan_request import PlanRequest
from ray_hetero.planning.prefill_memory import attention_bytes, gpu_bytes, output_bytes
from ray_hetero.planning.sockets import streams_weights
from ray_hetero.world import World


def ranks_of_prompt_gpu(
    config: CpuConfig, seat: Seat, seats: Sequence[Seat], host: Host, *, by_stage: bool
) -> int:
    """Most CPU ranks whose prompts one GPU computes, as far as planning can tell."""
    if not (config.prefill_on_gpu and streams_weights(config, host)):
        return 0
    here = [other for other in seats if other.node_id == seat.node_id]
    cpus = {other.stage if by_stage else other.rank for other in here if other.kind == "cpu"}
    return -(-len(cpus) // sum(other.kind == "gpu" for other in here))


def can_fuse(facts: EngineFacts) -> bool:
    """Whether layers of a model can be one operator, as far as planning can tell."""
    assert facts.shape is not None
    tensors = [tensor for layer in facts.shape.layers for tensor in layer.tensors]
    # Matrices in 16 bits, or in fewer as a quantised checkpoint has them, several to an element.
    return facts.shape.model_type in FUSED_MODEL_TYPES and all(
        tensor.dtype_bytes <= 2 or tensor.values > 1 for tensor in tensors if tensor.values
    )


def has_whole_layers(config: HeteroConfig, facts: EngineFacts, world: World) -> bool:
    """Whether a GPU computes whole layers of prompts, not their linear layers alone.

    That takes stages of one CPU rank, or of several CPU ranks of one node.
    """
    return (
        config.cpu.fuse_layers
        and can_fuse(facts)
        and all(
            world.has_socket_group(seat) or len(world.layout.stages[seat.stage]) == 1
            for seat in world.seats
            if seat.kind == "cpu"
        )
    )


def prompt_gpu_bytes(facts: EngineFacts, world: World, *, is_whole: bool) -> int:
    """Memory of a GPU that is taken for computing prompts.

    Args:
        facts: of the engine.
        world: its ranks.
        is_whole: whether one CPU rank of a stage has whole layers computed for all of them; else
            each has its linear layers computed.

    """
    shape = facts.shape
    assert shape is not None
    hidden, tokens = shape.hidden_size, facts.max_num_batched_tokens
    sizes = [len(stage) for stage in world.layout.stages if "cpu" in stage]
    # Gate and up are one matrix, of which a rank has its tensor-parallel share.
    size = 1 if is_whole else min(sizes, default=1)
    wide = shape.intermediate_size // size
    linears = gpu_bytes(max(hidden, 2 * wide), max(hidden, wide), tokens)
    if not is_whole:
        return linears
    # Ranks that are more than there are heads of keys have one each.
    kv_heads = max(shape.num_kv_heads, *sizes, 0)
    attention = attention_bytes(shape.num_heads, kv_heads, shape.head_dim, tokens)
    return linears + attention + output_bytes(hidden, tokens)


def with_prompt_gpus(
    stages: Sequence[StageDevices], request: PlanRequest, world: World
) -> tuple[StageDevices, ...]:
    """Stages with the GPU that computes whole layers of prompts for their CPU ranks, if one does.

    Args:
        stages: in the order of the world's.
        request: with the sizes of the model.
        world: ranks of the engine.

    """
    config, facts = request.config, request.facts
    shape = facts.shape
    assert shape is not None
    is_known = not shape.experts and all(
        layer.kv is not None and layer.kv.is_full for layer in shape.layers
    )
    if not (facts.is_bf16 and is_known and has_whole_layers(config, facts, world)):
        return tuple(stages)
    hosts = {node.node_id: node.host for node in request.machine.nodes}
    ranks = [rank for stage in stages for rank in stage.ranks]

    def gpu_for(seat: Seat) -> DeviceFigures | None:
        beside = (
            rank.figures for other, rank in zip(world.seats, ranks, strict=True)
            if (other.kind, other.node_id) == ("gpu", seat.node_id) and rank.figures.host_link
        )  # fmt: skip
        found = next(beside, None)
        is_used = found is not None and ranks_of_prompt_gpu(
            config.cpu, seat, world.seats, hosts[seat.node_id], by_stage=True
        )
        return found if is_used else None

    def with_gpu(number: int, stage: StageDevices) -> StageDevices:
        first = next(seat for seat in world.seats if seat.stage == number)
        gpu = gpu_for(first) if first.kind == "cpu" else None
        if gpu is None:
            return stage
        return replace(stage, prompt_gpu=PromptGpu(gpu, config.cpu.prompt_tokens))

    return tuple(with_gpu(number, stage) for number, stage in enumerate(stages))

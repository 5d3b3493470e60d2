"""Layers of each stage, from what the devices can do, and what to expect of a step.

The user's own layers win.  Worlds of one kind get equal shares; worlds of both kinds get what
`choose_split` finds best, unless model or devices are unknown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from placement.cluster.assignment import Seat
from placement.cluster.layout import Layout
from placement.errors import DoesNotFitError
from placement.model.shape import ModelShape
from placement.plan.split import RankPlan, Split
from ray_hetero.planning.engine_facts import CPU_BLOCK_SIZE, EngineFacts
from ray_hetero.planning.expert_ranks import (
    asked_layers,
    bytes_of_expert_rank,
    check_experts,
    check_room,
    sockets_for_experts,
)
from ray_hetero.planning.plan_request import PlanRequest
from ray_hetero.planning.planned_layers import LayerPlan
from ray_hetero.planning.rank_devices import stage_devices
from ray_hetero.planning.seat_devices import UnknownDeviceError
from ray_hetero.planning.split_search import SplitSearch
from ray_hetero.planning.world_plan import (
    KV_ROUNDS,
    KV_SHARE_OF_FREE,
    compute_threads,
    plan_world,
    split_layers,
    with_chosen_sockets,
)
from ray_hetero.world import World

NOTHING_LEFT = (
    "experts.ranks is {}, but the experts of all layers fit on the GPUs: no expert rank is "
    "started. experts.layers says of how many layers they are to lie there"
)


def plan_layers(request: PlanRequest) -> LayerPlan:
    """Decide devices, order of the stages and layers of each.

    Raises:
        LayoutError: there are too few devices.
        ConfigError: the layers given do not add up, or expert ranks are asked for where there is
            nothing for them.
        DoesNotFitError: no split fits, or the experts do not fit into the sockets for them.

    """
    if request.config.experts.ranks == "auto":
        return _with_experts_where_needed(request)
    request = replace(request, facts=request.facts.in_world(request.world_size))
    config, facts = request.config, request.facts
    world = plan_world(
        config,
        request.machine.nodes,
        pipeline_parallel_size=request.pipeline_parallel_size,
        tensor_parallel_size=request.tensor_parallel_size,
        layers=_shares(request),
        turn=request.turn,
    )
    cpus = [seat for seat in world.members if seat.kind == "cpu"]
    of_nodes = Counter(seat.node_id for seat in cpus)
    threads = {
        seat.rank: compute_threads(seat, config.cpu, of_nodes[seat.node_id]) for seat in cpus
    }
    if world.experts:
        check_experts(world, facts.shape)
        remote = asked_layers(config.experts, facts.hidden_layers)
        # All of them, where nothing is known to plan by.
        world = replace(world, expert_layers=facts.hidden_layers if remote is None else remote)
    return _plan_stages(request, world, threads)


def _shares(request: PlanRequest) -> tuple[int, ...]:
    """Layers of each stage, where nothing is planned."""
    facts = request.facts
    barred = frozenset[int]() if facts.shape is None else facts.shape.barred
    stages = request.pipeline_parallel_size
    return split_layers(request.config, facts.hidden_layers, stages, request.partition, barred)


def _with_experts_where_needed(request: PlanRequest) -> LayerPlan:
    """The plan with all sockets as expert ranks, or without where the GPUs hold the model alone."""
    shape, nodes = request.facts.shape, request.machine.nodes
    alone = plan_layers(request.with_experts(0))
    if shape is None or not (alone.is_too_large and alone.world.is_stock):
        return alone
    free = with_chosen_sockets(request.config.cpu, nodes)
    sockets = sockets_for_experts(free, alone.world.layout.count("gpu"), shape)
    return plan_layers(request.with_experts(sockets)) if sockets else alone


def _plan_stages(
    request: PlanRequest, world: World, threads: dict[int, tuple[int, ...]]
) -> LayerPlan:
    facts = request.facts
    is_given = request.config.layers != "auto" or bool(request.partition)
    is_chosen = world.has_cpu and not world.is_cpu_only and not is_given
    if facts.shape is None:
        unknown = facts.why_no_shape
        warning = _equal(unknown) if is_chosen else ""
        return LayerPlan(world, None, warning=warning, unknown=unknown, threads=threads)
    try:
        stages = stage_devices(request, world, threads)
    except UnknownDeviceError as error:
        warning = _equal(str(error)) if is_chosen else ""
        expert_bytes = _expert_bytes(world, facts.shape.with_remote_experts(world.expert_layers))
        return LayerPlan(
            world, None, warning=warning, unknown=str(error), threads=threads,
            expert_bytes=expert_bytes,
        )  # fmt: skip
    search = SplitSearch(request, facts.shape, stages)
    if world.experts:
        return _beside_experts(world, search, threads)
    if is_chosen:
        split = search.best()
        moved = enumerate(_moved(world, split))
        threads = {rank: threads[seat.rank] for rank, seat in moved if seat.rank in threads}
        return _planned(_ordered(world, split), facts, threads)
    return _priced(world, search, threads)


def _beside_experts(
    world: World, search: SplitSearch, threads: Mapping[int, tuple[int, ...]]
) -> LayerPlan:
    """The plan of GPU stages with expert ranks beside them; without where nothing is left to these.

    Raises:
        DoesNotFitError: the experts do not fit into their sockets.

    """
    layers = world.expert_layers
    with_experts: SplitSearch | None = replace(
        search, shape=search.shape.with_remote_experts(layers)
    )
    if asked_layers(search.request.config.experts, layers) is None:
        with_experts = search.with_fewest_remote_experts(world.layers) or with_experts
    assert with_experts is not None
    remote = [layer.index for layer in with_experts.shape.layers if layer.remote]
    if not remote:
        alone = replace(world, experts=(), expert_layers=0)
        stages = tuple(
            replace(stage, experts=(), expert_buffer_bytes=0, slot_bytes=0)
            for stage in search.stages
        )
        kept = {rank: cpus for rank, cpus in threads.items() if rank < len(world.seats)}
        planned = _priced(alone, replace(search, stages=stages), kept)
        return replace(planned, warning=planned.warning or NOTHING_LEFT.format(len(world.experts)))
    world = replace(world, expert_layers=len(search.shape.layers) - remote[0])
    expert_bytes = _expert_bytes(world, with_experts.shape)
    return replace(_priced(world, with_experts, threads), expert_bytes=expert_bytes)


def _expert_bytes(world: World, shape: ModelShape) -> int:
    """Bytes of one expert rank, which its socket has room for; 0 without expert ranks."""
    if not world.experts:
        return 0
    needed = bytes_of_expert_rank(shape, len(world.experts))
    check_room(world, needed)
    return needed


def _priced(world: World, search: SplitSearch, threads: Mapping[int, tuple[int, ...]]) -> LayerPlan:
    """The plan with the layers that the world has."""
    try:
        split = search.priced(world.layers)
    except DoesNotFitError as error:
        return LayerPlan(world, None, warning=str(error), is_too_large=True, threads=threads)
    return _planned((world, split), search.request.facts, threads)


def _equal(reason: str) -> str:
    return f"layers: auto takes equal shares, because nothing better is known: {reason}"


def _planned(
    found: tuple[World, Split], facts: EngineFacts, threads: Mapping[int, tuple[int, ...]]
) -> LayerPlan:
    world, split = found
    limits = [_kv_limit(rank, split, facts) for rank in split.ranks if rank.device.kind == "cpu"]
    return LayerPlan(world, split, min([split.kv_tokens, *limits]), threads=threads)


def _kv_limit(rank: RankPlan, split: Split, facts: EngineFacts) -> int:
    """Tokens that a CPU rank's KV cache takes at most, however much memory is free."""
    if rank.device.kv_limit_bytes is not None or not rank.kv_bytes:
        return split.kv_tokens
    blocks = -(-facts.max_model_len // CPU_BLOCK_SIZE)
    useful = KV_ROUNDS * facts.max_num_seqs * blocks * CPU_BLOCK_SIZE
    share = split.kv_tokens * int(KV_SHARE_OF_FREE * rank.kv_room) // rank.kv_bytes
    return min(useful, max(share, facts.max_model_len))


def _moved(world: World, split: Split) -> list[Seat]:
    """The seats in the order that they have when the stages are in the split's."""
    return [seat for place in split.order for seat in world.seats if seat.stage == place]


def _ordered(world: World, split: Split) -> tuple[World, Split]:
    """The world with its stages in the split's order, every stage on the devices it had."""
    layout = Layout(tuple(world.layout.stages[place] for place in split.order))
    stage_of = {place: stage for stage, place in enumerate(split.order)}
    moved = [replace(seat, stage=stage_of[seat.stage]) for seat in _moved(world, split)]
    used: dict[tuple[str, str], int] = {}
    seats = []
    for rank, seat in enumerate(moved):
        key = (seat.node_id, seat.kind)
        used[key] = used.get(key, 0) + 1
        seats.append(replace(seat, rank=rank, local_rank=used[key] - 1))
    return World(layout, tuple(seats), split.layers), split

"""Which stage holds which layers, from what the devices can do, and what to expect of a step.

The user's own layers win.  Worlds of one kind get equal shares; worlds of both kinds get what
`choose_split` finds best, unless model or devices are unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

from placement.cluster.assignment import ALONE, Node, Seat, Turn
from placement.cluster.layout import Layout
from placement.errors import DoesNotFitError
from placement.model.shape import ModelShape
from placement.plan.devices import Links, StageDevices, stages_of
from placement.plan.split import RankPlan, Split, choose_split
from ray_hetero.config import HeteroConfig
from ray_hetero.planning.engine_facts import CPU_BLOCK_SIZE, EngineFacts
from ray_hetero.planning.expert_memory import (
    bytes_of_expert_rank,
    check_room,
    shape_of_stages,
)
from ray_hetero.planning.fused_architectures import FUSED_MODEL_TYPES
from ray_hetero.planning.prefill_memory import attention_bytes, gpu_bytes
from ray_hetero.planning.rank_devices import (
    Described,
    UnknownDeviceError,
    rank_devices,
)
from ray_hetero.planning.world_plan import (
    KV_ROUNDS,
    KV_SHARE_OF_FREE,
    compute_threads,
    plan_world,
    split_layers,
)
from ray_hetero.world import Forecast, World

PRICED_CONTEXT = 4096
"""Tokens of each sequence in the decode step that is made short, where the model takes as many."""
PRICED_BATCH = 8
"""Sequences in that step for the objective `throughput`, where they fit; one for `latency`."""
WANTED_KV_TOKENS = 32768
"""Tokens that the KV cache has room for where they fit, in whole sequences; one sequence always."""

Threads = Mapping[int, Sequence[int]]
Measure = Callable[[Sequence[Seat], Threads], Mapping[int, float]]
"""Bytes per second of each CPU rank that can be measured, by rank."""


@dataclass(frozen=True)
class Asked:
    """A step to price and what the KV cache must hold, where somebody asks for other than usual."""

    batch: int
    """Sequences in the decode step."""
    context: int
    """Tokens of each of them."""
    max_sequences: int
    """Sequences of the longest length that must have room."""


@dataclass(frozen=True)
class LayerPlan:
    """A world with its layers, and the split that they are priced as."""

    world: World
    split: Split | None
    """None where model or devices are unknown, or the given layers do not fit."""
    kv_tokens: int = 0
    """Tokens that the KV cache will hold."""
    warning: str = ""
    threads: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Logical CPUs of each CPU rank's compute threads, by rank."""
    expert_bytes: int = 0
    """Of the experts that each expert rank holds, as the checkpoint has them."""

    def forecast(self, rank: int) -> Forecast | None:
        """What the plan expects of one rank."""
        if self.split is None or self.world.members[rank].serves_experts:
            return None
        work = self.split.work
        stage = self.split.stages[self.world.seats[rank].stage]
        return Forecast(work.batch, work.context, stage.decode.seconds, self.kv_tokens)

    @property
    def held_split(self) -> Split:
        """The split with the KV cache that the engine will really have, which may be smaller."""
        assert self.split is not None
        share = Fraction(self.kv_tokens, max(1, self.split.kv_tokens))
        stages = tuple(
            replace(
                stage,
                ranks=tuple(replace(r, kv_bytes=int(r.kv_bytes * share)) for r in stage.ranks),
            )
            for stage in self.split.stages
        )
        return replace(self.split, stages=stages, kv_tokens=self.kv_tokens)

    def memory_bytes(self) -> dict[int, int]:
        """Host memory that each CPU rank will take, by rank; none where nothing is known."""
        experts = {seat.rank: self.expert_bytes for seat in self.world.experts}
        if self.split is None:
            return {}
        share = Fraction(self.kv_tokens, max(1, self.split.kv_tokens))
        return experts | {
            rank.rank: rank.memory.beside_kv + int(rank.kv_bytes * share)
            for rank in self.split.ranks
            if rank.device.kind == "cpu"
        }


def plan_layers(
    config: HeteroConfig,
    nodes: Sequence[Node],
    facts: EngineFacts,
    *,
    pipeline_parallel_size: int,
    tensor_parallel_size: int,
    partition: str | None,
    measure: Measure,
    turn: Turn = ALONE,
    asked: Asked | None = None,
    described: Described | None = None,
    links: Links | None = None,
    explained: bool = True,
) -> LayerPlan:
    """Decide devices, order of the stages and layers of each.

    Args:
        config: the user's configuration.
        nodes: the cluster.
        facts: the model and the engine.
        pipeline_parallel_size: stages.
        tensor_parallel_size: ranks of a stage.
        partition: VLLM_PP_LAYER_PARTITION, if set.
        measure: measures what neither the configuration nor the model of a device tells.
        turn: the engine's place among those that start together.
        asked: the step to price and the sequences to hold; None is the engine's own choice.
        described: what a description of the cluster says of a seat's device.
        links: the ways between ranks; None is what is assumed of them.
        explained: whether an error says by how much a model does not fit, which takes many times
            as long as planning.

    Raises:
        LayoutError: there are too few devices.
        ConfigError: the layers given do not add up.
        DoesNotFitError: no split fits, or the experts do not fit into the sockets for them.

    """
    facts = facts.in_world(pipeline_parallel_size * tensor_parallel_size)
    world = plan_world(
        config,
        nodes,
        pipeline_parallel_size=pipeline_parallel_size,
        tensor_parallel_size=tensor_parallel_size,
        layers=split_layers(config, facts.hidden_layers, pipeline_parallel_size, partition),
        turn=turn,
    )
    threads = {
        seat.rank: compute_threads(seat, config.cpu) for seat in world.members if seat.kind == "cpu"
    }
    expert_bytes = 0
    if facts.shape is not None and config.experts.ranks:
        expert_bytes = bytes_of_expert_rank(facts.shape, config.experts)
        check_room(world, expert_bytes)
        facts = replace(facts, shape=shape_of_stages(facts.shape, config.experts))
    is_given = config.layers != "auto" or bool(partition)
    planned = _plan_stages(
        config, world, nodes, facts, threads, measure, asked, described, links,
        explained=explained, is_given=is_given,
    )  # fmt: skip
    return replace(planned, expert_bytes=expert_bytes)


def _plan_stages(
    config: HeteroConfig,
    world: World,
    nodes: Sequence[Node],
    facts: EngineFacts,
    threads: dict[int, tuple[int, ...]],
    measure: Measure,
    asked: Asked | None,
    described: Described | None,
    links: Links | None,
    *,
    explained: bool,
    is_given: bool,
) -> LayerPlan:
    is_chosen = world.has_cpu and not world.is_cpu_only and not is_given
    if facts.shape is None:
        warning = _equal(facts.why_no_shape) if is_chosen else ""
        return LayerPlan(world, None, warning=warning, threads=threads)
    try:
        stages = _stages(config, world, nodes, facts, threads, measure, described)
    except UnknownDeviceError as error:
        warning = _equal(str(error)) if is_chosen else ""
        return LayerPlan(world, None, warning=warning, threads=threads)
    search = SplitSearch(config, facts, facts.shape, stages, asked, links, explained)
    if is_chosen:
        split = search.best()
        moved = enumerate(_moved(world, split))
        threads = {rank: threads[seat.rank] for rank, seat in moved if seat.rank in threads}
        return _planned(_ordered(world, split), facts, threads)
    try:
        split = search.priced(world.layers)
    except DoesNotFitError as error:
        return LayerPlan(world, None, warning=f"this may not fit: {error}", threads=threads)
    return _planned((world, split), facts, threads)


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


def _stages(
    config: HeteroConfig,
    world: World,
    nodes: Sequence[Node],
    facts: EngineFacts,
    threads: Threads,
    measure: Measure,
    described: Described | None,
) -> tuple[StageDevices, ...]:
    known = config.cpu.bandwidth_gb_s is not None or not world.has_cpu
    devices = rank_devices(
        config,
        world.seats,
        nodes,
        threads=threads,
        bandwidth={} if known else measure(world.seats, threads),
        gpu_share=config.gpu.memory_utilization or facts.gpu_memory_utilization,
        borrowed_bytes=_borrowed_bytes(facts, world),
        is_eager=facts.is_eager,
        is_bf16=facts.is_bf16,
        can_fuse=_can_fuse(facts),
        described=described,
    )
    return tuple(stages_of(devices, world.layout.sizes))


def _can_fuse(facts: EngineFacts) -> bool:
    assert facts.shape is not None
    tensors = [tensor for layer in facts.shape.layers for tensor in layer.tensors]
    # Matrices in 16 bits, or in fewer as a quantised checkpoint has them, several to an element.
    return facts.shape.model_type in FUSED_MODEL_TYPES and all(
        tensor.dtype_bytes <= 2 or tensor.values > 1 for tensor in tensors if tensor.values
    )


def _borrowed_bytes(facts: EngineFacts, world: World) -> int:
    """Memory of a GPU that a CPU rank takes which has it compute prompts."""
    shape = facts.shape
    assert shape is not None
    hidden, tokens = shape.hidden_size, facts.max_num_batched_tokens
    # Gate and up are one matrix, of which a rank has its tensor-parallel share.
    sizes = [len(stage) for stage in world.layout.stages if "cpu" in stage]
    size = min(sizes, default=1)
    wide = shape.intermediate_size // size
    linears = gpu_bytes(max(hidden, 2 * wide), max(hidden, wide), tokens)
    if size > 1 or not _can_fuse(facts):
        return linears
    return linears + attention_bytes(shape.num_heads, shape.num_kv_heads, shape.head_dim, tokens)


@dataclass(frozen=True)
class SplitSearch:
    """What is asked of the planner."""

    config: HeteroConfig
    facts: EngineFacts
    shape: ModelShape
    stages: tuple[StageDevices, ...]
    asked: Asked | None = None
    links: Links | None = None
    explained: bool = True

    def best(self) -> Split:
        """The best split with room for what is wanted, else for one sequence.

        Raises:
            DoesNotFitError: not even one sequence fits.

        """
        facts = self.facts
        if self.asked is not None:
            return self._choose(self.asked.batch, self.asked.max_sequences)
        many = self.config.objective == "throughput"
        batch = min(PRICED_BATCH, facts.max_num_seqs) if many else 1
        wanted = min(facts.max_num_seqs, WANTED_KV_TOKENS // facts.max_model_len)
        try:
            return replace(self, explained=False)._choose(batch, max(1, wanted))
        except DoesNotFitError:
            return self._choose(1, 1)

    def priced(self, layers: tuple[int, ...]) -> Split:
        """The split with these layers."""
        asked = self.asked or Asked(1, PRICED_CONTEXT, 1)
        return self._choose(asked.batch, asked.max_sequences, layers)

    def _choose(self, batch: int, sequences: int, layers: tuple[int, ...] | None = None) -> Split:
        context = PRICED_CONTEXT if self.asked is None else self.asked.context
        return choose_split(
            self.shape,
            self.stages,
            batch=batch,
            context=min(context, self.facts.max_model_len),
            max_sequences=sequences,
            objective=self.config.objective,
            layers=layers,
            # A user who wrote the layout wants its order.
            order="auto" if self.config.layout == "auto" else "fixed",
            max_model_len=self.facts.max_model_len,
            max_batched_tokens=self.facts.max_num_batched_tokens,
            links=self.links,
            explained=self.explained,
            drafter=self.facts.drafter,
        )


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


def describe_split(plan: LayerPlan) -> tuple[str, ...]:
    """What the plan expects, in lines for the log; none where nothing is known."""
    split = plan.split
    if split is None:
        return ()
    work = split.work
    stages = "; ".join(
        f"stage {number}: {1e3 * stage.decode.seconds:.2f} ms"
        + "".join(
            f", {name} {1e3 * seconds:.2f}"
            for name, seconds in stage.decode.parts().items()
            if seconds >= 5e-6
        )
        for number, stage in enumerate(split.stages)
    )
    sources = sorted({f"{rank.device.kind} {rank.device.figures.source}" for rank in split.ranks})
    lines = [
        f"predicted decode step {1e3 * split.step_s:.2f} ms at batch {work.batch} and context "
        f"{work.context} ({stages}); KV cache {plan.kv_tokens} tokens; bandwidths: "
        f"{', '.join(sources)}"
    ]
    if split.gpu_only is not None:
        alone = split.gpu_only
        lines.append(
            "the model fits on the GPUs alone: with --pipeline-parallel-size "
            f"{len(alone.stages)} a decode step would take {1e3 * alone.step_s:.2f} ms"
        )
    return tuple(lines)

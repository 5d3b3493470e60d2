"""Description of the world that a rank's process joins: plain values, pickled by Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from placement.cluster.assignment import Seat
from placement.cluster.layout import Layout
from placement.model.expert_tensors import ExpertTensors
from placement.plan.devices import DeviceFigures
from ray_hetero.config import HeteroConfig

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup
    from vllm.engine.arg_utils import EngineArgs


@dataclass(frozen=True)
class EngineSpec:
    """Request of one `create_engine_config` call to this backend, carried to the executor."""

    engine_args: EngineArgs
    """Arguments as the user gave them; each rank builds its own configuration from them.  An expert
    rank gets them apart, since to unpickle them is to import vLLM."""
    config: HeteroConfig
    ray_address: str | None
    """Cluster that the calling process was connected to, if it was."""
    placement_group: PlacementGroup | None = None
    """Group that the calling process was started in, if it was."""
    engines: int = 1
    """Engines of one data-parallel server that start together in one Ray."""
    in_notebook: bool = False
    """Whether that process is the kernel of a notebook."""
    metrics_path: str = ""
    """File on the calling process's host that the ranks' figures are to be written to."""
    heartbeat_path: str = ""
    """File on the calling process's host that the engine's heartbeat is to be written to."""


@dataclass(frozen=True)
class SharedSettings:
    """Settings of the driver that every rank's configuration must have as well."""

    instance_id: str
    dtype: str
    max_model_len: int
    block_size: int
    seed: int
    max_num_batched_tokens: int
    max_num_seqs: int
    async_scheduling: bool
    enable_prefix_caching: bool
    enable_chunked_prefill: bool
    graph_tokens: tuple[int, ...]
    """Tokens of the steps that GPU ranks of mixed stages hold CUDA graphs of."""
    data_parallel: tuple[tuple[str, object], ...]
    """Data-parallel fields of the driver's ParallelConfig, by name."""
    kv_engine_id: str | None = None
    """Name by which the engine's KV connectors know it; None without a connector."""
    schedules_ahead: bool = False
    """Whether the driver schedules steps before it has the tokens of those before them; the ranks
    compute one step after another either way."""


@dataclass(frozen=True)
class World:
    """All ranks of one engine."""

    layout: Layout
    seats: tuple[Seat, ...]
    layers: tuple[int, ...]
    """Layers of each pipeline stage."""
    experts: tuple[Seat, ...] = ()
    """Expert ranks, which are none of vLLM's; their numbers follow those of the ranks."""
    expert_layers: int = 0
    """Layers, the model's last ones, whose experts lie on expert ranks."""

    @property
    def members(self) -> tuple[Seat, ...]:
        """All processes of the engine's devices: ranks and expert ranks, by number."""
        return self.seats + self.experts

    def describe(self, rank: int) -> str:
        """Name a rank for people: its device and its node."""
        seat = self.members[rank]
        kind = "experts" if seat.serves_experts else seat.kind
        return f"rank {rank} ({kind}, {seat.device}, node {seat.node_name})"

    def group_kinds(self, ranks: Sequence[int]) -> frozenset[str]:
        """Kinds of device among these ranks."""
        return frozenset(self.seats[rank].kind for rank in ranks)

    def on_one_node(self, ranks: Sequence[int]) -> bool:
        """Whether these ranks share a host."""
        return len({self.seats[rank].node_id for rank in ranks}) == 1

    def is_stock_group(self, ranks: Sequence[int]) -> bool:
        """Whether vLLM's own communicators serve these ranks of a stage: GPUs, or CPU sockets of
        one host.
        """
        kinds = self.group_kinds(ranks)
        return kinds == {"gpu"} or (kinds == {"cpu"} and self.on_one_node(ranks))

    @property
    def has_boundary(self) -> bool:
        """Whether stages of a pipeline meet at the stage boundary: all but those of vLLM's own."""
        return not self.is_stock and len(self.layout.stages) > 1

    @property
    def is_stock(self) -> bool:
        """Whether vLLM itself can run this world: GPUs only, in stages of one size.

        Any other has the V1 model runner, ranks that schedule nothing ahead and a Gloo world group.
        """
        return self.layout.is_stock

    @property
    def node_ids(self) -> frozenset[str]:
        """Nodes that hold at least one rank."""
        return frozenset(seat.node_id for seat in self.members)

    @property
    def has_cpu(self) -> bool:
        """Whether any rank is a CPU socket."""
        return "cpu" in self.layout.kinds

    def has_gpu_on(self, node_id: str) -> bool:
        """Whether any rank of a node is a GPU."""
        return any(seat.kind == "gpu" and seat.node_id == node_id for seat in self.seats)

    def has_socket_group(self, seat: Seat) -> bool:
        """Whether a seat's stage is several CPU ranks of one node."""
        stage = [other for other in self.seats if other.stage == seat.stage]
        places = {(other.kind, other.node_id) for other in stage}
        return len(stage) > 1 and places == {("cpu", seat.node_id)}

    @property
    def has_gpu(self) -> bool:
        """Whether any rank is a GPU."""
        return "gpu" in self.layout.kinds

    @property
    def is_cpu_only(self) -> bool:
        """Whether every rank is a CPU socket."""
        return not self.has_gpu


@dataclass(frozen=True)
class ExpertSource:
    """A checkpoint whose experts are loaded without vLLM."""

    model: str
    """Folder, or name on the hub."""
    tensors: ExpertTensors
    layers: int
    """Decoder layers of the model."""
    revision: str | None = None
    download_dir: str | None = None


@dataclass(frozen=True)
class Forecast:
    """Expectation of the plan for one rank."""

    batch: int
    """Sequences in the decode step that was priced."""
    context: int
    """Tokens of each of them."""
    step_s: float
    """Time of that decode step on the rank's stage, in seconds."""
    kv_tokens: int
    """Tokens that the KV cache of every rank must hold."""


@dataclass(frozen=True)
class RankSpec:
    """Everything that one rank's actor needs to start."""

    world: World
    seat: Seat
    engine: EngineSpec
    shared: SharedSettings
    threads: tuple[int, ...]
    """Logical CPUs that a CPU rank computes on; none for a GPU rank."""
    spare: tuple[int, ...]
    """Logical CPUs of its node that no CPU rank computes on; may be none."""
    own: tuple[int, ...] = ()
    """Logical CPUs of `spare` and those that this engine's CPU ranks compute on, which others may
    use until the engine serves; none where no CPU rank computes on the node."""
    forecast: Forecast | None = None
    """Forecast of the plan; None where nothing is known to plan from."""
    gpus_beside: tuple[int, ...] = ()
    """GPUs of a CPU rank's own NUMA nodes, by number, as far as the node tells."""
    near_gpus: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Logical CPUs near each GPU of its node, by the GPU's number there; those of `spare` serve for
    a GPU that has none."""
    own_near_gpus: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Logical CPUs of `own` on the NUMA node of each GPU, where that is known."""
    place: str = ""
    """Text of what a CPU rank's measured times depend on beside kernels and weights: its
    processor, its cores, and the CPU ranks that compute beside it."""
    gpu: DeviceFigures | None = None
    """GPU of the first stage, beside expert ranks; None where the plan knows none."""
    source: ExpertSource | None = None
    """Checkpoint of an expert rank; None where vLLM's classes load it, and for all other ranks."""
    meeting: str = ""
    """Name by which ranks of the stages and expert ranks of this engine find each other."""

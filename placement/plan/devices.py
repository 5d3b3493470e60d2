"""Speed and memory of devices and of the ways between them, and where the figures come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal

from placement.cluster.layout import Kind
from placement.host.row_costs import RowCosts
from placement.units import GB, GIB

Source = Literal["measured", "configured", "computed", "table", "assumed"]
"""Origin of a figure; computed ones are from the clocks and widths that a driver tells."""

NATIVE_STEP_TOKENS = 128
"""Most tokens of a step that a socket computes in one native call (csrc/kernels/sizes.h); more are
computed operator by operator."""


@dataclass(frozen=True)
class DeviceFigures:
    """Rates of one GPU or one CPU socket."""

    name: str
    kind: Kind
    read_bandwidth: float
    """Bytes per second that weights are read with from the device's own memory."""
    compute: float
    """Dense bf16 FLOP per second."""
    memory_bytes: int
    host_link: float | None = None
    """Bytes per second between a GPU and its host's memory; None for a socket."""
    source: Source = "table"
    """Origin of the bandwidth of the memory."""
    link_source: Source = "assumed"
    """Origin of the bandwidth of a GPU's link."""
    layer_latency_s: float = 0.0
    """Seconds of a layer beside its bytes and operations: kernel launches, thread barriers."""
    step_latency_s: float = 0.0
    """Seconds of a step beside its layers: inputs, sampling, messages."""
    is_launching: bool = False
    """Whether kernels are launched one by one while earlier ones run, as on an eager GPU: a layer
    then takes its latency or its reads, whichever is longer, not both."""
    read_share: float = 1.0
    """Share of the bytes of 16-bit matrices that a step reads: below 1 where they are compact."""
    reached_share: float = 1.0
    """Share of `read_bandwidth` at which a decode step reads weights while it multiplies them."""
    expanded: Mapping[int, float] = field(default_factory=dict, hash=False)
    """Weights per second that a socket's cores make bf16 of while they multiply one row, by bits of
    a weight; others are as fast as memory is read."""
    row_costs: RowCosts | None = None
    """Cost to a socket of a decode step of several rows; None where its operations tell."""
    adds_within_step: bool = False
    """Whether a decode step is one native call, in which the ranks of a group add up too."""

    @property
    def reached_bandwidth(self) -> float:
        """Bytes per second at which a decode step reads weights, keys and values."""
        return self.read_bandwidth * self.reached_share


@dataclass(frozen=True)
class Link:
    """One way between ranks."""

    name: str
    bandwidth: float
    """Bytes per second."""
    latency_s: float
    source: Source = "table"


@dataclass(frozen=True)
class Links:
    """The ways between ranks.  The defaults are assumptions until they are measured."""

    nccl: Link = Link("NCCL", 100 * GB, 15e-6)
    """GPUs of one node, in a group of GPUs only."""
    shm: Link = Link("shared memory", 10 * GB, 30e-6)
    """Sockets of one node, inside a tensor-parallel group of sockets only."""
    shared_sums: Link = Link("shared sums", 20 * GB, 5e-6)
    """Sockets of a group in decode steps that are one native call: memory that all ranks map."""
    boundary: Link = Link("shared messages", 10 * GB, 70e-6)
    """Messages from stage to stage of a node where a CPU rank is in the engine: shared memory."""
    handover: Link = Link("handover", 16 * GB, 13e-6)
    """Tokens from a GPU stage to expert ranks and sums back, once a layer: shared memory."""
    gloo: Link = Link("Gloo", 3 * GB, 150e-6)
    """Tensor-parallel groups of both kinds on one node: through host memory."""
    network: Link = Link("network", 1.25 * GB, 300e-6)
    """Ranks of different nodes; 10 Gbit/s."""


@dataclass(frozen=True)
class RankDevice:
    """The device of one rank."""

    node: str
    label: str
    """Name of the device on its node, for people: GPU 0, socket 1."""
    figures: DeviceFigures
    usable_bytes: int
    """Memory for weights, KV cache, activations and the runtime together."""
    runtime_bytes: int = GIB
    """Part of `usable_bytes` that process, libraries, CUDA context and graphs take."""
    kv_limit_bytes: int | None = None
    """Largest KV cache that the user allows; None is no limit."""

    @property
    def kind(self) -> Kind:
        """Kind of the device."""
        return self.figures.kind


@dataclass(frozen=True)
class PromptGpu:
    """A GPU that computes prompts of CPU ranks in whole layers, with weights over its link."""

    figures: DeviceFigures
    from_tokens: int
    """Tokens of a pass from which it does."""


@dataclass(frozen=True)
class StageDevices:
    """The tensor-parallel ranks of one pipeline stage, in their order."""

    ranks: tuple[RankDevice, ...]
    experts: tuple[RankDevice, ...] = ()
    """The expert ranks that compute experts for it; they hold nothing else of the stage."""
    expert_buffer_bytes: int = 0
    """Memory of each of its GPUs for experts that they read over their links in prompts; 0 where
    expert ranks compute all."""
    slot_bytes: int = 0
    """Memory of its GPU for slots with experts, which it computes in decode steps; 0 for none."""
    prompt_gpu: PromptGpu | None = None
    """GPU that computes prompts for a stage of CPU ranks; None where they do so themselves."""

    @property
    def kinds(self) -> frozenset[Kind]:
        """Kinds of its ranks."""
        return frozenset(rank.kind for rank in self.ranks)

    @property
    def nodes(self) -> frozenset[str]:
        """Nodes of its ranks."""
        return frozenset(rank.node for rank in self.ranks)

    @property
    def size(self) -> int:
        """Tensor-parallel size."""
        return len(self.ranks)

    @property
    def has_cpu(self) -> bool:
        """Whether any of its ranks is a socket."""
        return "cpu" in self.kinds


def group_link(stage: StageDevices, links: Links, tokens: int) -> Link:
    """The way the ranks of a tensor-parallel group take.

    Args:
        stage: the group.
        links: the ways there are.
        tokens: of the step.

    """
    if len(stage.nodes) > 1:
        return links.network
    if stage.kinds == {"gpu"}:
        return links.nccl
    if stage.kinds != {"cpu"}:
        return links.gloo
    adds_within_step = all(rank.figures.adds_within_step for rank in stage.ranks)
    return links.shared_sums if adds_within_step and tokens <= NATIVE_STEP_TOKENS else links.shm


def boundary_link(
    sender: StageDevices, receiver: StageDevices, links: Links, *, only_gpus: bool
) -> Link:
    """The way activations take from one stage to the next.

    Args:
        sender: the stage before.
        receiver: the stage after.
        links: the ways there are.
        only_gpus: whether the whole engine is GPUs; only then stages exchange over NCCL.

    """
    if len(sender.nodes | receiver.nodes) > 1:
        return links.network
    return links.nccl if only_gpus else links.boundary


def stages_of(devices: Sequence[RankDevice], sizes: Sequence[int]) -> list[StageDevices]:
    """Cut a list of devices into stages of so many ranks; what is left over is dropped."""
    ends = list(accumulate(sizes))
    return [
        StageDevices(tuple(devices[end - size : end]))
        for size, end in zip(sizes, ends, strict=True)
    ]

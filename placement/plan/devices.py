"""Speed and memory of devices and of the ways between them, and where the figures come from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from placement.cluster.layout import Kind
from placement.host.row_costs import RowCosts
from placement.units import GB, GIB

Source = Literal["measured", "configured", "table"]

NATIVE_STEP_TOKENS = 128
"""Most tokens of a step that a socket computes in one native call (csrc/kernels/sizes.h); more are
computed operator by operator."""


@dataclass(frozen=True)
class DeviceFigures:
    """What one GPU, or one CPU socket, can do."""

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
    layer_latency_s: float = 0.0
    """Seconds of a layer beside its bytes and operations: kernel launches, thread barriers."""
    step_latency_s: float = 0.0
    """Seconds of a step beside its layers: inputs, sampling, messages."""
    is_launching: bool = False
    """Whether kernels are launched one by one while earlier ones run, as on an eager GPU: a layer
    then takes its latency or its reads, whichever is longer, not both."""
    read_share: float = 1.0
    """Share of the bytes of 16-bit matrices that a step reads: below 1 where they are compact."""
    row_costs: RowCosts | None = None
    """Cost to a socket of a decode step of several rows; None where its operations tell."""
    adds_within_step: bool = False
    """Whether a decode step is one native call, in which the ranks of a group add up too."""


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


# Datasheet peaks.  NVIDIA: product briefs of the part, dense bf16 without sparsity; memory as the
# driver reports it.  Xeon 8480+: 8 channels of DDR5-4800 = 307.2 GB/s, AMX 1024 bf16 FLOP per cycle
# and core x 56 cores x 2.0 GHz.  EPYC 9654: 12 channels of DDR5-4800 = 460.8 GB/s, AVX-512 64 bf16
# FLOP per cycle and core x 96 cores x 2.4 GHz.  Memory of a socket depends on its DIMMs.
_TABLE: dict[str, tuple[Kind, float, float, int, float | None]] = {
    # name: kind, GB/s, bf16 TFLOP/s, memory in GiB, host link GB/s
    "H100 SXM": ("gpu", 3350, 989, 79, 64),
    "H100 PCIe": ("gpu", 2000, 756, 79, 64),
    "H200": ("gpu", 4800, 989, 139, 64),
    "A100 80GB": ("gpu", 2039, 312, 79, 32),
    "A100 40GB": ("gpu", 1555, 312, 39, 32),
    "L40S": ("gpu", 864, 362, 44, 32),
    "Xeon 8480+": ("cpu", 307.2, 114.7, 256, None),
    "EPYC 9654": ("cpu", 460.8, 14.7, 384, None),
}

_REACHABLE: dict[Kind, float] = {"gpu": 0.85, "cpu": 0.75}
_REACHABLE_COMPUTE: dict[Kind, float] = {"gpu": 0.6, "cpu": 0.4}


def known_parts() -> tuple[str, ...]:
    """Names in the table of known parts."""
    return tuple(_TABLE)


def known_part(name: str, *, reachable: bool = True) -> DeviceFigures | None:
    """Figures of a known part; None where the table does not have it.

    Args:
        name: a name of the table, upper or lower case.
        reachable: take the share of the datasheet's peak that programs reach (memory 85 % on a
            GPU and 75 % on a socket, compute 60 % and 40 %, host link 80 %), not the peak.

    """
    entry = next(((n, e) for n, e in _TABLE.items() if n.lower() == name.lower()), None)
    if entry is None:
        return None
    found, (kind, bandwidth, compute, memory, link) = entry
    return DeviceFigures(
        name=found,
        kind=kind,
        read_bandwidth=bandwidth * GB * (_REACHABLE[kind] if reachable else 1),
        compute=compute * 1e12 * (_REACHABLE_COMPUTE[kind] if reachable else 1),
        memory_bytes=memory * GIB,
        host_link=None if link is None else link * GB * (0.8 if reachable else 1),
    )


def stages_of(devices: Sequence[RankDevice], sizes: Sequence[int]) -> list[StageDevices]:
    """Cut a list of devices into stages of so many ranks; what is left over is dropped."""
    ends = list(accumulate(sizes))
    return [
        StageDevices(tuple(devices[end - size : end]))
        for size, end in zip(sizes, ends, strict=True)
    ]

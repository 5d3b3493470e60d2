"""Speeds of a GPU: measured on its host, else computed from what its driver tells, else published.

Only compute is taken from the table before it is computed: drivers tell neither the clock that a
GPU keeps under load nor the units that are switched off in parts such as H20.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from placement.host.topology import Gpu, GpuDetails
from placement.plan.devices import DeviceFigures, Source
from placement.plan.parts import REACHABLE, REACHABLE_LINK, Part, part_called
from placement.units import GB

ASSUMED_HOST_LINK = 25 * GB
"""Bytes per second between a GPU and its host where nothing tells: PCIe 4 with 16 lanes."""
ASSUMED_FLOP_PER_BYTE = 150
"""bf16 FLOP of a GPU for a byte that it reads, where nothing else tells (120 to 420)."""
REACHABLE_AT_HIGHEST_CLOCK = 0.5
"""Share of compute at the highest clock, which no GPU keeps while it multiplies matrices."""
LANE_GB_S = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
"""Nominal 10^9 bytes per second of one lane, one way, by generation of PCIe."""
# Dense bf16 FLOP per cycle of a multiprocessor, summed in float32 (float16 before 8.0), and its
# CUDA cores, by compute capability: NVIDIA's architecture white papers.
_MULTIPROCESSORS = {
    (7, 0): (1024, 64), (7, 5): (1024, 64), (8, 0): (2048, 64), (8, 6): (1024, 128),
    (8, 9): (1024, 128), (9, 0): (4096, 128), (10, 0): (8192, 128), (10, 3): (8192, 128),
    (12, 0): (1024, 128), (12, 1): (1024, 128),
}  # fmt: skip


@dataclass(frozen=True)
class Figure:
    """One figure of a GPU, and where it comes from."""

    value: float
    """Bytes or FLOP per second that programs reach."""
    source: Source


@dataclass(frozen=True)
class GpuSpeeds:
    """Everything that is known of a GPU's speeds, the figures that are taken first."""

    memory: tuple[Figure, ...]
    link: tuple[Figure, ...]
    compute: tuple[Figure, ...]


def gpu_speeds(gpu: Gpu) -> GpuSpeeds:
    """Known figures of a GPU of a host."""
    details, part = gpu.details or GpuDetails(), part_called(gpu.name)
    return GpuSpeeds(
        memory=tuple(_memory(gpu, details, part)),
        link=tuple(_link(gpu, details, part)),
        compute=tuple(_compute(gpu, details, part)),
    )


def gpu_figures(gpu: Gpu) -> DeviceFigures | None:
    """Figures of a GPU of a host; None where its memory bandwidth is not known.

    Its memory is 0 where the driver does not tell it.
    """
    speeds = gpu_speeds(gpu)
    if not speeds.memory:
        return None
    return with_bandwidth(gpu, speeds.memory[0])


def with_bandwidth(gpu: Gpu, memory: Figure) -> DeviceFigures:
    """Figures of a GPU whose memory bandwidth is this one; what else is not known is assumed."""
    speeds = gpu_speeds(gpu)
    link = speeds.link[0] if speeds.link else Figure(ASSUMED_HOST_LINK, "assumed")
    known = [figure.value for figure in speeds.compute]
    part = part_called(gpu.name)
    return DeviceFigures(
        name=short_name(gpu.name) if part is None else part.name,
        kind="gpu",
        read_bandwidth=memory.value,
        compute=known[0] if known else memory.value * ASSUMED_FLOP_PER_BYTE,
        memory_bytes=gpu.memory_bytes or 0,
        host_link=link.value,
        source=memory.source,
        link_source=link.source,
    )


def short_name(name: str | None) -> str:
    """Name of a GPU in tables: that as the driver writes it, without the maker's."""
    return re.sub(r"^NVIDIA (GeForce )?", "", name or "") or "GPU"


def _memory(gpu: Gpu, details: GpuDetails, part: Part | None) -> Iterator[Figure]:
    if gpu.rates is not None:
        yield Figure(gpu.rates.memory, "measured")
    if details.memory_bus_bits and details.memory_clock_mhz:
        # Two bits a cycle on each line.
        peak = details.memory_bus_bits * details.memory_clock_mhz * 1e6 * 2 / 8
        yield Figure(peak * REACHABLE["gpu"], "computed")
    if part is not None:
        yield Figure(part.figures.read_bandwidth, "table")


def _link(gpu: Gpu, details: GpuDetails, part: Part | None) -> Iterator[Figure]:
    if gpu.rates is not None:
        yield Figure(gpu.rates.to_gpu, "measured")
    # An idle link lowers its generation, not its width: narrower than it can be, it stays so.
    widths = [width for width in (details.link_width, details.link_width_max) if width]
    lane = LANE_GB_S.get(details.link_generation_max or 0)
    if widths and lane:
        yield Figure(min(widths) * lane * GB * REACHABLE_LINK, "computed")
    if part is not None and part.figures.host_link is not None:
        yield Figure(part.figures.host_link, "table")


def _compute(gpu: Gpu, details: GpuDetails, part: Part | None) -> Iterator[Figure]:
    if part is not None:
        yield Figure(part.figures.compute, "table")
    capability = details.compute_capability
    known = None if capability is None else _MULTIPROCESSORS.get(capability)
    if known and details.cuda_cores and details.clock_mhz:
        flop, cores = known
        if "GeForce" in (gpu.name or ""):
            flop //= 2
        peak = details.cuda_cores / cores * flop * details.clock_mhz * 1e6
        yield Figure(peak * REACHABLE_AT_HIGHEST_CLOCK, "computed")

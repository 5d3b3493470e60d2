"""Checks of a host's GPUs: driver, memory, place, link, and what plans know of their speed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from placement.host.topology import Gpu, GpuDetails, Host
from placement.plan.gpu_figures import Figure, gpu_speeds
from placement.units import GB, GIB
from ray_hetero.preflight.checks import Check

MEASURE = "ray-hetero doctor --measure"


def check_gpus(host: Host, on_bus: Sequence[str]) -> Iterator[Check]:
    """One line for each GPU, or one that says why there is none.

    Args:
        host: with its GPUs as the driver shows them.
        on_bus: PCI addresses of NVIDIA's display devices, whether a driver has them or not.

    """
    if host.gpus:
        yield from map(_check, host.gpus)
    elif on_bus:
        found = f"NVIDIA's device at {', '.join(on_bus)} has no driver that answers"
        yield Check("GPU", "warn", found, "install NVIDIA's driver; nvidia-smi must list the GPU")
    else:
        yield Check("GPU", "ok", "none: engines run on the CPU sockets")


def _check(gpu: Gpu) -> Check:
    speeds, details = gpu_speeds(gpu), gpu.details or GpuDetails()
    known = [
        gpu.name or "name unknown",
        "memory unknown" if gpu.memory_bytes is None else f"{gpu.memory_bytes / GIB:.1f} GiB",
        f"driver {details.driver}" if details.driver else "driver version unknown",
        "NUMA node unknown" if gpu.numa_node is None else f"NUMA node {gpu.numa_node}",
        _link(details),
        f"memory bandwidth {_shown(speeds.memory, GB, 'GB/s')}",
        f"link bandwidth {_shown(speeds.link, GB, 'GB/s')}",
        f"bf16 {_shown(speeds.compute, 1e12, 'TFLOP/s')}",
    ]
    remedy = "; ".join(_remedies(gpu, details))
    return Check(f"GPU {gpu.index}", "warn" if remedy else "ok", ", ".join(known), remedy)


def _remedies(gpu: Gpu, details: GpuDetails) -> Iterator[str]:
    speeds = gpu_speeds(gpu)
    keys = []
    if not speeds.memory:
        keys.append("set gpu.bandwidth_gb_s to 85 % of the datasheet's GB/s")
    if not speeds.link:
        keys.append("set gpu.link_gb_s, for which plans assume 25")
    if keys:
        yield f"{MEASURE}, or {' and '.join(keys)}"
    if gpu.memory_bytes is None:
        yield "nvidia-smi should show the memory of the GPU; without it no rank is planned there"
    if details.link_width and details.link_width < (details.link_width_max or 0):
        yield (
            f"the link uses {details.link_width} of {details.link_width_max} lanes: look at slot, "
            "riser and firmware"
        )


def _link(details: GpuDetails) -> str:
    """The link at its highest generation, and as it is negotiated now where that differs."""
    if not (details.link_generation_max and details.link_width):
        return "PCIe unknown"
    best = f"PCIe {details.link_generation_max} x{details.link_width}"
    now = details.link_generation
    return best if now in (None, details.link_generation_max) else f"{best} (idle: PCIe {now})"


def _shown(figures: Sequence[Figure], unit: float, name: str) -> str:
    """The figure that plans take, then the others, each with its source."""
    if not figures:
        return "unknown"
    first, *others = (f"{one.value / unit:,.0f} {name} {one.source}" for one in figures)
    if not others:
        return first
    rest = "; ".join(text.replace(f" {name}", "") for text in others)
    return f"{first} ({rest})"

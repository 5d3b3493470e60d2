"""Parts of a host: cores, NUMA nodes, sockets, GPUs.  Values only; reading them is `sysfs`.

A *socket* here is what one CPU rank is given: by default a CPU package with all NUMA nodes on it,
or, where the configuration says so, one NUMA node of it (sub-NUMA clustering) or an equal share
of its cores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SocketUnit = Literal["package", "numa"]


@dataclass(frozen=True)
class Core:
    """One physical core."""

    cpus: tuple[int, ...]
    """Online logical CPUs of the core (SMT siblings), ascending; never empty."""


@dataclass(frozen=True)
class NumaNode:
    """One NUMA node.  A node without cores is memory only (CXL expander, HBM in flat mode)."""

    id: int
    package: int | None
    """CPU package it belongs to; None for memory-only nodes, for a node over several packages and
    where the system does not say."""
    cores: tuple[Core, ...]
    """Cores that this process may use, by lowest logical CPU."""
    memory_bytes: int | None = None
    """All memory of the node; 0 where the process may not allocate (its cpuset)."""
    free_bytes: int | None = None
    """Memory that an allocation can get: free pages and page cache that the kernel drops."""
    distances: tuple[int, ...] = ()
    """SLIT distance to each online node in order of node id, 10 = itself; empty if unknown."""


@dataclass(frozen=True)
class GpuDetails:
    """Figures of a GPU's speed, as its driver tells them; None is unknown."""

    driver: str | None = None
    """Version of the driver."""
    memory_bus_bits: int | None = None
    memory_clock_mhz: int | None = None
    """Highest clock of the memory; it moves two bits a cycle on each line of the bus."""
    cuda_cores: int | None = None
    clock_mhz: int | None = None
    """Highest clock of the multiprocessors."""
    compute_capability: tuple[int, int] | None = None
    link_generation: int | None = None
    """Generation of PCIe that the link runs at now; an idle GPU lowers it."""
    link_generation_max: int | None = None
    """Highest generation that GPU and slot have in common."""
    link_width: int | None = None
    """Lanes that the link uses now."""
    link_width_max: int | None = None
    """Lanes that GPU and slot have in common."""
    is_computing: bool = False
    """Whether some process computed on it when it was asked."""


@dataclass(frozen=True)
class GpuRates:
    """Measured bytes per second of a GPU."""

    memory: float
    """Bytes read and written by a copy within the GPU's memory."""
    to_gpu: float
    """Bytes copied from page-locked memory of the host."""
    from_gpu: float
    """Bytes copied into page-locked memory of the host."""


@dataclass(frozen=True)
class Gpu:
    """One GPU; None is unknown."""

    index: int
    uuid: str | None = None
    name: str | None = None
    memory_bytes: int | None = None
    pci_address: str | None = None
    numa_node: int | None = None
    details: GpuDetails | None = None
    """Figures of the driver; None where its library does not answer."""
    rates: GpuRates | None = None
    """Measured speeds; None where nothing is measured."""


@dataclass(frozen=True)
class Socket:
    """Cores and memory that one CPU rank computes on."""

    id: int
    """Position on its host, 0-based, in the order packages → NUMA nodes → shares."""
    package: int | None
    numa_nodes: tuple[int, ...]
    """Nodes its cores are on, ascending; memory is bound to these."""
    cores: tuple[Core, ...]
    memory_bytes: int | None = None
    free_bytes: int | None = None

    @property
    def cpus(self) -> tuple[int, ...]:
        """One logical CPU per physical core: what the rank's OpenMP threads are bound to."""
        return tuple(core.cpus[0] for core in self.cores)


@dataclass(frozen=True)
class Host:
    """One machine as the calling process may use it (its cpuset and cgroup limits applied)."""

    name: str
    numa_nodes: tuple[NumaNode, ...]
    gpus: tuple[Gpu, ...] = ()
    instruction_sets: frozenset[str] = frozenset()
    """Names out of avx2, avx512f, avx512_bf16, avx512_vnni, amx_bf16, amx_int8 and amx_tile."""
    memory_limit_bytes: int | None = None
    """cgroup limit of the process; None where there is none."""
    cpu_limit: float | None = None
    """CPUs' worth of time that the cgroup grants (its quota); None where there is none."""
    offline_cpus: tuple[int, ...] = ()
    cpu_model: str | None = None

    @property
    def cores(self) -> tuple[Core, ...]:
        """All usable cores, by NUMA node."""
        return tuple(core for node in self.numa_nodes for core in node.cores)

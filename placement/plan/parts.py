"""Published figures of GPUs and processors: for descriptions of machines that are not here.

On a machine that is here, what is measured or told by the driver wins, see `gpu_figures`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from placement.cluster.layout import Kind
from placement.plan.devices import DeviceFigures
from placement.units import GB, GIB

REACHABLE: dict[Kind, float] = {"gpu": 0.85, "cpu": 0.75}
"""Share of the published memory bandwidth that programs reach."""
REACHABLE_COMPUTE: dict[Kind, float] = {"gpu": 0.6, "cpu": 0.4}
"""Share of the published compute that matrix products reach."""
REACHABLE_LINK = 0.8
"""Share of a link's nominal bandwidth that copies reach."""
PCIE_4, PCIE_5, NVLINK_C2C = 32.0, 64.0, 450.0
"""Nominal 10^9 bytes per second one way: 16 lanes of PCIe, and GH200's own link to its CPU."""


@dataclass(frozen=True)
class Part:
    """One line of the table: peaks as published."""

    name: str
    kind: Kind
    gb_s: float
    """Memory bandwidth in 10^9 bytes per second."""
    tflop_s: float
    """Dense bf16 products that are summed in float32, in 10^12 FLOP per second."""
    memory_gib: float
    """Memory of a GPU as its driver reports it; that of a socket depends on its DIMMs."""
    pattern: str
    """Expression that finds the end of the name that a driver or /proc/cpuinfo gives the part."""
    link_gb_s: float | None = None
    """Nominal bandwidth between a GPU and its host, one way."""

    @property
    def figures(self) -> DeviceFigures:
        """Figures that programs reach."""
        link = self.link_gb_s
        return DeviceFigures(
            name=self.name,
            kind=self.kind,
            read_bandwidth=self.gb_s * GB * REACHABLE[self.kind],
            compute=self.tflop_s * 1e12 * REACHABLE_COMPUTE[self.kind],
            memory_bytes=int(self.memory_gib * GIB),
            host_link=None if link is None else link * GB * REACHABLE_LINK,
            link_source="table",
        )


# NVIDIA: product briefs and datasheets, without sparsity.  GeForce cards multiply bf16 at half the
# rate where sums are float32, which is the rate that counts.  The variants of a name differ in
# memory and bandwidth, so each pattern says which one it means: a MIG slice, for example, is none.
_GPUS = (
    Part("H100 SXM", "gpu", 3350, 989, 79, r"\bH100 80GB HBM3$", PCIE_5),
    Part("H100 PCIe", "gpu", 2000, 756, 79, r"\bH100 PCIe$", PCIE_5),
    Part("H100 NVL", "gpu", 3900, 835, 93, r"\bH100 NVL$", PCIE_5),
    Part("H200", "gpu", 4800, 989, 139, r"\bH200( NVL)?$", PCIE_5),
    Part("H800", "gpu", 3350, 989, 79, r"\bH800$", PCIE_5),
    Part("H800 PCIe", "gpu", 2000, 756, 79, r"\bH800 PCIe$", PCIE_5),
    Part("H20", "gpu", 4000, 148, 95, r"\bH20$", PCIE_5),
    Part("GH200 96GB", "gpu", 4000, 990, 95, r"\bGH200 480GB$", NVLINK_C2C),
    Part("GH200 144GB", "gpu", 4900, 990, 140, r"\bGH200 144G( HBM3e)?$", NVLINK_C2C),
    Part("B200", "gpu", 8000, 2250, 178, r"\bB200$", PCIE_5),
    Part("A100 80GB", "gpu", 2039, 312, 79,
         r"\bA100([- ]SXM4)?-80GB$|\bA100 80GB PCIe$", PCIE_4),
    Part("A100 40GB", "gpu", 1555, 312, 39, r"\bA100-(SXM4|PCIE)-40GB$", PCIE_4),
    Part("A6000", "gpu", 768, 154.8, 47.9, r"\bRTX A6000$", PCIE_4),
    Part("L40S", "gpu", 864, 362, 44, r"\bL40S$", PCIE_4),
    Part("RTX 3090", "gpu", 936, 71, 24, r"\bRTX 3090$", PCIE_4),
    Part("RTX 4090", "gpu", 1008, 165.2, 23.9, r"\bRTX 4090$", PCIE_4),
    Part("RTX 5090", "gpu", 1792, 209.5, 31.8, r"\bRTX 5090$", PCIE_5),
    Part("RTX PRO 6000", "gpu", 1792, 503.8, 95.5,
         r"\bRTX PRO 6000 Blackwell( Max-Q)? Workstation Edition$", PCIE_5),
    Part("RTX PRO 6000 Server", "gpu", 1597, 503.8, 95.5,
         r"\bRTX PRO 6000 Blackwell Server Edition$", PCIE_5),
)  # fmt: skip

# Memory: channels x transfers x 8 bytes (EPYC 7003 8 x DDR4-3200, 9004 12 x DDR5-4800, 9005 12 x
# DDR5-6400; Xeon 4th generation and w9 8 x DDR5-4800, 5th 8 x DDR5-5600, 6980P 12 x MRDIMM-8800).
# Compute: cores x base clock x FLOP per cycle: AMX 1024 in bf16; AVX-512 64 in bf16 on Zen 4, 128
# on Zen 5; AVX2 32 in float32.
_SOCKETS = (
    Part("Xeon 8480+", "cpu", 307.2, 114.7, 256, r"\bXeon\b.* 8480\+$"),
    Part("Xeon 8480C", "cpu", 307.2, 114.7, 256, r"\bXeon\b.* 8480C$"),
    Part("Xeon 8592+", "cpu", 358.4, 124.5, 256, r"\bXeon\b.* 8592\+$"),
    Part("Xeon 6980P", "cpu", 844.8, 262.1, 768, r"\bXeon\b.* 6980P$"),
    Part("Xeon w9-3495X", "cpu", 307.2, 109, 256, r"\bXeon\b.* w9-3495X$"),
    Part("Xeon w9-3595X", "cpu", 307.2, 122.9, 256, r"\bXeon\b.* w9-3595X$"),
    Part("EPYC 7763", "cpu", 204.8, 5, 256, r"\bEPYC 7763( 64-Core Processor)?$"),
    Part("EPYC 9354", "cpu", 460.8, 6.7, 384, r"\bEPYC 9354P?( 32-Core Processor)?$"),
    Part("EPYC 9355", "cpu", 614.4, 14.5, 384, r"\bEPYC 9355P?( 32-Core Processor)?$"),
    Part("EPYC 9654", "cpu", 460.8, 14.7, 384, r"\bEPYC 9654P?( 96-Core Processor)?$"),
    Part("EPYC 9684X", "cpu", 460.8, 15.7, 384, r"\bEPYC 9684X( 96-Core Processor)?$"),
    Part("EPYC 9755", "cpu", 614.4, 44.2, 768, r"\bEPYC 9755( 128-Core Processor)?$"),
)  # fmt: skip

PARTS = (*_GPUS, *_SOCKETS)


def known_parts(kind: Kind | None = None) -> tuple[str, ...]:
    """Names in the table, of one kind or of both."""
    return tuple(part.name for part in PARTS if kind in (None, part.kind))


def known_part(name: str) -> Part | None:
    """The part of that name, upper or lower case; None where the table does not have it."""
    return next((part for part in PARTS if part.name.lower() == name.lower()), None)


def part_called(name: str | None) -> Part | None:
    """The part that goes by that name; None where the table does not have it.

    Args:
        name: as NVML or /proc/cpuinfo write it, or as the table does; None is unknown.

    """
    if name is None:
        return None
    cleaned = re.sub(r"\((R|TM)\)", "", name).strip()
    found = (part for part in PARTS if re.search(part.pattern, cleaned, re.IGNORECASE))
    return next(found, known_part(cleaned))

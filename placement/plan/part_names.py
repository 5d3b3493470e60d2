"""Entries in the known parts by the name that a driver or /proc/cpuinfo gives a device."""

from __future__ import annotations

import re

from placement.plan.devices import DeviceFigures, known_part

# The variants of a name differ in memory and bandwidth, so each pattern says which one it means:
# H100 NVL, for example, is neither of the two H100 of the table, and a MIG slice is no whole GPU.
_NAMES = (
    (r"\bH100 80GB HBM3$", "H100 SXM"),
    (r"\bH100 PCIe$", "H100 PCIe"),
    (r"\bH200( NVL)?$", "H200"),
    (r"\bA100([- ]SXM4)?-80GB$|\bA100 80GB PCIe$", "A100 80GB"),
    (r"\bA100-(SXM4|PCIE)-40GB$", "A100 40GB"),
    (r"\bL40S$", "L40S"),
    (r"\bXeon\b.* 8480\+$", "Xeon 8480+"),
    (r"\bEPYC 9654P?( 96-Core Processor)?$", "EPYC 9654"),
)


def part_called(name: str | None) -> DeviceFigures | None:
    """Figures of the part that goes by that name; None where the table does not have it.

    Args:
        name: as NVML or /proc/cpuinfo write it, or as the table does; None is unknown.

    """
    if name is None:
        return None
    cleaned = re.sub(r"\((R|TM)\)", "", name).strip()
    found = next((part for pattern, part in _NAMES if re.search(pattern, cleaned)), cleaned)
    return known_part(found)

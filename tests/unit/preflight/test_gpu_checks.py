"""Lines of `doctor` on GPUs: all that is known of each, and what to type where something is not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from placement.host.gpus import devices_on_bus
from placement.host.topology import Gpu, GpuDetails, GpuRates, Host
from ray_hetero.preflight.checks import Check
from ray_hetero.preflight.gpu_checks import check_gpus

DETAILS = GpuDetails(
    driver="590.44", memory_bus_bits=512, memory_clock_mhz=14001, cuda_cores=21760, clock_mhz=3090,
    compute_capability=(12, 0), link_generation=1, link_generation_max=5, link_width=16,
    link_width_max=16,
)  # fmt: skip
GPU = Gpu(0, "GPU-a", "NVIDIA GeForce RTX 5090", 32607 << 20, "0000:65:00.0", 1, DETAILS)


def check(gpu: Gpu) -> Check:
    (found,) = check_gpus(Host("a", (), gpus=(gpu,)), ())
    return found


def test_a_gpu_in_one_line() -> None:
    found = check(GPU)
    assert (found.name, found.status, found.remedy) == ("GPU 0", "ok", "")
    assert found.found == (
        "NVIDIA GeForce RTX 5090, 31.8 GiB, driver 590.44, NUMA node 1, PCIe 5 x16 (idle: PCIe 1), "
        "memory bandwidth 1,523 GB/s computed (1,523 table), "
        "link bandwidth 50 GB/s computed (51 table), bf16 126 TFLOP/s table (134 computed)"
    )


def test_measured_figures_come_first() -> None:
    found = check(replace(GPU, rates=GpuRates(1.6e12, 56e9, 55e9))).found
    assert "memory bandwidth 1,600 GB/s measured (1,523 computed; 1,523 table)" in found
    assert "link bandwidth 56 GB/s measured (50 computed; 51 table)" in found


@pytest.mark.parametrize(
    ("changed", "found", "remedy"),
    [
        ({"memory_bus_bits": None}, "memory bandwidth unknown", "set gpu.bandwidth_gb_s to 85 %"),
        ({"link_generation_max": None}, "PCIe unknown", "set gpu.link_gb_s"),
        ({"link_width": 8}, "PCIe 5 x8", "the link uses 8 of 16 lanes"),
    ],
)
def test_what_is_wrong_is_a_warning(changed: dict[str, Any], found: str, remedy: str) -> None:
    unknown = replace(GPU, name="NVIDIA X1", details=replace(DETAILS, **changed))
    said = check(unknown)
    assert said.status == "warn"
    assert found in said.found
    assert remedy in said.remedy


def test_a_gpu_without_a_driver_is_seen_on_the_bus(tmp_path: Path) -> None:
    for address, vendor, kind in (
        ("0000:65:00.0", "0x10de", "0x030200"),  # a GPU
        ("0000:65:00.1", "0x10de", "0x040300"),  # its sound
        ("0000:01:00.0", "0x1002", "0x030000"),  # somebody else's
    ):
        folder = tmp_path / "sys/bus/pci/devices" / address
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(f"{vendor}\n")
        (folder / "class").write_text(f"{kind}\n")
    assert devices_on_bus(tmp_path) == ("0000:65:00.0",)
    (found,) = check_gpus(Host("a", ()), devices_on_bus(tmp_path))
    assert (found.status, "0000:65:00.0 has no driver" in found.found) == ("warn", True)
    (none,) = check_gpus(Host("a", ()), ())
    assert (none.status, none.found) == ("ok", "none: engines run on the CPU sockets")

"""GPUs of a host: from NVML, else nvidia-smi, else the driver's files in /proc; else none."""

from __future__ import annotations

import csv
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

from placement.errors import TopologyError
from placement.host import nvml
from placement.host.topology import Gpu, GpuDetails
from placement.host.tree import Tree, one_line

NVIDIA_SMI_FIELDS = "index,uuid,name,memory.total,pci.bus_id"
NVIDIA_SMI_TIMEOUT_S = 30.0
MEBIBYTE = 1 << 20
NVIDIA, DISPLAY = "0x10de", "0x03"
"""PCI's number of the vendor, and how the class of its display devices begins."""


def read_gpus(root: Path = Path("/")) -> tuple[Gpu, ...]:
    """GPUs in the driver's order; what the driver does not tell is None.

    Another root than `/` asks no driver but reads the copy of /proc/driver/nvidia below it.

    Raises:
        TopologyError: nvidia-smi hangs, or answers what it does not print elsewhere.

    """
    tree = Tree(root)
    if root != Path("/"):
        return _from_proc(tree)
    found = _from_nvml(tree)
    if found is None:
        found = _from_nvidia_smi(tree)
    return _from_proc(tree) if found is None else found


def devices_on_bus(root: Path = Path("/")) -> tuple[str, ...]:
    """PCI addresses of NVIDIA's display devices, whether a driver has them or not."""
    tree, found = Tree(root), []
    for folder in sorted((root / "sys/bus/pci/devices").glob("*")):
        name = f"sys/bus/pci/devices/{folder.name}"
        is_display = (tree.find_text(f"{name}/class") or "").startswith(DISPLAY)
        if is_display and (tree.find_text(f"{name}/vendor") or "").strip() == NVIDIA:
            found.append(folder.name)
    return tuple(found)


def _from_nvml(tree: Tree) -> tuple[Gpu, ...] | None:
    """None where NVML is not installed, or no driver is loaded."""
    try:
        with nvml.opened() as library:
            driver = library.driver
            devices = ((index, library.device(index)) for index in range(library.count()))
            return tuple(
                _nvml_gpu(tree, device, index, driver)
                for index, device in devices
                if device is not None
            )
    except nvml.NvmlError:
        return None


def _nvml_gpu(tree: Tree, device: nvml.NvmlDevice, index: int, driver: str | None) -> Gpu:
    gpu = _gpu(
        tree,
        index=index,
        uuid=device.text("UUID"),
        name=device.text("Name"),
        memory_bytes=device.memory_bytes,
        bus_id=device.pci_address,
    )
    details = GpuDetails(
        driver=driver,
        memory_bus_bits=device.number("MemoryBusWidth"),
        memory_clock_mhz=device.number("MaxClockInfo", nvml.CLOCK_MEMORY),
        cuda_cores=device.number("NumGpuCores"),
        clock_mhz=device.number("MaxClockInfo", nvml.CLOCK_SM),
        compute_capability=device.compute_capability,
        link_generation=device.number("CurrPcieLinkGeneration"),
        link_generation_max=device.number("MaxPcieLinkGeneration"),
        link_width=device.number("CurrPcieLinkWidth"),
        link_width_max=device.number("MaxPcieLinkWidth"),
        is_computing=device.is_computing,
    )
    return replace(gpu, details=details)


def _from_nvidia_smi(tree: Tree) -> tuple[Gpu, ...] | None:
    """None where the command is not installed or finds no driver."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return None
    query = [command, f"--query-gpu={NVIDIA_SMI_FIELDS}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(
            query, capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_S, check=False
        )
    except OSError:
        return None
    except subprocess.TimeoutExpired:
        raise TopologyError(
            f"nvidia-smi did not answer within {NVIDIA_SMI_TIMEOUT_S:.0f} s; the driver may hang: "
            "run nvidia-smi by hand, and see dmesg for NVRM: Xid lines"
        ) from None
    return None if answer.returncode else parse_nvidia_smi(answer.stdout, tree)


def parse_nvidia_smi(table: str, tree: Tree) -> tuple[Gpu, ...]:
    """GPUs of `nvidia-smi --query-gpu=… --format=csv,noheader,nounits`.

    Raises:
        TopologyError: a row has other than the five fields, or its index is no number.

    """
    return tuple(
        _nvidia_smi_gpu(row, tree) for row in csv.reader(table.splitlines(), skipinitialspace=True)
    )


def _nvidia_smi_gpu(row: list[str], tree: Tree) -> Gpu:
    if len(row) != len(NVIDIA_SMI_FIELDS.split(",")) or not row[0].isdecimal():
        raise TopologyError(f"nvidia-smi: expected {NVIDIA_SMI_FIELDS}, found {','.join(row)!r}")
    uuid, name, memory, bus_id = (None if "[" in field else field for field in row[1:])
    memory_bytes = int(memory) * MEBIBYTE if memory and memory.isdecimal() else None
    return _gpu(tree, int(row[0]), uuid, name, memory_bytes, bus_id)


def _from_proc(tree: Tree) -> tuple[Gpu, ...]:
    """GPUs that the loaded driver lists in /proc; it does not tell the memory."""
    folders = sorted((tree.root / "proc/driver/nvidia/gpus").glob("*"))
    return tuple(_proc_gpu(tree, index, folder.name) for index, folder in enumerate(folders))


def _proc_gpu(tree: Tree, index: int, address: str) -> Gpu:
    text = tree.text(f"proc/driver/nvidia/gpus/{address}/information")
    fields = dict(re.findall(r"^([^:]+):[ \t]*(.+?)[ \t]*$", text, re.MULTILINE))
    return _gpu(tree, index, fields.get("GPU UUID"), fields.get("Model"), None, address)


def _gpu(
    tree: Tree,
    index: int,
    uuid: str | None,
    name: str | None,
    memory_bytes: int | None,
    bus_id: str | None,
) -> Gpu:
    address = _pci_address(bus_id) if bus_id else None
    uuid, name = (None if text is None else one_line(text) for text in (uuid, name))
    return Gpu(index, uuid, name, memory_bytes, address, _numa_node(tree, address))


def _pci_address(bus_id: str) -> str:
    """PCI address as /sys writes it: `00000000:65:00.0` → `0000:65:00.0`."""
    match = re.fullmatch(r"([0-9a-fA-F]{4,8}):([0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7])", bus_id)
    if match is None:
        raise TopologyError(f"GPU: expected a PCI address such as 0000:65:00.0, found {bus_id!r}")
    return f"{int(match[1], 16):04x}:{match[2].lower()}"


def _numa_node(tree: Tree, address: str | None) -> int | None:
    """Nearest node; None where the firmware does not say (-1) or the device is hidden."""
    if address is None:
        return None
    node = tree.find_integer(f"sys/bus/pci/devices/{address}/numa_node")
    return None if node is None or node < 0 else node


def visible_gpus(there: int, visible: str | None) -> int:
    """GPUs of this host that a Ray started here offers.

    Args:
        there: GPUs that the driver shows.
        visible: CUDA_VISIBLE_DEVICES, if set.

    """
    if visible is None:
        return there
    return min(there, sum(name.strip() not in ("", "-1") for name in visible.split(",")))

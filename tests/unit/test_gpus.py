"""GPUs as NVML, nvidia-smi and /proc tell them, with and without a driver."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from placement.errors import TopologyError
from placement.host import gpus
from placement.host.gpus import read_gpus
from placement.host.topology import Gpu


class FakeNvml(ModuleType):
    """NVML of one H100 and of one GPU that shares the host's memory."""

    class NVMLError(Exception):
        pass

    def __init__(self, driver: bool = True) -> None:
        super().__init__("pynvml")
        self.driver = driver
        self.open = 0

    def nvmlInit(self) -> None:  # noqa: N802
        if not self.driver:
            raise self.NVMLError("Driver Not Loaded")
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetMemoryInfo(self, device: int) -> SimpleNamespace:  # noqa: N802
        if device == 1:
            raise self.NVMLError("Not Supported")
        return SimpleNamespace(total=85_520_809_984)

    def nvmlDeviceGetUUID(self, device: int) -> str:  # noqa: N802
        return f"GPU-{device}"

    def nvmlDeviceGetName(self, device: int) -> str | bytes:  # noqa: N802
        return b"NVIDIA H100" if device == 0 else "NVIDIA GB10"

    def nvmlDeviceGetPciInfo(self, device: int) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(busId=f"00000000:F{device}:00.0")


@pytest.fixture
def no_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_nvml: None) -> Path:
    """A place for a program called nvidia-smi that is found first."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return tmp_path / "nvidia-smi"


def assert_only_proc_is_left() -> None:
    """What is left when nobody answers: on a machine with a driver, what it writes to /proc."""
    folder = Path("/proc/driver/nvidia/gpus")
    seen = read_gpus()
    assert len(seen) == (len(list(folder.iterdir())) if folder.exists() else 0)
    assert all(gpu.memory_bytes is None for gpu in seen)


def put(program: Path, script: str) -> None:
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)


def test_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    first, second = read_gpus()
    assert first == Gpu(0, "GPU-0", "NVIDIA H100", 85_520_809_984, "0000:f0:00.0", first.numa_node)
    assert second.name == "NVIDIA GB10"
    assert second.memory_bytes is None
    assert nvml.open == 0


def test_nvidia_smi_is_asked_where_nvml_has_no_driver(
    monkeypatch: pytest.MonkeyPatch, nvidia_smi: Path
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(driver=False))
    put(nvidia_smi, "echo '0, GPU-a, NVIDIA L4, 23034, 00000000:FF:00.0'")
    assert read_gpus() == (Gpu(0, "GPU-a", "NVIDIA L4", 23034 << 20, "0000:ff:00.0", None),)


def test_nvidia_smi_gets_the_question_it_understands(nvidia_smi: Path, tmp_path: Path) -> None:
    put(nvidia_smi, f'echo "$@" > {tmp_path}/asked')
    assert read_gpus() == ()
    asked = (tmp_path / "asked").read_text().strip()
    fields = "index,uuid,name,memory.total,pci.bus_id"
    assert asked == f"--query-gpu={fields} --format=csv,noheader,nounits"


@pytest.mark.parametrize("script", ["echo 'No devices were found'; exit 6", "exit 9"])
def test_nvidia_smi_without_a_driver(script: str, nvidia_smi: Path) -> None:
    put(nvidia_smi, script)
    assert_only_proc_is_left()


def test_nvidia_smi_that_cannot_be_started(nvidia_smi: Path) -> None:
    nvidia_smi.write_bytes(b"\x7fELF not really")
    nvidia_smi.chmod(0o755)
    assert_only_proc_is_left()


def test_nvidia_smi_that_hangs(nvidia_smi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(nvidia_smi, "exec sleep 60")
    monkeypatch.setattr(gpus, "NVIDIA_SMI_TIMEOUT_S", 0.2)
    with pytest.raises(TopologyError, match="nvidia-smi did not answer within"):
        read_gpus()


def test_no_driver_at_all(no_nvml: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert_only_proc_is_left()

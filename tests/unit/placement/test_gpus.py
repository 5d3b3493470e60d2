"""GPUs as NVML, nvidia-smi and /proc tell them, with and without a driver."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import fake_nvidia
import pytest
from fake_nvidia import CARDS, Card
from plan_cases import LLAMA_8B

from placement.cluster.assignment import Node
from placement.errors import TopologyError
from placement.host import gpus, nvml
from placement.host.gpu_rates import with_gpu_rates
from placement.host.gpus import read_gpus
from placement.host.sockets import sockets_of
from placement.host.topology import Core, Gpu, GpuDetails, GpuRates, Host, NumaNode
from placement.plan.gpu_figures import gpu_figures, gpu_speeds
from ray_hetero.config import HeteroConfig, load_config
from ray_hetero.planning.engine_facts import EngineFacts
from ray_hetero.planning.machine import Machine
from ray_hetero.planning.model_plan import plan_model
from ray_hetero.planning.plan_request import PlanRequest
from ray_hetero.planning.seat_devices import UnknownDeviceError


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_nvidia.build(tmp_path_factory.mktemp("nvidia"))


@pytest.fixture
def no_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "LIBRARY", "libnvidia-ml.so.none")


class Driver:
    """A driver that has these GPUs, for this process and for those that it starts."""

    def __init__(self, libraries: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers = tmp_path / "gpus.txt"
        monkeypatch.setattr(nvml, "LIBRARY", str(libraries / "libnvidia-ml.so.1"))
        monkeypatch.setenv("LD_LIBRARY_PATH", str(libraries))
        monkeypatch.setenv("FAKE_NVIDIA", str(self.answers))

    def has(self, *lines: str) -> tuple[Gpu, ...]:
        self.answers.write_text("".join(lines))
        return read_gpus()


@pytest.fixture
def driver(libraries: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
    return Driver(libraries, tmp_path, monkeypatch)


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


H100 = next(card for card in CARDS if card.name.endswith("H100 80GB HBM3"))
RTX_5090 = next(card for card in CARDS if card.name.endswith("RTX 5090"))


def test_nvml(driver: Driver) -> None:
    shared = RTX_5090.lines(1, memory_mib=None, bus_bits=None, memory_mhz=None, name="NVIDIA GB10")
    first, second = driver.has(H100.lines(processes=2), shared)
    assert (first.index, first.uuid, first.name) == (0, "GPU-0", "NVIDIA H100 80GB HBM3")
    assert (first.memory_bytes, first.pci_address) == (81559 << 20, "0000:f0:00.0")
    assert first.details == GpuDetails(
        driver="590.44.01", memory_bus_bits=5120, memory_clock_mhz=2619, cuda_cores=16896,
        clock_mhz=1980, compute_capability=(9, 0), link_generation=1, link_generation_max=5,
        link_width=16, link_width_max=16, is_computing=True,
    )  # fmt: skip
    assert (second.name, second.memory_bytes) == ("NVIDIA GB10", None)
    assert second.details is not None
    assert not second.details.is_computing
    assert gpu_figures(second) is None


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
def test_speeds_are_computed_from_what_the_driver_tells(card: Card, driver: Driver) -> None:
    (gpu,) = driver.has(card.lines())
    figures, speeds = gpu_figures(gpu), gpu_speeds(gpu)
    assert figures is not None
    assert (figures.source, figures.link_source) == ("computed", "computed")
    assert figures.read_bandwidth == pytest.approx(0.85 * card.gb_s * 1e9, rel=0.04)
    lane = {3: 0.985, 4: 1.969, 5: 3.938}[card.gen]
    assert figures.host_link == pytest.approx(0.8 * 16 * lane * 1e9)
    (computed,) = (figure for figure in speeds.compute if figure.source == "computed")
    # The highest clock is up to a third above the one that the datasheet counts with.
    assert 0.98 <= computed.value / 0.5 / (card.tflop_s * 1e12) < 1.31
    published = [figure.value for figure in speeds.compute if figure.source == "table"]
    assert figures.compute == (published or [computed.value])[0]
    for known in (figure for figure in speeds.memory if figure.source == "table"):
        assert known.value == pytest.approx(figures.read_bandwidth, rel=0.04)


def test_compute_of_parts_with_units_switched_off_is_the_published_one(driver: Driver) -> None:
    h20 = replace(H100, name="NVIDIA H20", cores=9984, bus_bits=6144, memory_mib=97871)
    (gpu,) = driver.has(h20.lines())
    figures = gpu_figures(gpu)
    assert figures is not None
    assert figures.compute == pytest.approx(0.6 * 148e12)
    assert figures.read_bandwidth == pytest.approx(0.85 * 4.02e12, rel=0.01)


def test_a_narrow_slot_counts_and_an_idle_generation_does_not(driver: Driver) -> None:
    (gpu,) = driver.has(RTX_5090.lines(width_now=8, now=1))
    figures = gpu_figures(gpu)
    assert figures is not None
    assert figures.host_link == pytest.approx(0.8 * 8 * 3.938e9)


def test_what_a_gpu_does_not_tell_is_assumed_and_said(driver: Driver) -> None:
    (gpu,) = driver.has(RTX_5090.lines(name="NVIDIA X1", capability=130, gen=None))
    figures = gpu_figures(gpu)
    assert figures is not None
    assert (figures.host_link, figures.link_source) == (25e9, "assumed")
    assert figures.compute == 150 * figures.read_bandwidth


def test_rates_are_measured_once_by_another_process(
    driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("IN", 2e12), ("TO", 55e9), ("FROM", 50e9), ("FREE", 1 << 28)):
        monkeypatch.setenv(f"FAKE_{name}", str(int(value)))
    monkeypatch.setenv("FAKE_UUID", "GPU-0")
    node = NumaNode(0, 0, (Core((0,)),))
    # GPUs that are alike are measured once; CUDA refuses any but the first here.
    host = Host("a", (node,), gpus=driver.has(H100.lines(), H100.lines(1)))
    started = time.monotonic()
    found = with_gpu_rates(host, directory=tmp_path)
    assert time.monotonic() - started < 30
    for gpu in found.gpus:
        assert gpu.rates is not None
        assert gpu.rates.memory == pytest.approx(4e12, rel=1e-3)
        assert gpu.rates.to_gpu == pytest.approx(55e9, rel=1e-3)
        assert gpu.rates.from_gpu == pytest.approx(50e9, rel=1e-3)
        figures = gpu_figures(gpu)
        assert figures is not None
        assert (figures.source, figures.link_source) == ("measured", "measured")
        assert figures.host_link == gpu.rates.to_gpu
    monkeypatch.setenv("FAKE_UUID", "none")
    assert with_gpu_rates(host, directory=tmp_path) == found


def test_a_gpu_that_cannot_be_measured_is_named(
    driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setenv("FAKE_UUID", "another")
    host = Host("a", (), gpus=driver.has(RTX_5090.lines()))
    assert with_gpu_rates(host, directory=tmp_path) == host
    assert "GPU 0 (NVIDIA GeForce RTX 5090) is not measured: cuInit answers 100" in caplog.text


def test_a_gpu_that_computes_is_not_measured(driver: Driver, tmp_path: Path) -> None:
    def probe(gpu: Gpu, cpus: tuple[int, ...]) -> GpuRates:
        raise AssertionError("measured")

    host = Host("a", (), gpus=driver.has(H100.lines(processes=1)))
    assert with_gpu_rates(host, directory=tmp_path, probe=probe) == host


def test_nvidia_smi_is_asked_where_nvml_has_no_driver(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, nvidia_smi: Path
) -> None:
    monkeypatch.delenv("FAKE_NVIDIA")
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


def test_a_gpu_that_nobody_knows_is_named_with_the_key(driver: Driver, tmp_path: Path) -> None:
    (gpu,) = driver.has(RTX_5090.lines(name="NVIDIA X1", bus_bits=None))
    cores = tuple(Core((cpu,)) for cpu in range(4))
    host = Host("a", (NumaNode(0, 0, cores, 64 << 30, 64 << 30),), gpus=(gpu,), cpu_model="X")
    node = Node("a", "", host, sockets_of(host), gpus=1, cpus=4, is_driver=True)
    facts = EngineFacts(LLAMA_8B, "", 32, 4096, 256, 2048, 0.92)
    machine = Machine((node,), lambda seats, threads: dict.fromkeys(threads, 1e11))
    with pytest.raises(
        UnknownDeviceError,
        match=r"^NVIDIA X1 \(GPU 0 of node a\): its memory bandwidth is not known: "
        r".* Set gpu\.bandwidth_gb_s to 85 % of the datasheet's GB/s$",
    ):  # fmt: skip
        plan_model("m", PlanRequest(HeteroConfig(), machine, facts))
    given = load_config({"ray_hetero": {"gpu": {"bandwidth_gb_s": 1500, "link_gb_s": 40}}})
    (rank,) = plan_model("m", PlanRequest(given, machine, facts)).plan.split.ranks
    figures = rank.device.figures
    assert (figures.read_bandwidth, figures.source) == (1500e9, "configured")
    assert (figures.host_link, figures.link_source) == (40e9, "configured")

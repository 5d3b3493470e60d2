"""Figures of a real GPU: what its driver tells, copies that are timed, and torch's own copies."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from gpu_host import IS_PRETENDED, needs_gpus

from placement.host import gpu_rates
from placement.host.gpu_rates import measure, with_gpu_rates
from placement.host.sysfs import read_host
from placement.plan.gpu_figures import gpu_speeds
from placement.units import GIB, MIB

pytestmark = [
    pytest.mark.gpu,
    needs_gpus(1),
    pytest.mark.skipif(IS_PRETENDED, reason="a pretended GPU has no driver"),
]
LIMIT_S = 2.0


def best_s(to: torch.Tensor, source: torch.Tensor) -> float:
    """Seconds of the fastest of several copies."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(6):
        begin.record()
        to.copy_(source, non_blocking=True)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return min(times)


def test_the_driver_tells_everything_that_is_computed_with() -> None:
    gpu = read_host().gpus[0]
    assert gpu.details is not None
    unknown = [name for name, value in vars(gpu.details).items() if value is None]
    assert unknown == []
    speeds = gpu_speeds(gpu)
    sources = [figures[-1].source for figures in (speeds.memory, speeds.link, speeds.compute)]
    assert set(sources) <= {"computed", "table"}


def test_rates_are_measured_in_two_seconds_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = read_host()
    measure(host.gpus[0], ())  # wakes a driver that is not persistent
    began = time.monotonic()
    rates = measure(host.gpus[0], ())
    seconds = time.monotonic() - began
    print(f"measured in {seconds:.2f} s: {rates}")
    assert seconds < LIMIT_S
    found = with_gpu_rates(host, directory=tmp_path)
    gpu = found.gpus[0]
    assert gpu.rates is not None
    speeds = gpu_speeds(gpu)
    for name, figures in (("memory", speeds.memory), ("link", speeds.link)):
        said = {one.source: round(one.value / 1e9, 1) for one in figures}
        print(f"{gpu.name}, {name} in GB/s: {said}")
        measured, computed = (
            next(one.value for one in figures if one.source == source)
            for source in ("measured", "computed")
        )
        # Computed ones are a usual share of the nominal bandwidth, which nothing exceeds.
        assert 0.75 < measured / computed < 1.25
    monkeypatch.setattr(gpu_rates, "PROGRAM", "no.such.program")
    assert with_gpu_rates(host, directory=tmp_path) == found


def test_torch_copies_as_fast() -> None:
    rates = measure(read_host().gpus[0], ())
    near, other = (torch.empty(GIB, dtype=torch.uint8, device="cuda:0") for _ in range(2))
    pinned = torch.empty(128 * MIB, dtype=torch.uint8, pin_memory=True)
    part = near[: pinned.numel()]
    assert rates.memory == pytest.approx(2 * GIB / best_s(near, other), rel=0.15)
    assert rates.to_gpu == pytest.approx(pinned.numel() / best_s(part, pinned), rel=0.15)
    assert rates.from_gpu == pytest.approx(pinned.numel() / best_s(pinned, part), rel=0.15)

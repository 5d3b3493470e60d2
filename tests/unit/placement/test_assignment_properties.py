"""Seats over random clusters of random machines, and how long planning a large one takes."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import node

from placement.cluster.assignment import Node, assign
from placement.cluster.layout import Kind, Layout
from placement.errors import LayoutError
from placement.host.sockets import sockets_of
from placement.host.topology import Core, Host, NumaNode
from ray_hetero.config import HeteroConfig
from ray_hetero.planning.world_plan import compute_threads, plan_world, spare_cpus

KINDS: list[Kind] = ["cpu", "gpu"]


@st.composite
def hosts(draw: st.DrawFn) -> Host:
    """A host of a few packages, cut into NUMA nodes, with SMT, nodes without cores among them."""
    threads, cpu, numa = draw(st.integers(1, 2)), 0, []
    for package in range(draw(st.integers(0, 3))):
        for cores in draw(st.lists(st.integers(0, 6), min_size=1, max_size=3)):
            first = [cpu + core * threads for core in range(cores)]
            cpu += cores * threads
            made = tuple(Core(tuple(range(start, start + threads))) for start in first)
            numa.append(NumaNode(len(numa), package if made else None, made, 1 << 30, 1 << 29))
    return Host("h", tuple(numa))


@st.composite
def clusters(draw: st.DrawFn) -> list[Node]:
    """Nodes as they come from discovery, in no order; a socket has no fewer cores than ranks."""
    unit = draw(st.sampled_from(["package", "numa"]))
    nodes = []
    for place, host in enumerate(draw(st.lists(hosts(), min_size=1, max_size=4))):
        whole = sockets_of(host, unit)
        smallest = min((len(socket.cores) for socket in whole), default=1)
        shares = draw(st.integers(1, smallest))
        nodes.append(
            Node(
                node_id=f"id-{place}",
                address=f"10.0.0.{place}",
                host=host,
                sockets=sockets_of(host, unit, shares),
                gpus=draw(st.integers(0, 3)),
                cpus=float(len(host.cores)),
                is_driver=place == 0,
            )
        )
    return draw(st.permutations(nodes))


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    stage = st.lists(st.sampled_from(KINDS), min_size=1, max_size=4)
    return Layout(tuple(map(tuple, draw(st.lists(stage, min_size=1, max_size=4)))))


@settings(deadline=None, max_examples=300)
@given(clusters(), layouts(), st.randoms())
def test_seats(nodes: list[Node], layout: Layout, random: object) -> None:
    there = {
        "gpu": sum(place.gpus for place in nodes),
        "cpu": sum(len(place.sockets) for place in nodes),
    }
    if any(layout.count(kind) > there[kind] for kind in KINDS):
        with pytest.raises(
            LayoutError, match=r"needs \d+ GPUs? and \d+ sockets?; no [gc]pu is left"
        ):
            assign(layout, nodes)
        return
    seats = assign(layout, nodes)
    random.shuffle(nodes)  # type: ignore[attr-defined]
    assert assign(layout, nodes) == seats
    assert [seat.rank for seat in seats] == list(range(len(layout.kinds)))
    for seat in seats:
        assert layout.ranks(seat.stage)[seat.tensor_rank] == seat.rank
    assert tuple(seat.kind for seat in seats) == layout.kinds
    by_id = {place.node_id: place for place in nodes}
    cores: set[tuple[str, Core]] = set()
    gpus: set[tuple[str, int]] = set()
    for seat in seats:
        place = by_id[seat.node_id]
        assert seat.is_driver_node == place.is_driver
        if seat.kind == "gpu":
            assert seat.socket is None
            assert seat.local_rank < place.gpus
            assert (seat.node_id, seat.local_rank) not in gpus
            gpus.add((seat.node_id, seat.local_rank))
        else:
            assert seat.socket in place.sockets
            mine = {(seat.node_id, core) for core in seat.socket.cores}
            assert mine
            assert not mine & cores
            cores |= mine


@settings(deadline=None, max_examples=100)
@given(clusters())
def test_compute_threads_and_spare_cpus_are_apart(nodes: list[Node]) -> None:
    sockets = sum(len(place.sockets) for place in nodes)
    if not sockets:
        return
    config = HeteroConfig(layout=[["cpu"]] * sockets)
    world = plan_world(
        config, nodes, pipeline_parallel_size=sockets, tensor_parallel_size=1,
        layers=(1,) * sockets,
    )  # fmt: skip
    used: dict[str, list[tuple[int, ...]]] = {}
    for seat in world.seats:
        threads = compute_threads(seat, config.cpu)
        assert threads
        assert seat.socket is not None
        assert set(threads) <= set(seat.socket.cpus)
        used.setdefault(seat.node_id, []).append(threads)
    for node_id, threads_of in used.items():
        flat = [cpu for threads in threads_of for cpu in threads]
        assert len(flat) == len(set(flat))
        here = [seat for seat in world.seats if seat.node_id == node_id]
        assert not set(spare_cpus(here, threads_of)) & set(flat)


@pytest.mark.parametrize(
    ("layout", "pipeline", "tensor"),
    [("auto", 3000, 1), ("auto", 1000, 2), ([["gpu", "gpu", "cpu", "cpu"]] * 500, 500, 4)],
)
def test_a_thousand_nodes_are_planned_in_seconds(layout: Any, pipeline: int, tensor: int) -> None:
    nodes = [
        replace(
            node("a", sockets=2, gpus=1, cores=56, is_driver=place == 0),
            node_id=f"id-{place}",
            address=f"10.0.{place // 256}.{place % 256}",
        )
        for place in range(1000)
    ]
    start = time.process_time()
    world = plan_world(
        HeteroConfig(layout=layout),
        nodes,
        pipeline_parallel_size=pipeline,
        tensor_parallel_size=tensor,
        layers=(1,) * pipeline,
    )
    elapsed = time.process_time() - start
    assert len(world.seats) == pipeline * tensor
    # One on a quiet machine; minutes where each rank looked at all others.
    assert elapsed < 10

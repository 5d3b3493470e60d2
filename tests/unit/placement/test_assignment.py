"""Seats: stages stay on one node where they can, ranks count per kind, bundles name devices."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds import layout, node, world

from placement.cluster.assignment import NODE_SLIVER, Node, Turn, assign, bundle_of
from placement.errors import LayoutError
from placement.host.topology import Gpu


def test_a_stage_stays_on_one_node() -> None:
    nodes = [node("a", sockets=1), node("b", sockets=2), node("c", sockets=2)]
    seats = assign(layout("cc", "cc", "cc"), [*nodes, node("d", sockets=2)])
    assert [seat.node_name for seat in seats] == ["b", "b", "c", "c", "d", "d"]
    assert [seat.rank for seat in seats] == list(range(6))
    assert [(seat.stage, seat.tensor_rank) for seat in seats][2:4] == [(1, 0), (1, 1)]


def test_a_stage_that_no_node_can_hold_is_spread() -> None:
    seats = assign(layout("ccc"), [node("a", sockets=2), node("b", sockets=2)])
    assert [seat.node_name for seat in seats] == ["a", "a", "b"]


def test_the_drivers_node_comes_first() -> None:
    nodes = [node("a", sockets=1), node("z", sockets=1, is_driver=True)]
    seats = assign(layout("c", "c"), nodes)
    assert [seat.node_name for seat in seats] == ["z", "a"]
    assert [seat.is_driver_node for seat in seats] == [True, False]
    assert assign(layout("c", "c"), nodes[::-1]) == seats


def test_local_ranks_count_per_kind() -> None:
    seats = world("gcgc").seats
    assert [(seat.kind, seat.local_rank) for seat in seats] == [
        ("gpu", 0), ("cpu", 0), ("gpu", 1), ("cpu", 1)
    ]  # fmt: skip
    assert [seat.socket.id for seat in seats if seat.socket] == [0, 1]


def test_expert_ranks_come_last_and_share_a_node_with_all_stages() -> None:
    nodes = [node("a", sockets=1, gpus=2, is_driver=True), node("b", sockets=3, gpus=2)]
    seats = assign(layout("g", "g"), nodes, expert_ranks=2)
    assert {seat.node_name for seat in seats} == {"b"}
    assert [(seat.rank, seat.kind, seat.serves_experts, seat.tensor_rank) for seat in seats] == [
        (0, "gpu", False, 0), (1, "gpu", False, 0), (2, "cpu", True, 0), (3, "cpu", True, 1)
    ]  # fmt: skip
    assert [seat.socket.id for seat in seats if seat.socket] == [0, 1]
    assert bundle_of(seats[3])["CPU"] == seats[3].bundle_cpus > 0
    with pytest.raises(
        LayoutError, match=r"4 expert ranks .* needs 2 GPUs and 4 CPU sockets of one"
    ):
        assign(layout("g", "g"), nodes, expert_ranks=4)


def test_engines_that_start_together_choose_other_devices() -> None:
    nodes = [node("a", sockets=2, gpus=1, is_driver=True), node("b", sockets=2, gpus=1)]
    turns = [assign(layout("c", "g"), nodes, Turn(index, 2)) for index in (0, 1)]
    devices = [
        [(seat.node_name, seat.socket.id if seat.socket else "gpu") for seat in seats]
        for seats in turns
    ]
    assert devices == [[("a", 0), ("a", "gpu")], [("a", 1), ("b", "gpu")]]
    assert [seat.local_rank for seat in turns[1]] == [0, 0]


def test_the_second_engine_takes_what_the_first_has_left() -> None:
    # The first one has claimed its socket already, so that only one is offered.
    left = [node("a", sockets=1, is_driver=True)]
    assert assign(layout("c"), left, Turn(1, 2)) == assign(layout("c"), left)
    with pytest.raises(LayoutError, match="no cpu is left for stage 1"):
        assign(layout("c", "c"), left, Turn(1, 2))


def test_too_few_devices_are_named() -> None:
    with pytest.raises(LayoutError, match=r"2 GPUs and 2 sockets; no gpu is left for stage 1.*"
                       r"a \(10.0.0.1\): 1 GPU, 3 sockets"):  # fmt: skip
        assign(layout("cg", "cg"), [node("a", sockets=3, gpus=1)])


def test_bundles_name_the_device_and_the_node() -> None:
    cpu, gpu = world("cg").seats
    tie = {"node:10.0.0.1": NODE_SLIVER}
    assert bundle_of(cpu) == tie | {"CPU": 4}
    assert bundle_of(cpu, "H100") == tie | {"CPU": 4}
    assert bundle_of(cpu, None, 1 << 30) == tie | {"CPU": 4, "memory": 1 << 30}
    assert bundle_of(gpu, None, 1 << 30) == tie | {"GPU": 1}
    assert bundle_of(gpu) == tie | {"GPU": 1}
    assert bundle_of(gpu, "H100") == tie | {"GPU": 1, "accelerator_type:H100": NODE_SLIVER}


NODES = st.lists(
    st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(1, 6)), min_size=1, max_size=4
)


@given(NODES, st.lists(st.text("cg", min_size=1, max_size=3), min_size=1, max_size=4))
def test_no_device_is_given_twice_and_bundles_fit(
    sizes: list[tuple[int, int, int]], stages: list[str]
) -> None:
    nodes: list[Node] = [
        node(chr(ord("a") + place), sockets=sockets, gpus=gpus, cores=cores)
        for place, (sockets, gpus, cores) in enumerate(sizes)
    ]
    shape = layout(*(stage.ljust(3, "c") for stage in stages))
    enough = shape.count("cpu") <= sum(n.sockets != () and len(n.sockets) for n in nodes) and (
        shape.count("gpu") <= sum(n.gpus for n in nodes)
    )
    if not enough:
        with pytest.raises(LayoutError):
            assign(shape, nodes)
        return
    seats = assign(shape, nodes)
    assert tuple(seat.kind for seat in seats) == shape.kinds
    devices = [(s.node_id, s.kind, s.socket.id if s.socket else s.local_rank) for s in seats]
    assert len(set(devices)) == len(devices)
    for place in nodes:
        mine = [bundle_of(seat) for seat in seats if seat.node_id == place.node_id]
        assert sum(bundle.get("CPU", 0) for bundle in mine) <= place.cpus
        assert sum(bundle.get("GPU", 0) for bundle in mine) <= place.gpus


def with_gpus(there: Node, *numa_nodes: int | None) -> Node:
    gpus = tuple(Gpu(index, numa_node=numa) for index, numa in enumerate(numa_nodes))
    return replace(there, host=replace(there.host, gpus=gpus))


@pytest.mark.parametrize(
    ("stages", "numa_nodes", "sockets"),
    [
        (["c", "g"], [1], [1]),
        (["g", "c"], [1], [1]),
        (["cc", "g"], [1], [1, 0]),
        (["c", "g", "c", "g"], [1, 0], [1, 0]),
        (["c", "g", "g"], [0, 1], [0]),  # the second GPU is not a neighbour's
        (["gc"], [1], [1]),
        (["c", "g"], [None], [0]),
    ],
)
def test_a_socket_is_near_the_gpus_that_it_feeds(
    stages: list[str], numa_nodes: list[int | None], sockets: list[int]
) -> None:
    there = with_gpus(node(sockets=2, gpus=len(numa_nodes)), *numa_nodes)
    seats = assign(layout(*stages), [there])
    assert [seat.socket.id for seat in seats if seat.socket] == sockets
    assert len({seat.socket.id for seat in seats if seat.socket}) == len(sockets)
    in_order = assign(layout(*stages), [there], near_gpus=False)
    assert [seat.socket.id for seat in in_order if seat.socket] == sorted(range(len(sockets)))


def test_engines_that_start_together_have_gpus_of_their_own_to_be_near() -> None:
    there = with_gpus(node(sockets=2, gpus=2, is_driver=True), 1, 0)
    turns = [assign(layout("c", "g"), [there], Turn(index, 2)) for index in (0, 1)]
    assert [seats[0].socket.id for seats in turns if seats[0].socket] == [1, 0]

"""A placement group of somebody else: what its bundles offer, and which rank gets which."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds import layout, node

from placement.cluster.assignment import assign
from placement.cluster.external_group import (
    Bundle,
    bundles_of,
    chosen_bundles,
    describe_group,
    nodes_within,
    offers_of,
)
from placement.errors import LayoutError

A, B = node("a", sockets=2, gpus=2, is_driver=True), node("b", sockets=1, cores=8)


def bundle(index: int, where: str = "a", cpus: float = 0, gpus: float = 0) -> Bundle:
    return Bundle(index, f"id-{where}", cpus, gpus)


def test_bundles_become_devices_of_their_nodes() -> None:
    bundles = [bundle(0, cpus=1, gpus=1), bundle(1, cpus=4), bundle(2, "b", cpus=8)]
    a, b = nodes_within([A, B], offers_of([A, B], bundles))
    assert (a.gpus, [len(socket.cores) for socket in a.sockets]) == (1, [4])
    assert (b.gpus, [len(socket.cores) for socket in b.sockets]) == (0, [8])


def test_a_bundle_gets_as_many_cores_as_it_has_cpus_from_one_socket() -> None:
    (a,) = nodes_within([A], offers_of([A], [bundle(n, cpus=3) for n in range(3)]))
    # Two sockets of four cores: three, three, and one that is left.
    assert [socket.cpus for socket in a.sockets] == [(0, 1, 2), (4, 5, 6), (3,)]


def test_a_part_of_a_socket_has_its_part_of_the_memory() -> None:
    full = replace(A.sockets[0], memory_bytes=1000, free_bytes=None)
    (offer,) = offers_of([replace(A, sockets=(full,))], [bundle(0, cpus=1)])
    assert offer.socket is not None
    assert (offer.socket.memory_bytes, offer.socket.free_bytes) == (250, None)


def test_of_equal_bundles_the_callers_comes_last() -> None:
    bundles = [bundle(n, cpus=1) for n in range(3)]
    offers = offers_of([A], bundles)
    seats = assign(layout("c", "c"), nodes_within([A], offers))
    assert bundles_of(seats, offers) == (1, 2)
    # A small one for the caller and large ones for the ranks.
    offers = offers_of([A], [bundle(0, cpus=1), bundle(1, cpus=4), bundle(2, cpus=4)])
    assert bundles_of(assign(layout("c", "c"), nodes_within([A], offers)), offers) == (1, 2)


def test_ranks_are_assigned_from_where_the_bundles_landed() -> None:
    bundles = [bundle(0, "b", cpus=8), bundle(1, gpus=1), bundle(2, cpus=4), bundle(3, gpus=1)]
    offers = offers_of([A, B], bundles)
    seats = assign(layout("cc", "gg"), nodes_within([A, B], offers))
    assert [seat.node_name for seat in seats] == ["a", "b", "a", "a"]
    assert bundles_of(seats, offers) == (2, 0, 1, 3)


def test_bundles_that_no_rank_can_use() -> None:
    assert offers_of([A], [bundle(0), bundle(1, cpus=0.5), bundle(2, "gone", cpus=4)]) == ()
    for gpus in (2, 0.5):
        with pytest.raises(LayoutError, match=rf"0: .*expected one GPU or none.*got {gpus}"):
            offers_of([A], [bundle(0, gpus=gpus)])


def test_bundles_are_chosen_by_their_numbers() -> None:
    bundles = [bundle(n, cpus=1) for n in range(4)]
    assert chosen_bundles(bundles, "") == tuple(bundles)
    assert chosen_bundles(bundles, "3, 1") == (bundles[1], bundles[3])


@pytest.mark.parametrize("numbers", ["1,1", "4", "0,x", "-1", ",", "1 2", "\u0661"])
def test_numbers_of_no_bundle_are_refused(numbers: str) -> None:
    with pytest.raises(LayoutError, match=r"VLLM_RAY_BUNDLE_INDICES: .*\(0, 1, 2, 3\).* got '"):
        chosen_bundles([bundle(n, cpus=1) for n in range(4)], numbers)


def test_the_group_is_told_with_its_nodes() -> None:
    told = describe_group([bundle(1, "b", cpus=8), bundle(0, gpus=1)], [A, B])
    assert "node a (10.0.0.1): 0: {CPU: 0, GPU: 1}; node b (10.0.0.2): 1: {CPU: 8, GPU: 0}" in told


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 9), st.integers(0, 1)), max_size=6))
def test_no_core_and_no_bundle_is_given_twice(given_bundles: list[tuple[str, int, int]]) -> None:
    bundles = [bundle(n, *one) for n, one in enumerate(given_bundles)]
    offers = offers_of([A, B], bundles)
    nodes = nodes_within([A, B], offers)
    for place in nodes:
        cpus = [cpu for socket in place.sockets for cpu in socket.cpus]
        assert len(set(cpus)) == len(cpus)
    kinds = "g" * sum(n.gpus for n in nodes) + "c" * sum(len(n.sockets) for n in nodes)
    if not kinds:
        return
    seats = assign(layout(*kinds), nodes)
    used = bundles_of(seats, offers)
    assert len(set(used)) == len(used) == len(kinds)
    for seat, index in zip(seats, used, strict=True):
        own = bundles[index]
        assert own.node_id == seat.node_id
        assert bool(own.gpus) == (seat.kind == "gpu")
        assert seat.socket is None or len(seat.socket.cores) <= own.cpus

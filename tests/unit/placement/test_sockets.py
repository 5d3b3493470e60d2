"""Sockets for CPU ranks, on the files of real machines and on random ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machines import NAMES, load, write_tree

from placement.cluster.assignment import Node, assign, bundle_of
from placement.cluster.layout import Layout
from placement.errors import LayoutError
from placement.host.cpulist import format_cpulist
from placement.host.sockets import sockets_of
from placement.host.sysfs import read_host
from placement.host.topology import Core, Host, NumaNode, SocketUnit


@pytest.mark.parametrize("unit", ["package", "numa"])
@pytest.mark.parametrize("name", NAMES)
def test_sockets_are_what_was_written_down(name: str, unit: SocketUnit, tmp_path: Path) -> None:
    host = read_host(write_tree(name, tmp_path))
    sockets = sockets_of(host, unit)
    assert [
        {
            "package": socket.package,
            "numa_nodes": list(socket.numa_nodes),
            "cpus": format_cpulist(socket.cpus),
            "memory_kib": socket.memory_bytes // 1024,
        }
        for socket in sockets
    ] == load(name)["expected"]["sockets"][unit]
    assert [socket.id for socket in sockets] == list(range(len(sockets)))


@pytest.mark.parametrize("unit", ["package", "numa"])
@pytest.mark.parametrize("name", NAMES)
def test_bundles_are_what_was_written_down(name: str, unit: SocketUnit, tmp_path: Path) -> None:
    host = read_host(write_tree(name, tmp_path), gpus=False)
    sockets = sockets_of(host, unit)
    cpus = sum(len(core.cpus) for core in host.cores)
    there = Node("id-a", "10.0.0.1", host, sockets, 0, float(cpus), is_driver=True)
    seats = assign(Layout((("cpu",),) * len(sockets)), [there])
    assert [bundle_of(seat) for seat in seats] == load(name)["expected"]["bundles"][unit]


def test_shares_of_a_clustered_package_keep_to_their_nodes(tmp_path: Path) -> None:
    host = read_host(write_tree("xeon-8480-snc4", tmp_path))
    halves = sockets_of(host, "package", shares=2)
    assert [socket.numa_nodes for socket in halves] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert [format_cpulist(socket.cpus) for socket in halves] == [
        "0-27",
        "28-55",
        "56-83",
        "84-111",
    ]
    assert halves[0].memory_bytes == (131000000 + 131000001) * 1024


def test_fewer_cores_than_shares() -> None:
    host = Host("small", (NumaNode(0, 0, (Core((0,)), Core((1,))), 1000, 900),))
    sockets = sockets_of(host, shares=4)
    assert [socket.cpus for socket in sockets] == [(0,), (1,), (0,), (1,)]
    assert [socket.memory_bytes for socket in sockets] == [250] * 4


def test_unknown_memory_stays_unknown() -> None:
    nodes = (NumaNode(0, 0, (Core((0,)),), 1000, 900), NumaNode(1, 0, (Core((1,)),)))
    assert [s.memory_bytes for s in sockets_of(Host("half", nodes))] == [None]


def test_no_shares() -> None:
    with pytest.raises(LayoutError, match="0 shares; expected at least 1"):
        sockets_of(Host("none", ()), shares=0)


@st.composite
def hosts(draw: st.DrawFn) -> Host:
    """Hosts with nodes on packages, of no package and without cores, in any order."""
    nodes: list[NumaNode] = []
    first = 0
    for number in range(draw(st.integers(1, 6))):
        count = draw(st.integers(0, 9))
        package = draw(st.sampled_from([None, 0, 1]))
        cores = tuple(Core((cpu,)) for cpu in range(first, first + count))
        size = draw(st.integers(0, 1 << 40))
        nodes.append(NumaNode(number, package, cores, size, size // 2))
        first += count
    return Host("random", tuple(draw(st.permutations(nodes))))


UNITS = st.sampled_from(["package", "numa"])


@given(hosts(), UNITS, st.integers(1, 12))
def test_shares_are_equal_and_do_not_overlap(host: Host, unit: SocketUnit, shares: int) -> None:
    whole = sockets_of(host, unit)
    parts = sockets_of(host, unit, shares)
    assert len(parts) == shares * len(whole)
    for socket in whole:
        mine = parts[socket.id * shares : (socket.id + 1) * shares]
        assert len({len(part.cores) for part in mine}) == 1
        given_out = [core for part in mine for core in part.cores]
        assert set(given_out) <= set(socket.cores)
        if len(socket.cores) >= shares:
            assert len(given_out) == len(set(given_out)) > len(socket.cores) - shares
        else:
            assert [len(part.cores) for part in mine] == [1] * shares


@given(hosts(), UNITS, st.integers(1, 12))
def test_no_more_memory_is_given_out_than_there_is(
    host: Host, unit: SocketUnit, shares: int
) -> None:
    parts = sockets_of(host, unit, shares)
    total = sum(node.memory_bytes for node in host.numa_nodes if node.cores)
    given_out = sum(part.memory_bytes for part in parts)
    assert given_out <= total
    if all(len(node.cores) >= shares for node in host.numa_nodes if node.cores):
        assert total - given_out < len(parts) * len(host.numa_nodes) + 1


@given(hosts(), UNITS)
def test_every_core_is_in_one_socket(host: Host, unit: SocketUnit) -> None:
    given_out = [core for socket in sockets_of(host, unit) for core in socket.cores]
    assert sorted(given_out, key=lambda core: core.cpus) == sorted(
        host.cores, key=lambda core: core.cpus
    )

"""From what Ray's nodes say of themselves to what an engine may use; Ray itself is not asked."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from worlds import node

from placement.cluster import ray_cluster
from placement.cluster.assignment import Node
from placement.cluster.claims import Holder
from placement.errors import TopologyError
from placement.host.topology import Host

Answers = dict[str, tuple[Host, tuple[Holder, ...], str]]
Discover = Callable[..., tuple[Node, ...]]


@pytest.fixture
def discovered(monkeypatch: pytest.MonkeyPatch) -> Discover:
    """`cluster.discover` over nodes with these answers, groups and CPUs; "a" is the driver's."""

    def run(answers: Answers, groups: dict[str, Any] | None = None, **cpus: float) -> Any:
        there = [
            {
                "NodeID": name, "Alive": True, "NodeManagerHostname": name,
                "NodeManagerAddress": f"10.0.0.{ord(name) - 96}",
                "Resources": {"CPU": cpus.get(name, 8.0), "GPU": 2.0},
            }
            for name in "abc"[: max(2, len(answers))]
        ]  # fmt: skip
        context = SimpleNamespace(get_node_id=lambda: "a")
        monkeypatch.setattr(ray, "nodes", lambda: there)
        monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
        monkeypatch.setattr(ray_cluster, "placement_group_table", lambda: groups or {})
        found = {name: ray_cluster._Description(*answer) for name, answer in answers.items()}
        monkeypatch.setattr(ray_cluster, "on_nodes", lambda *_, **__: found)
        return ray_cluster.discover(unit="package", shares=1, timeout_s=1)

    return run


def host(sockets: int = 2) -> Host:
    return node(sockets=sockets).host


def offered(nodes: tuple[Node, ...]) -> dict[str, list[int]]:
    return {one.node_id: [socket.id for socket in one.sockets] for one in nodes}


def test_every_machine_offers_its_own_sockets(discovered: Discover) -> None:
    nodes = discovered({"b": (host(1), (), "m2"), "a": (host(2), (), "m1")})
    assert offered(nodes) == {"a": [0, 1], "b": [0]}
    assert [one.is_driver for one in nodes] == [True, False]


def test_claimed_sockets_are_not_offered(discovered: Discover) -> None:
    claim = Holder("socket-0-cpu-0", 7, "other", (0, 1, 2, 3))
    nodes = discovered({"a": (host(2), (claim,), "m1"), "b": (host(2), (), "m2")})
    assert offered(nodes) == {"a": [1], "b": [0, 1]}
    assert "pid 7" in nodes[0].holders[0]


def test_nodes_on_one_machine_offer_a_socket_once(discovered: Discover) -> None:
    claim = Holder("socket-1-cpu-4", 7, "other", (4, 5, 6, 7))
    answers = {"a": (host(2), (), "m1"), "b": (host(3), (claim,), "m1")}
    # Socket 1 is claimed where only the second node sees it; socket 0 is the first node's.
    assert offered(discovered(answers)) == {"a": [0], "b": [2]}


def test_machines_that_do_not_tell_who_they_are_count_as_several(discovered: Discover) -> None:
    nodes = discovered({"a": (host(1), (), ""), "b": (host(1), (), "")})
    assert offered(nodes) == {"a": [0], "b": [0]}


def test_a_node_without_cpus_in_ray_offers_no_sockets(discovered: Discover) -> None:
    nodes = discovered({"a": (host(2), (), "m1"), "b": (host(1), (), "m2")}, a=0.0)
    assert offered(nodes) == {"a": [], "b": [0]}


def test_gpus_that_placement_groups_hold_are_not_free(discovered: Discover) -> None:
    def group(state: str, where: str) -> dict[str, Any]:
        return {
            "name": state, "state": state,
            "bundles": {0: {"GPU": 1.0}}, "bundles_to_node_id": {0: where},
        }  # fmt: skip

    groups = {"x": group("CREATED", "b"), "y": group("REMOVED", "a")}
    nodes = discovered({"a": (host(), (), "m1"), "b": (host(), (), "m2")}, groups)
    assert [(one.gpus, one.held_gpus) for one in nodes] == [(2, 0), (1, 1)]


def test_silent_nodes_are_left_out(discovered: Discover, caplog: pytest.LogCaptureFixture) -> None:
    assert offered(discovered({"a": (host(1), (), "m1")})) == {"a": [0]}
    assert "node b (10.0.0.2) left out" in caplog.text
    with pytest.raises(TopologyError, match="none of 2 Ray nodes described itself in 1 s"):
        discovered({})

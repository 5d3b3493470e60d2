"""Nobody waits for a rank whose node Ray takes for dead, nor starts it again there."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest
from worlds import layout, node

from placement.cluster import ray_cluster
from placement.cluster.assignment import assign
from ray_hetero.errors import StartupError
from ray_hetero.executor import actors
from ray_hetero.world import World

LIMIT_S = 180.0
NODES = [node("a", is_driver=True), node("b")]


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What Ray says of its nodes, which can be changed."""
    said = [{"NodeID": one.node_id, "Alive": True} for one in NODES]
    monkeypatch.setattr(ray_cluster.ray, "nodes", lambda: said)
    return said


def test_those_that_are_dead_or_unknown_are_gone(nodes: list[dict[str, Any]]) -> None:
    ids = [one.node_id for one in NODES]
    assert ray_cluster.gone(ids) == frozenset()
    nodes[1]["Alive"] = False
    assert ray_cluster.gone(ids) == {"id-b"}
    del nodes[0]
    assert ray_cluster.gone(ids) == {"id-a", "id-b"}


def test_a_wait_for_ranks_ends_with_their_node(
    nodes: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = layout("c", "c")
    found = World(shape, assign(shape, NODES), (2, 2))
    monkeypatch.setattr(actors, "NODES_SECONDS", 0.05)

    def wait(refs: Sequence[Any], **asked: Any) -> tuple[list[Any], list[Any]]:
        time.sleep(0.02)
        nodes[1]["Alive"] = False
        return [], list(refs)

    monkeypatch.setattr(actors.ray, "wait", wait)
    began = time.monotonic()
    said = r"starting actors: Ray has lost the node of rank 1 \(cpu, .* node b\)"
    with pytest.raises(StartupError, match=said):
        actors.gather(
            found, ["first", "second"], what="starting actors", timeout_s=LIMIT_S, key="k"
        )
    assert time.monotonic() - began < LIMIT_S / 10
    # A restart says itself what it is about.
    with pytest.raises(StartupError, match=r"^Ray has lost the node of rank 1"):
        actors.refuse_dead_nodes(found)

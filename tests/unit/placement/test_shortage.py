"""Why bundles do not fit: the resource, the node, who holds it, and the other nodes."""

from __future__ import annotations

from placement.cluster.shortage import NodeResources, impossible, missing

GIB = 1 << 30


def nodes() -> dict[str, NodeResources]:
    a = NodeResources("a (10.0.0.1)", {"CPU": 4.0, "GPU": 1.0, "memory": 8.0 * GIB, "node:x": 1.0})
    b = NodeResources("b (10.0.0.2)", {"CPU": 2.0})
    a.hold("train", {"CPU": 3.0, "GPU": 1.0, "node:x": 0.001})
    return {"id-a": a, "id-b": b}


def test_what_fits_is_not_impossible_however_much_is_held() -> None:
    asked = [("id-a", {"node:10.0.0.1": 0.001, "CPU": 2.0}), ("id-a", {"GPU": 1.0})]
    assert impossible(asked, nodes()) is None


def test_what_never_fits_is_told_at_once() -> None:
    asked = [("id-a", {"CPU": 3.0}), ("id-a", {"CPU": 2.0}), ("id-b", {"GPU": 1.0})]
    told = impossible(asked, nodes())
    assert told is not None
    assert "node a (10.0.0.1): CPU asked 5, Ray has 4 there" in told
    assert "node b (10.0.0.2): GPU asked 1, Ray has 0 there" in told
    assert (
        "Nodes: a (10.0.0.1): 4 CPU, 1 GPU, 8.0 GiB memory, train holds 3 CPU, 1 GPU; "
        "b (10.0.0.2): 2 CPU." in told
    )
    assert "`ray-hetero ray-args`" in told


def test_a_node_that_is_gone_is_told() -> None:
    told = impossible([("id-c", {"CPU": 1.0})], nodes())
    assert told is not None
    assert "gone since they described themselves: node id-c" in told


def test_what_is_held_is_told_with_its_holder() -> None:
    told = missing([("id-a", {"CPU": 2.0}), ("id-b", {"CPU": 2.0})], nodes(), 5)
    assert told.startswith("Ray gave no placement group in 5 s (placement.timeout_s): node a ")
    assert "CPU asked 2, free 1 of 4" in told
    assert "node b (10.0.0.2): CPU asked" not in told
    assert "train holds 3 CPU, 1 GPU" in told


def test_holders_outside_of_groups_are_not_known() -> None:
    told = missing([("id-b", {"CPU": 2.0, "memory": 1.0 * GIB})], nodes(), 5)
    assert "memory asked 1.0 GiB, free 0.0 GiB of 0.0 GiB" in told
    told = missing([("id-b", {"CPU": 2.0})], nodes(), 5)
    assert "asked node b (10.0.0.2): CPU 2; tasks or actors outside of placement groups" in told

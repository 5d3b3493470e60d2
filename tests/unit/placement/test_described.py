from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from placement.cluster.assignment import assign
from placement.cluster.layout import Layout
from placement.errors import LayoutError, TopologyError
from placement.plan.described import described, read_described
from placement.units import GIB

DATA = Path(__file__).parents[1] / "data"
SOCKET = {"part": "Xeon 8480+"}


def test_hosts_and_figures() -> None:
    cluster = read_described(DATA / "two_nodes.yaml")
    big, *small = cluster.nodes
    assert [node.host.name for node in cluster.nodes] == ["big", "small-0", "small-1"]
    assert [len(node.cores) for node in big.host.numa_nodes] == [56, 56]
    assert [(gpu.index, gpu.memory_bytes) for gpu in big.host.gpus] == [
        (0, 80 * GIB),
        (1, 80 * GIB),
    ]
    gpu, socket, epyc = big.gpus[1], big.sockets[1], small[1].sockets[0]
    assert (gpu.node, gpu.label, gpu.figures.name) == ("big", "GPU 1", "Some GPU")
    assert (gpu.figures.read_bandwidth, gpu.figures.compute) == (2500e9, 500e12)
    assert (gpu.figures.host_link, gpu.figures.source) == (50e9, "configured")
    assert (gpu.usable_bytes, gpu.runtime_bytes) == (40 * GIB, 2 * GIB)
    assert (socket.figures.read_bandwidth, socket.figures.source) == (0.75 * 307.2e9, "table")
    assert (socket.usable_bytes, socket.kv_limit_bytes) == (int(0.95 * 512 * GIB), 16 * GIB)
    assert epyc.figures.layer_latency_s == 50e-6
    assert (cluster.links.network.bandwidth, cluster.links.network.source) == (12.5e9, "configured")
    assert cluster.links.shm.source == "table"


def test_described_nodes_stay_in_the_order_of_the_file_and_are_named_without_an_address() -> None:
    names = ["first", "b", "a"]
    nodes = described({"nodes": [{"name": one, "sockets": SOCKET} for one in names]}).as_nodes()
    seats = assign(Layout((("cpu",),) * 3), nodes)
    assert [seat.node_name for seat in seats] == names
    with pytest.raises(LayoutError, match=r"There are: first: 0 GPUs, 1 socket; b: 0 GPUs, 1 soc"):
        assign(Layout((("gpu",),)), nodes)


def test_nodes_in_the_form_that_seats_are_assigned_on() -> None:
    nodes = read_described(DATA / "two_nodes.yaml").as_nodes()
    assert [(node.node_id, node.gpus, len(node.sockets)) for node in nodes] == [
        ("big", 2, 2),
        ("small-0", 0, 1),
        ("small-1", 0, 1),
    ]
    assert [node.is_driver for node in nodes] == [True, False, False]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "file: "),
        ({"nodes": []}, "nodes: "),
        ({}, r"nodes: missing$"),
        ({"nodes": [{}, {}]}, "different names, twice: server"),
        ({"nodes": [{"name": "a"}], "link": {}}, "link: unknown key"),
        ({"nodes": [{"name": "a", "gpu": {}}]}, "nodes.0.gpu: unknown key"),
        ({"nodes": [{"name": "a", "gpus": {"part": "H900"}}]}, "'H900' is unknown; known: H100"),
        ({"nodes": [{"gpus": {"part": "H900"}}]}, "gpus: part 'H900' .* bf16_tflop_s$"),
        ({"nodes": [{"name": "a", "gpus": {"memory_gib": 3}}]}, "read_gb_s and bf16_tflop_s are"),
        ({"nodes": [{"name": "a", "gpus": SOCKET}]}, "'Xeon 8480\\+' is a cpu, it is given as a"),
        ({"nodes": [{"name": "a", "sockets": SOCKET | {"count": 0}}]}, "nodes.0.sockets.count"),
        ({"nodes": [{"name": "a", "sockets": SOCKET | {"memory_gib": -1}}]}, "got -1"),
        ({"nodes": [{"name": "a"}, {"name": "a"}]}, "different names, twice: a"),
    ],
)
def test_what_is_wrong_is_named(content: Any, message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        described(content)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(TopologyError, match="cannot be read"):
        read_described(tmp_path / "none.yaml")
    (tmp_path / "bad.yaml").write_text("nodes: [")
    with pytest.raises(TopologyError, match="not YAML"):
        read_described(tmp_path / "bad.yaml")

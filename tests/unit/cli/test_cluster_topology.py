"""`ray-hetero topology --cluster` over a cluster that is not there."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest
import ray
from typer.testing import CliRunner
from worlds import node

from placement.cluster import ray_cluster
from ray_hetero.cli.main import commands
from ray_hetero.errors import StartupError


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """What was asked of Ray; two nodes answer."""
    made: list[tuple[str, Any]] = []
    nodes = (node("alpha", sockets=2), node("beta", sockets=1))

    def discover(**options: Any) -> Any:
        made.append(("discover", options["unit"]))
        return nodes

    monkeypatch.setattr(ray, "init", lambda **options: made.append(("init", options["address"])))
    monkeypatch.setattr(ray, "shutdown", lambda: made.append(("shutdown", None)))
    monkeypatch.setattr(ray_cluster, "discover", discover)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return made


def test_a_table_for_each_node(calls: list[tuple[str, Any]]) -> None:
    output = CliRunner().invoke(commands, ["topology", "--cluster"]).output
    assert output.index("alpha: ") < output.index("beta: ")
    assert calls == [("init", "auto"), ("discover", "package"), ("shutdown", None)]


def test_a_list_of_hosts_as_json(
    calls: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        output = CliRunner().invoke(commands, ["topology", "--cluster", "--json"]).output
    found = json.loads(output)
    assert [(host["name"], len(host["numa_nodes"])) for host in found] == [
        ("alpha", 2),
        ("beta", 1),
    ]
    assert calls[0] == ("init", address)


def test_without_a_cluster_it_says_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: Any) -> None:
        raise ConnectionError("nobody there")

    monkeypatch.setattr(ray, "init", refuse)
    result = CliRunner().invoke(commands, ["topology", "--cluster"])
    assert isinstance(result.exception, StartupError)
    assert "type: ray start --head" in str(result.exception)

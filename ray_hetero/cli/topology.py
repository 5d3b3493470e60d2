"""`ray-hetero topology`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from placement.host.topology import Host

CLUSTER_TIMEOUT_S = 60.0


def topology(
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Every node of the Ray cluster that runs here.")
    ] = False,
) -> None:
    """Show NUMA nodes, cores, memory and GPUs of this host or of the whole cluster."""
    from placement.host.describe import to_dict
    from placement.host.sysfs import read_host

    hosts = _cluster_hosts() if cluster else [read_host()]
    if as_json:
        found = [to_dict(host) for host in hosts]
        typer.echo(json.dumps(found if cluster else found[0], indent=2))
    else:
        _show(hosts)


def _show(hosts: Sequence[Host]) -> None:
    from rich.console import Console

    from placement.host.describe import host_table

    console = Console(highlight=False)
    for host in hosts:
        console.print(host_table(host))


def _cluster_hosts() -> list[Host]:
    from ray_hetero.cli.connection import cluster

    with cluster():
        from placement.cluster.ray_cluster import discover

        nodes = discover(unit="package", shares=1, timeout_s=CLUSTER_TIMEOUT_S)
        return [node.host for node in nodes]

"""`ray-hetero status`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ray_hetero.observability.status import EngineStatus

WIDTH_WITHOUT_TERMINAL = 160


def status(
    as_json: Annotated[
        bool, typer.Option("--json", help="Machine-readable output: bytes, seconds, milliseconds.")
    ] = False,
) -> None:
    """Show the engines on the Ray cluster; exit status 1 if something is wrong with one."""
    from ray_hetero.cli.connection import cluster

    with cluster():
        from ray_hetero.observability.status import running_engines

        engines = running_engines()
    if as_json:
        typer.echo(json.dumps([engine.to_dict() for engine in engines], indent=2))
    else:
        _show(engines)
    if not all(engine.is_healthy for engine in engines):
        raise typer.Exit(1)


def _show(engines: Sequence[EngineStatus]) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=WIDTH_WITHOUT_TERMINAL)
    if not engines:
        console.print("no engine of ray_hetero runs on this cluster")
    for engine in engines:
        console.print(engine.table())

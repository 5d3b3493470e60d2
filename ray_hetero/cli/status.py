"""`ray-hetero status`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from ray_hetero.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ray_hetero.observability.status import EngineStatus

WIDTH_WITHOUT_TERMINAL = 160


def status(
    as_json: Annotated[
        bool, typer.Option("--json", help="Machine-readable output: bytes, seconds, milliseconds.")
    ] = False,
) -> None:
    """Show the engines on the Ray clusters of this host; exit status 1 if one is not well.

    With RAY_ADDRESS, those on that cluster.
    """
    from ray_hetero.cli import connection

    asked = connection.addresses()
    engines: list[EngineStatus] = []
    silent: list[str] = []
    for address in asked:
        try:
            engines += _engines(address)
        except StartupError as error:
            if len(asked) == 1:
                raise
            silent.append(f"the Ray at {address} is left out: {error}")
    if as_json:
        typer.echo(json.dumps([engine.to_dict() for engine in engines], indent=2))
    else:
        _show(engines, asked)
    for line in silent:
        typer.echo(line, err=True)
    if len(silent) == len(asked) or not all(engine.is_healthy for engine in engines):
        raise typer.Exit(1)


def _engines(address: str) -> Sequence[EngineStatus]:
    from ray_hetero.cli.connection import cluster

    with cluster(address):
        from ray_hetero.observability.status import running_engines

        return running_engines()


def _show(engines: Sequence[EngineStatus], asked: Sequence[str]) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=WIDTH_WITHOUT_TERMINAL)
    if not engines:
        where = "this cluster" if len(asked) == 1 else f"these {len(asked)} clusters"
        console.print(f"no engine of ray_hetero runs on {where} ({', '.join(asked)})")
    for engine in engines:
        console.print(engine.table(console.width if console.is_terminal else None))

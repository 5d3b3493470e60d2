"""`ray-hetero doctor`."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from ray_hetero.preflight.checks import Check

STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure",
            help="Measure sockets and GPUs; plans use what is measured of GPUs for a week.",
        ),
    ] = False,
) -> None:
    """Diagnose this host and print the fix; exit status 1 if something cannot work."""
    from ray_hetero.preflight.host_checks import run_checks

    found = run_checks(measures=measure)
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(check) for check in found], indent=2))
    else:
        _show(found)
    if any(check.status == "fail" for check in found):
        raise typer.Exit(1)


def _show(found: Sequence[Check]) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(soft_wrap=True, highlight=False)
    width = max(len(check.name) for check in found)
    indent = " " * (width + 8)
    for check in found:
        line = Text(f"{check.status:4}", style=STYLES[check.status])
        line.append(f"  {check.name:{width}}  ", style="default")
        line.append(f"\n{indent}".join(_wrapped(console, check.found, indent)), style="default")
        console.print(line)
        if check.remedy:
            # Not wrapped and on a line of its own, so that it can be copied.
            console.print(Text(f"{indent}→ {check.remedy}"))
    counts = {status: sum(check.status == status for check in found) for status in STYLES}
    console.print(", ".join(f"{count} {status}" for status, count in counts.items()))
    console.print(Text("\n".join(_wrapped(console, next_step(counts)))))


def _wrapped(console: Console, text: str, indent: str = "") -> list[str]:
    """Lines of a text beside an indent; in a file or a pipe one line, for programs."""
    room = console.width - len(indent)
    return textwrap.wrap(text, max(room, 20)) if console.is_terminal else [text]


def next_step(counts: Mapping[str, int]) -> str:
    """Advice by the number of checks with each status."""
    if counts["fail"]:
        return "next: type the command after → for each fail, then ray-hetero doctor again"
    warnings = "engines can start, but read each warn; " if counts["warn"] else ""
    return (
        f"next: {warnings}ray-hetero plan MODEL predicts a model here, "
        "vllm serve MODEL --distributed-executor-backend ray_hetero serves it"
    )

"""`ray-hetero bench`: measured speed of a running server beside its plan, or of this host."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from placement.given import numbers, shown
from placement.units import GB
from placement.words import duration
from ray_hetero.errors import ConfigError

if TYPE_CHECKING:
    from ray_hetero.cli.host_speeds import Speed
    from ray_hetero.cli.serving.load import Measured

MOST_USERS = 512
MOST_TOKENS = 1_000_000


def bench(
    url: Annotated[
        str | None, typer.Option(help="Running server, like http://localhost:8000; else this host.")
    ] = None,
    plan: Annotated[
        Path | None, typer.Option(help="Its plan: a file that `ray-hetero plan --json` wrote.")
    ] = None,
    users: Annotated[str, typer.Option(help="Numbers of users, like 1,8,32.")] = "1,8,32",
    prompt_tokens: Annotated[
        int, typer.Option(min=1, max=MOST_TOKENS, help="Tokens of each prompt.")
    ] = 512,
    tokens: Annotated[
        int, typer.Option(min=2, max=MOST_TOKENS, help="Tokens of each answer.")
    ] = 64,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
    svg: Annotated[Path | None, typer.Option("--svg", help="Write a picture to this file.")] = None,
) -> None:
    """Measure a running server beside its plan; without --url, what plans need of this host.

    Prompts are random tokens. Of this host, figures of memory and links are kept for a week, and
    plans use them.
    """
    if url is None:
        _bench_host(as_json=as_json)
        return
    from ray_hetero.cli.serving.load import Server, beside

    counts = _counts(users)
    predicted = None if plan is None else _predicted(plan)
    server = Server(url)
    server.check_room(prompt_tokens, tokens)
    # The first request finds cold caches.
    server.measure(1, prompt_tokens, tokens)
    rows = []
    for count in counts:
        row = server.measure(count, prompt_tokens, tokens)
        rows.append(row if predicted is None else beside(row, predicted, prompt_tokens))
    model = str(server.model["id"])
    if svg is not None:
        from ray_hetero.cli.problems import write_picture
        from ray_hetero.cli.serving.speed_picture import speed_svg

        write_picture(svg, speed_svg(model, rows))
    if as_json:
        content = {"model": model, "url": server.address, "prompt_tokens": prompt_tokens}
        content |= {"tokens": tokens, "users": [row.to_dict() for row in rows]}
        typer.echo(json.dumps(content, indent=2))
    else:
        typer.echo(
            f"{model} at {server.address}: prompts of {prompt_tokens} tokens, answers of {tokens}"
        )
        _show(rows)


def _counts(text: str) -> tuple[int, ...]:
    found = numbers(text)
    if not found or not all(1 <= count <= MOST_USERS for count in found):
        raise ConfigError(
            f"--users: expected numbers from 1 to {MOST_USERS}, like 1,8,32; got {shown(text)}"
        )
    return tuple(found)


def _predicted(path: Path) -> Sequence[Mapping[str, Any]]:
    """Entries of a plan's users, the fewest users first."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["users"]
        return sorted(rows, key=lambda row: int(row["users"]))
    except OSError as error:
        raise ConfigError(f"--plan {path}: {error.strerror}") from None
    except (ValueError, LookupError, TypeError):
        raise ConfigError(
            f"--plan {path}: expected what this prints: ray-hetero plan MODEL --json"
        ) from None


def _show(rows: Sequence[Measured]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    columns = ["users", "step", "tokens/s each", "first token", "the last one", "tokens/s in all"]
    has_plan = any(row.predicted_per_s is not None for row in rows)
    if has_plan:
        columns[3:3] = ["predicted"]
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        cells = [str(row.users), duration(row.step_s), f"{row.tokens_per_s:.1f}"]
        if has_plan:
            cells.append("" if row.predicted_per_s is None else f"{row.predicted_per_s:.1f}")
        last = duration(row.last_first_token_s)
        if row.predicted_first_s is not None:
            last += f" ({duration(row.predicted_first_s)})"
        table.add_row(*cells, duration(row.first_token_s), last, f"{row.total_per_s:.1f}")
    console = Console(highlight=False)
    console.print(table)
    if any(row.predicted_first_s is not None for row in rows):
        console.print("In brackets: predicted.")


def _bench_host(*, as_json: bool) -> None:
    from ray_hetero.cli.host_speeds import speeds_of_this_host

    if as_json:
        found = [asdict(speed) for speed in speeds_of_this_host()]
        typer.echo(json.dumps(found, indent=2))
        return
    for speed in speeds_of_this_host():
        typer.echo(_line(speed))


def _line(speed: Speed) -> str:
    where = f"{speed.device}: {speed.figure}"
    if speed.value is None:
        return f"{where}: not measured: {speed.why_not}"
    if speed.unit == "bytes/s":
        return f"{where}: {speed.value / GB:,.1f} GB/s"
    return f"{where}: {speed.value:.2f} {speed.unit}"

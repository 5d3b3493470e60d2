"""`ray-hetero plan`: who would hold which layers, without a GPU, a cluster or weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from placement.errors import LayoutError, PlacementError
from placement.given import numbers, shown
from placement.model.reading import shape_of
from placement.plan.described import read_described
from placement.plan.picture import plan_svg
from placement.plan.plan import Plan, plan_model
from placement.plan.table import plan_table

WIDTH_WITHOUT_TERMINAL = 160
MOST_TOKENS = 1_000_000_000
MOST_SEQUENCES = 1_000_000


def plan(
    model: Annotated[
        str, typer.Argument(help="Checkpoint directory, or a config.json or a directory with one.")
    ],
    topology: Annotated[
        Path, typer.Option("--topology", help="YAML file that describes the cluster.")
    ],
    tensor_parallel_size: Annotated[
        int,
        typer.Option("--tensor-parallel-size", "-tp", min=1, max=4096, help="Ranks in a stage."),
    ] = 1,
    pipeline_parallel_size: Annotated[
        int | None,
        typer.Option(
            "--pipeline-parallel-size",
            "-pp",
            min=1,
            max=4096,
            help="Stages; default is the best number.",
        ),
    ] = None,
    max_model_len: Annotated[
        int | None,
        typer.Option(
            min=1, max=MOST_TOKENS, help="Longest sequence in tokens; default is the context."
        ),
    ] = None,
    batch: Annotated[
        int, typer.Option(min=1, max=MOST_SEQUENCES, help="Sequences in one decode step.")
    ] = 1,
    context: Annotated[
        int,
        typer.Option(
            min=1, max=MOST_TOKENS, help="Tokens that each of them has when the step is priced."
        ),
    ] = 4096,
    max_sequences: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MOST_SEQUENCES,
            help="Sequences of the longest length that must fit; default is the batch.",
        ),
    ] = None,
    objective: Annotated[
        str, typer.Option(help="latency: shortest step; throughput: shortest slowest stage.")
    ] = "latency",
    layers: Annotated[
        str | None, typer.Option(help="Your own layers per stage, like 20,60.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="vLLM's --dtype.")] = "auto",
    kv_cache_dtype: Annotated[str, typer.Option(help="vLLM's --kv-cache-dtype.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, bytes and seconds.")] = False,
    svg: Annotated[Path | None, typer.Option("--svg", help="Write a picture to this file.")] = None,
) -> None:
    """Show ranks, layers, budgets and the predicted step of a model on a described cluster."""
    try:
        found = plan_model(
            _name(model),
            shape_of(model, dtype, kv_cache_dtype),
            read_described(topology),
            tensor_parallel_size=tensor_parallel_size,
            pipeline_parallel_size=pipeline_parallel_size,
            batch=batch,
            context=context,
            max_model_len=max_model_len,
            max_sequences=max_sequences,
            objective=_objective(objective),
            layers=_layers(layers),
        )
        if svg is not None:
            _write(svg, plan_svg(found))
    except PlacementError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    _show(found, as_json=as_json)


def _show(found: Plan, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(found.to_dict(), indent=2))
        return
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH_WITHOUT_TERMINAL)
    console.print(plan_table(found))


def _name(model: str) -> str:
    path = Path(model).resolve()
    name = path.parent.name if path.name == "config.json" else path.name
    # A folder may be called anything; a picture must not.
    return "".join(
        letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in name
    )


def _objective(objective: str) -> Literal["latency", "throughput"]:
    if objective == "latency":
        return "latency"
    if objective == "throughput":
        return "throughput"
    raise LayoutError(f"--objective: expected latency or throughput, got {shown(objective)}")


def _layers(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    found = numbers(text)
    if found is None:
        raise LayoutError(f"--layers: expected numbers with commas, like 20,60; got {shown(text)}")
    return found


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise LayoutError(f"--svg {path}: the file cannot be written: {error}") from None

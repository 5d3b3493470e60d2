"""The placement as a table for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from placement.host.cpulist import format_cpulist
from placement.model.shape import remote_layers
from ray_hetero.world import World

COLUMNS = ("rank", "stage", "tp", "kind", "node", "device", "threads", "layers")
"""Heads of the table."""
SPARED = ("tp", "node", "kind", "threads", "stage")
"""Columns that a narrow terminal leaves out, the first ones first."""
BORDERS = "┏┳┓┃┡╇┩│└┴┘"
"""Characters between two cells, in every line of the table as text."""


def placement_table(world: World, threads: Mapping[int, Sequence[int]]) -> Table:
    """One row a rank: where it sits and what it holds.

    Args:
        world: all ranks.
        threads: logical CPUs of each rank's compute threads, by rank.

    """
    table = Table(title="Placement", title_justify="left")
    for column in COLUMNS:
        table.add_column(column, justify="right" if column in ("rank", "stage", "tp") else "left")
    for seat in world.seats:
        first = sum(world.layers[: seat.stage])
        table.add_row(
            str(seat.rank),
            str(seat.stage),
            str(seat.tensor_rank),
            seat.kind,
            seat.node_name,
            seat.device,
            format_cpulist(threads.get(seat.rank, ())) if seat.kind == "cpu" else "",
            layer_span(first, world.layers[seat.stage]),
        )
    for seat in world.experts:
        row = (str(seat.rank), "", "", "experts", seat.node_name, seat.device)
        remote = remote_layers(sum(world.layers), world.expert_layers)
        span = layer_span(remote.start, len(remote))
        table.add_row(*row, format_cpulist(threads.get(seat.rank, ())), f"experts of {span}")
    return table


def layer_span(first: int, layers: int) -> str:
    """Layers of a stage, for people: the first, the last and how many."""
    return f"{first}-{first + layers - 1} ({layers})"


def as_text(table: Table, width: int = 120) -> str:
    """The table as plain text for a log."""
    # In a notebook a console would show its output, even that which is captured.
    console = Console(width=width, no_color=True, force_terminal=False, force_jupyter=False)
    with console.capture() as capture:
        console.print(table)
    return capture.get().rstrip()


def narrowed(line: str, width: int) -> str:
    """A line of the table as text for a narrow terminal: columns of `SPARED` are left out.

    All lines of a table have their borders at the same places, so they lose the same columns.

    Args:
        line: of any text; one that is no line of this table is kept.
        width: of the terminal, in columns.

    """
    kept = list(COLUMNS)
    for column in SPARED:
        borders = [place for place, letter in enumerate(line) if letter in BORDERS]
        if len(line) <= width or len(borders) != len(kept) + 1:
            break
        at = kept.index(column)
        line = line[: borders[at] + 1] + line[borders[at + 1] + 1 :]
        kept.pop(at)
    return line

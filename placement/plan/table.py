"""A plan as text for people: the answer, then a table that fits 80 columns, then notes."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from placement.plan.answer import answer
from placement.plan.devices import RankDevice
from placement.plan.picture import shown_parts
from placement.plan.plan import Plan
from placement.plan.stage_plan import ExpertPlan, RankPlan, StagePlan
from placement.units import GIB
from placement.words import duration, plural

COLUMNS = ("rank", "stage", "device", "layers", "weights", "KV", "other", "room", "step")
LEFT = frozenset(("device", "layers"))
LEGEND = (
    "Sizes in GiB, times in ms. layers: first-last (how many). other: activations and the runtime. "
    "room: memory of the device for the engine. step: time of the stage in a decode step."
)
BOLD = frozenset(("Speed", "First token", "Memory"))
"""Lines of the answer whose first number, with its unit, is bold."""
LEAST = 0.05
"""Smallest figure that has a digit of its own with one decimal."""


def plan_report(plan: Plan) -> RenderableType:
    """The answer, a row for each rank with sizes in GiB and times in milliseconds, and notes.

    Weights, KV cache and other memory together are no more than the room that there is.
    """
    parts: list[RenderableType] = [_title(plan), _lines(plan)]
    if len(plan.users) > 1:
        each = f"Users served at the same time, each with {plan.split.work.context:,} tokens:"
        parts += [Text(""), _indented(Text(each)), _indented(_users(plan))]
    parts += [Text(""), _indented(_table(plan)), Text("")]
    parts += [_indented(Text(LEGEND, style="dim")), Text(""), _parts(plan), Text("")]
    drafts = () if plan.speculation is None else plan.speculation.lines()
    parts += [Text(line) for line in (*drafts, *plan.notes)]
    return Group(*parts)


def _indented(part: RenderableType) -> Padding:
    return Padding(part, (0, 0, 0, 1))


def _title(plan: Plan) -> Text:
    nodes = sorted({device.node for device in plan.devices})
    where = nodes[0] if len(nodes) == 1 else plural(len(nodes), "node")
    return Text(plan.model, style="bold").append(f" on {where}", style="not bold")


def _lines(plan: Plan) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column()
    for heading, sentence in answer(plan):
        text = Text(sentence)
        if heading in BOLD:
            text.stylize("bold", 0, sentence.index(" ", sentence.index(" ") + 1))
        grid.add_row(Text(f" {heading}"), text)
    return grid


def _users(plan: Plan) -> Table:
    """One row a number of users who are served at the same time."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for column in ("users", "tokens/s each", "in all", "last first token", "KV room for"):
        table.add_column(column, justify="right", no_wrap=True)
    for one in plan.users:
        figures = (one.tokens_per_s, one.total_per_s, one.room)
        each, total, room = (f"{figure:,.1f}" for figure in figures)
        table.add_row(f"{one.users:,}", each, total, duration(one.first_token_s), room)
    return table


def _table(plan: Plan) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=0)
    for column in COLUMNS:
        side = "left" if column in LEFT else "right"
        table.add_column(column, justify=side, no_wrap=column != "device")  # type: ignore[arg-type]
    names = _places(plan)
    for number, stage in enumerate(plan.split.stages):
        for place, rank in enumerate(stage.ranks):
            table.add_row(*_row(number, stage, rank, names, first=place == 0))
    for one in plan.experts:
        table.add_row(*_expert_row(one, names))
    return table


def _places(plan: Plan) -> dict[str, str]:
    """Prefix of a device by its node; empty where there is only one node."""
    nodes = {device.node for device in plan.devices}
    return dict.fromkeys(nodes, "") if len(nodes) == 1 else {node: f"{node} " for node in nodes}


def _device(device: RankDevice, names: dict[str, str]) -> str:
    return f"{names[device.node]}{device.label} ({device.figures.name})"


def _row(
    number: int, stage: StagePlan, rank: RankPlan, names: dict[str, str], *, first: bool
) -> tuple[str, ...]:
    memory, device = rank.memory, rank.device
    last_layer = stage.first_layer + stage.layers - 1
    return (
        str(rank.rank),
        str(number),
        _device(device, names),
        f"{stage.first_layer}-{last_layer} ({stage.layers})",
        _gib(memory.weights),
        _gib(rank.kv_bytes),
        _gib(memory.activations + memory.runtime),
        _gib(device.usable_bytes),
        _ms(stage.decode.seconds) if first else "",
    )


def _expert_row(one: ExpertPlan, names: dict[str, str]) -> tuple[str, ...]:
    device = one.device
    return (
        str(one.rank),
        "",
        _device(device, names),
        f"experts of {one.layers}",
        _gib(one.weight_bytes),
        "",
        _gib(device.runtime_bytes),
        _gib(device.usable_bytes),
        "",
    )


def _gib(count: int) -> str:
    return _decimal(count / GIB)


def _ms(seconds: float) -> str:
    return _decimal(1e3 * seconds)


def _decimal(value: float) -> str:
    return "<0.1" if 0 < value < LEAST else f"{value:,.1f}"


def _parts(plan: Plan) -> Table:
    """Parts of each stage's time, a line a stage."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column()
    for number, stage in enumerate(plan.split.stages):
        grid.add_row(f" Stage {number}, ms", ", ".join(_shown(stage)))
    return grid


def _shown(stage: StagePlan) -> Iterator[str]:
    parts = list(shown_parts(stage))
    small = sum(seconds for _, seconds in parts if 1e3 * seconds < LEAST)
    yield from (f"{name} {_ms(seconds)}" for name, seconds in parts if 1e3 * seconds >= LEAST)
    if small:
        yield f"other {_ms(small)}"

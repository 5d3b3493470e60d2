"""Output of `ray-hetero plan`: for people, or as JSON."""

from __future__ import annotations

import json
import os
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from placement.plan.plan import Plan
from placement.plan.table import plan_report
from placement.words import duration
from ray_hetero.planning.layout_choice import EXPERTS_KEY, Candidate, Choice

WIDTH_WITHOUT_TERMINAL = 100


def print_plan(plan: Plan, choice: Choice | None, command: str) -> None:
    """Print a plan for people, the command to type last.

    Args:
        plan: what was found.
        choice: layouts that were looked at, if they are to be shown.
        command: to serve the model so.

    """
    console = Console(highlight=False)
    if not (console.is_terminal or os.environ.get("COLUMNS")):
        console = Console(highlight=False, width=WIDTH_WITHOUT_TERMINAL)
    console.print(plan_report(plan))
    if choice is not None:
        console.print()
        console.print(_comparison(choice))
        if choice.unasked:
            console.print(
                f"Layouts with expert ranks are taken with {EXPERTS_KEY}.", soft_wrap=True
            )
    # Not wrapped, so that it can be copied.
    console.print(Text(f"\nRun: {command}"), soft_wrap=True)


def as_json(plan: Plan, choice: Choice | None, command: str) -> str:
    """The plan as JSON, in bytes and seconds; arguments as of `print_plan`."""
    content = plan.to_dict() | {"command": command}
    if choice is not None:
        looked_at = (choice.chosen, *choice.others, *choice.unasked)
        content["candidates"] = [_candidate(one) for one in looked_at]
    return json.dumps(content, indent=2)


def _candidate(one: Candidate) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "layout": [list(stage) for stage in one.layout.stages],
        "expert_ranks": one.experts,
    }
    if one.plan is None or one.plan.split is None:
        return answer | {"problem": one.problem}
    split = one.plan.split
    return answer | {
        "layers": list(split.layers),
        "expert_layers": one.plan.world.expert_layers,
        "decode_step_s": split.step_s,
        "prefill_s": split.prefill_s,
        "kv_tokens": one.plan.kv_tokens,
    }


def _comparison(choice: Choice) -> RenderableType:
    """One row a layout that fits; below, why each of the others is not taken."""
    table = Table(
        title="Layouts that were looked at", title_justify="left", box=box.SIMPLE_HEAD,
        pad_edge=False,
    )  # fmt: skip
    for column in ("layout", "layers", "step", "first token", "KV tokens"):
        left = column in ("layout", "layers")
        table.add_column(column, justify="left" if left else "right", no_wrap=not left)
    problems = []
    for one in (choice.chosen, *choice.others, *choice.unasked):
        if one.plan is None or one.plan.split is None:
            problems.append(Text(f"{one.words}: {one.problem.splitlines()[0]}"))
            continue
        split = one.plan.split
        table.add_row(
            Text(one.words),
            " + ".join(map(str, split.layers)),
            duration(split.step_s),
            duration(split.prefill_s),
            f"{one.plan.kv_tokens:,}",
        )
    return Group(table, *problems)

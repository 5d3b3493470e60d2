"""The page "Which model fits my machine" is what the planner answers."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from typer.testing import CliRunner

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "tools"))

import write_recipes  # noqa: E402
import write_which_model_page as tool  # noqa: E402
from page_blocks import table  # noqa: E402

from ray_hetero.cli.main import commands  # noqa: E402

TEXT = tool.PAGE.read_text(encoding="utf-8")
HEAD = ("model", "weights, GiB", *tool.FORMS)


def shown(machine: str) -> str:
    rest = TEXT.partition(tool.begin(machine))[2]
    return rest.partition(tool.END)[0].strip()


def cells(machine: str) -> list[list[str]]:
    """Format by format, without the names."""
    return [[one.strip() for one in row.split("|")[3:-1]] for row in shown(machine).split("\n")[2:]]


@pytest.mark.parametrize("machine", tool.MACHINES)
def test_the_table_is_what_the_planner_answers(machine: str) -> None:
    made = table(HEAD, tool.rows(machine))
    assert shown(machine) == made, "type: python tools/write_which_model_page.py"


def test_every_machine_and_every_model_is_in_the_tables() -> None:
    machines = {path.stem for path in (tool.CONFIGS / "machines").glob("*.yaml")}
    assert machines == {*tool.MACHINES, *write_recipes.MACHINES}
    assert {path.stem for path in (tool.CONFIGS / "models").glob("*.json")} == set(tool.MODELS)
    assert all(tool.begin(machine) in TEXT for machine in tool.MACHINES)


def test_the_command_answers_the_same() -> None:
    arguments = [
        "plan", str(tool.CONFIGS / "models/llama-3.1-70b.json"), "--json",
        "--topology", str(tool.CONFIGS / "machines/h100-two-8480.yaml"),
        "--max-model-len", str(tool.LENGTH),
    ]  # fmt: skip
    answer = json.loads(CliRunner().invoke(commands, arguments).stdout)
    assert answer["model"] == "llama-3.1-70b"
    (row,) = (one for one in shown("h100-two-8480").split("\n") if "Llama 3.1 70B" in one)
    stages = [stage["layers"] for stage in answer["stages"]]
    assert f"**{answer['tokens_per_s']:.1f}** (2 sockets {stages[0]} → GPU {stages[1]})" in (
        row.replace(tool.NO_BREAK, " ")
    )
    assert answer["notes"][0].startswith("Quantise first: with 4-bit weights")


def test_the_rules_are_those_of_the_tables() -> None:
    gains, larger = [], []
    for machine in tool.MACHINES:
        named = dict(zip(tool.MODELS, cells(machine), strict=True))
        for row in named.values():
            for before, after in pairwise(row):
                if "socket" in before and "socket" not in after:
                    gains.append(speed(after) / speed(before))
        dense, mixture = named["llama-3.1-70b"][0], named["qwen3-235b-a22b"][0]
        if "socket" in dense:
            larger.append(speed(mixture) > speed(dense))
    assert f"is worth {round(min(gains))} to {round(max(gains))}\n" in TEXT
    assert larger == [True] * 3


def speed(cell: str) -> float:
    return float(cell.split("**")[1])

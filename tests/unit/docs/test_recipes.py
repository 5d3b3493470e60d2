"""Recipes: pages and files are what the planner answers, and vLLM takes their options."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "tools"))
sys.path.insert(0, str(ROOT / "tests" / "cluster"))

import pages  # noqa: E402
import write_recipes as tool  # noqa: E402

AGAIN = "type: python tools/write_recipes.py"
FEW = (
    ("deepseek-r1", "eight-h100-two-8480"),
    ("qwen3-next-80b", "h100-two-8480"),
    ("kimi-k2", "pro-6000-one-9355"),
    ("gpt-oss-120b", "rtx-5090-one-9355"),
    ("llama-3.3-70b", "rtx-5090-one-9355"),
)
"""Models and machines that are planned again in the usual run."""


def page(name: str) -> str:
    return (tool.PAGES / f"{name}.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(("name", "machine"), FEW)
def test_a_row_is_what_the_planner_answers(name: str, machine: str) -> None:
    row = tool.table((), [tool.row_of(name, machine, tool.MACHINES[machine])]).splitlines()[-1]
    assert row in page(name), AGAIN
    linked = tool.row_of(name, machine, f"[{tool.RECIPES[name].name}]({name}.md)")
    assert tool.table((), [linked]).splitlines()[-1] in page("index"), AGAIN


@pytest.mark.slow
def test_all_pages_and_files_are_what_the_planner_answers() -> None:
    there = {*tool.PAGES.glob("*.md"), *tool.FILES.rglob("*.yaml")}
    written = tool.written()
    assert there == set(written)
    for path, text in written.items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: {AGAIN}"


def test_each_page_has_the_command_of_each_file() -> None:
    files = {(path.parent.name, path.stem): path for path in tool.FILES.rglob("*.yaml")}
    assert {name for name, _ in files} == set(tool.RECIPES)
    for name in tool.RECIPES:
        typed = [
            shlex.split(pages.commands(block)[0])
            for block in pages.blocks(f"docs/recipes/{name}.md")
        ]
        machines = [machine for machine in tool.MACHINES if (name, machine) in files]
        assert typed == [tool.command_of(name, machine) for machine in machines]
        for machine in machines:
            path = files[name, machine]
            assert path.read_text(encoding="utf-8") == tool.file_of(name, machine), AGAIN
            assert f"`vllm serve --config {path.relative_to(ROOT)}`" in page(name)


def test_vllm_takes_the_options_of_every_file() -> None:
    pytest.importorskip("vllm")
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())
    for path in sorted(tool.FILES.rglob("*.yaml")):
        name, machine = path.parent.name, path.stem
        found = parser.load_config_file(str(path))
        assert found == ["--model", *tool.command_of(name, machine)[2:]]
        options = parser.parse_args(found)
        assert options.distributed_executor_backend == tool.BACKEND
        assert options.max_model_len == tool.context_of(name, machine)
        if options.tool_call_parser:
            assert options.enable_auto_tool_choice
            assert options.tool_call_parser in ToolParserManager.list_registered()
        if options.reasoning_parser:
            assert options.reasoning_parser in ReasoningParserManager.list_registered()


def test_readme_and_faq_say_what_the_recipe_predicts() -> None:
    rows = [line for line in page("deepseek-r1").splitlines() if line.startswith("| ")]
    many, one = (
        next(row for row in rows if row.startswith(f"| {tool.MACHINES[machine]} "))
        for machine in ("eight-h100-two-8480", "h100-two-8480")
    )
    best = re.findall(r"\| ([\d.]+)\s/\s", many)[0]
    three = r"\| ([\d.]+)\s/\s([\d.]+)\s/\s([\d.]+) \|"
    alone, of_four, of_sixteen = re.findall(three, one)[0]
    said = {
        "README.md": (
            f"give one user {best} tokens per second on that server and {alone} on a single H100",
            f"{alone} tokens per second to one user, {of_four} to each of four, and {of_sixteen} "
            "to each of sixteen",
        ),
        "README.ko.md": (
            f"초당 {best} 토큰, H100 하나에서는 {alone} 토큰",
            f"초당 {alone} 토큰, 네 명이면 각각 {of_four}, 열여섯 명이면 각각 {of_sixteen} 토큰",
        ),
        "docs/faq.md": (
            f"{alone} tokens per second to one user and {of_sixteen} to each of sixteen",
        ),
    }
    for name, sentences in said.items():
        text = " ".join((ROOT / name).read_text(encoding="utf-8").split())
        assert [sentence for sentence in sentences if sentence not in text] == []


def test_the_first_recipe_is_one_that_does_not_fit_otherwise() -> None:
    assert next(iter(tool.RECIPES)) == "deepseek-r1"
    assert next(iter(tool.MACHINES)) == "eight-h100-two-8480"
    (gib,) = re.findall(r"`: (\d+) GiB of weights", page("deepseek-r1"))
    assert int(gib) * 2**30 > 640e9
    found = tool.planned("deepseek-r1", "eight-h100-two-8480")
    assert not isinstance(found, str)
    assert found.plan.experts

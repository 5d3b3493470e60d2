"""Plans on described clusters, their picture, their table and the command."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import typer
from plan_cases import LLAMA_8B, LLAMA_70B, config_of, plan_model
from rich.console import Console
from typer.testing import CliRunner

from placement.cluster.layout import Kind
from placement.errors import DoesNotFitError, LayoutError
from placement.plan.described import described, read_described
from placement.plan.picture import KINDS, plan_svg
from placement.plan.plan import Plan
from placement.plan.svg import fitted, width
from placement.plan.table import COLUMNS, plan_report
from placement.units import GIB
from ray_hetero.cli.plan import plan as plan_command
from ray_hetero.compat.models.fused_architectures import family_of

DATA = Path(__file__).parents[1] / "data"
SERVER = read_described(DATA / "h100_two_8480.yaml")
SVG = "{http://www.w3.org/2000/svg}"


def test_stages_are_chosen_where_none_are_asked_for() -> None:
    assert plan_model("m", LLAMA_8B, SERVER).split.layers == (32,)
    # The GPU does not hold 80 layers of 1.71 GB; both sockets beside it halve the rest.
    planned = plan_model("m", LLAMA_70B, SERVER)
    assert sorted(stage.devices.size for stage in planned.split.stages) == [1, 2]
    assert planned.idle == ()
    assert "does not fit on the GPUs alone" in planned.notes[0]
    assert len(plan_model("m", LLAMA_70B, SERVER, pipeline_parallel_size=3).split.stages) == 3
    given = plan_model("m", LLAMA_70B, SERVER, layers=[60, 20])
    assert [stage.devices.has_cpu for stage in given.split.stages] == [True, False]
    assert given.split.layers == (60, 20)


def test_a_plan_without_cpu_ranks_says_so() -> None:
    alone = " ".join(plan_model("m", LLAMA_8B, SERVER).notes)
    assert "The model fits on the GPUs alone: there are no CPU ranks." in alone
    asked = " ".join(plan_model("m", LLAMA_8B, SERVER, pipeline_parallel_size=2).notes)
    assert "no CPU rank is needed. With --pipeline-parallel-size 1" in asked
    assert "fits on the GPUs alone" not in " ".join(plan_model("m", LLAMA_70B, SERVER).notes)


def test_what_cannot_be_planned() -> None:
    with pytest.raises(LayoutError, match="9 pipeline stages"):
        plan_model("m", LLAMA_8B, SERVER, pipeline_parallel_size=9)
    small = described({"nodes": [{"name": "a", "gpus": {"part": "L40S"}}]})
    with pytest.raises(DoesNotFitError, match="GiB short"):
        plan_model("m", LLAMA_70B, small)


def test_tensor_parallel_stages_are_of_one_node() -> None:
    cluster = read_described(DATA / "two_nodes.yaml")
    split = plan_model("m", LLAMA_8B, cluster, tensor_parallel_size=2).split
    assert [[rank.device.label for rank in stage.ranks] for stage in split.stages] == [
        ["GPU 0", "GPU 1"]
    ]


PLANS = {
    "three stages": plan_model("70B", LLAMA_70B, SERVER, pipeline_parallel_size=3),
    "idle devices": plan_model("<8B> & more", LLAMA_8B, SERVER),
    "two nodes, throughput": plan_model(
        "a rather long name of a model " * 6,
        LLAMA_70B,
        read_described(DATA / "two_nodes.yaml"),
        pipeline_parallel_size=5,
        objective="throughput",
    ),
    "many nodes": plan_model(
        "8B",
        LLAMA_8B,
        described({"nodes": [{"name": "n", "count": 40, "gpus": {"part": "H200", "count": 8}}]}),
        tensor_parallel_size=4,
        pipeline_parallel_size=3,
    ),
}


def boxes_of_texts(root: ElementTree.Element) -> list[tuple[str, float, float, float, float]]:
    found = []
    for text in root.iter(f"{SVG}text"):
        size, x, y = (float(text.attrib[key]) for key in ("font-size", "x", "y"))
        # `width` is rather too wide; a real sans-serif font takes at most this.
        wide = 0.85 * width(text.text or "", size, bold="font-weight" in text.attrib)
        left = x - wide if text.attrib["text-anchor"] == "end" else x
        found.append((text.text or "", left, y - 0.75 * size, left + wide, y + 0.2 * size))
    return found


@pytest.mark.parametrize("name", PLANS)
def test_texts_of_the_picture_do_not_overlap_or_leave_it(name: str) -> None:
    root = ElementTree.fromstring(plan_svg(PLANS[name]))  # noqa: S314
    wide, high = float(root.attrib["width"]), float(root.attrib["height"])
    boxes = boxes_of_texts(root)
    for text, left, top, right, bottom in boxes:
        assert 0 <= left < right <= wide, text
        assert 0 <= top < bottom <= high, text
    for (a, *one), (b, *two) in combinations(boxes, 2):
        apart = one[2] <= two[0] or two[2] <= one[0] or one[3] <= two[1] or two[3] <= one[1]
        assert apart, (a, b)


@pytest.mark.parametrize("name", PLANS)
def test_the_picture_shows_every_rank_and_all_its_layers(name: str) -> None:
    plan = PLANS[name]
    root = ElementTree.fromstring(plan._repr_svg_())  # noqa: S314
    texts = [text.text for text in root.iter(f"{SVG}text")]
    for stage in plan.split.stages:
        last = stage.first_layer + stage.layers - 1
        noun = "layer" if stage.layers == 1 else "layers"
        span = f"{noun} {last}" if stage.layers == 1 else f"{noun} {stage.first_layer} to {last}"
        assert texts.count(span) >= stage.devices.size
    drawn = {f"{SVG}{name}" for name in ("svg", "style", "rect", "text")}
    assert not [part for part in root.iter() if part.tag not in drawn]


def test_the_picture_has_dark_colours_that_change_no_other_one() -> None:
    roots = [ElementTree.fromstring(plan_svg(plan)) for plan in PLANS.values()]  # noqa: S314
    root = roots[0]
    style = root.findtext(f"{SVG}style") or ""
    query, _, rules = style.partition("{")
    assert query == "@media (prefers-color-scheme: dark)"
    selectors = re.findall(r"([^{}]+)\{[^{}]+\}", rules)
    drawn = {part.get(key) for root in roots for part in root.iter() for key in ("fill", "stroke")}
    for selector in selectors:
        assert selector.startswith(f".{root.attrib['class']} ")
        (colour,) = re.findall(r'="(#\w+)"', selector)
        assert colour in drawn


def colours_of_badges(root: ElementTree.Element, badge: str) -> set[str]:
    """Of the boxes right before such texts on cards."""
    parts = list(root)
    return {
        box.attrib["fill"] for box, text in pairwise(parts)
        if text.text == badge and box.attrib.get("height") == "22.0"
    }  # fmt: skip


def bars(root: ElementTree.Element) -> list[tuple[str, float]]:
    """Fill and height of the boxes of the step, from the left."""
    found = [
        box for box in root.iter(f"{SVG}rect")
        if box.get("rx") == "3" and box.get("height") in ("30.0", "15.0")
    ]  # fmt: skip
    return [(box.attrib["fill"], float(box.attrib["height"])) for box in found]


@pytest.mark.parametrize("layout", [[["cpu"], ["gpu"]], [["gpu"], ["cpu"]]])
def test_colours_are_those_of_the_kinds_wherever_the_stage_is(layout: list[list[Kind]]) -> None:
    plan = plan_model("70B", LLAMA_70B, SERVER, layout=layout)
    root = ElementTree.fromstring(plan_svg(plan))  # noqa: S314
    kinds = [kind for (kind,) in layout]
    for stage, kind in enumerate(kinds):
        assert colours_of_badges(root, f"stage {stage}") == {KINDS[kind]}
    assert bars(root) == [(KINDS[kind], 30.0) for kind in kinds]


def test_a_group_of_both_kinds_has_both_colours() -> None:
    plan = plan_model("8B", LLAMA_8B, SERVER, layout=[["gpu", "cpu"]])
    root = ElementTree.fromstring(plan_svg(plan))  # noqa: S314
    assert colours_of_badges(root, "stage 0") == set(KINDS.values())
    assert bars(root) == [(KINDS["cpu"], 15.0), (KINDS["gpu"], 15.0)]


def test_the_picture_of_the_architecture_has_these_colours() -> None:
    path = Path(__file__).parents[3] / "docs/architecture.svg"
    root = ElementTree.parse(path).getroot()  # noqa: S314
    kinds: dict[str, Kind] = {"CPU socket": "cpu", "GPU": "gpu"}
    found = []
    for box, text in pairwise(root):
        for name, kind in kinds.items():
            if (text.text or "").startswith("rank") and f"· {name} " in (text.text or ""):
                found.append((kind, box.attrib["stroke"]))
    stages, with_experts = ("cpu", "cpu", "gpu", "gpu"), ("gpu", "cpu", "cpu")
    assert found == [(kind, KINDS[kind]) for kind in stages + with_experts]


def test_text_is_cut_to_its_room() -> None:
    assert fitted("short", 12, 200) == "short"
    cut = fitted("a long text that does not fit", 12, 80)
    assert cut.endswith("…")
    assert width(cut, 12, bold=True) <= 80


def as_text(plan: Plan, columns: int = 160) -> str:
    console = Console(width=columns, force_terminal=False)
    with console.capture() as capture:
        console.print(plan_report(plan))
    return capture.get()


def test_the_table() -> None:
    lines = as_text(PLANS["three stages"]).splitlines()
    row = next(line for line in lines if "GPU 0" in line)
    assert "H100 SXM" in row
    assert "40-79 (40)" in row
    assert any("VLLM_PP_LAYER_PARTITION=" in line for line in lines)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("columns", [80, 100, 160])
def test_every_figure_is_there_at_any_width(plan: Plan, columns: int) -> None:
    lines = as_text(plan, columns).splitlines()
    assert all(len(line) <= columns for line in lines)
    assert "…" not in "".join(lines)
    head = next(place for place, line in enumerate(lines) if line.split()[:1] == ["rank"])
    assert lines[head].split() == list(COLUMNS)
    # The answer is above the table.
    speed = next(line for line in lines[:head] if line.startswith(" Speed"))
    assert f"{plan.split.tokens_per_s:,.1f} tokens/s" in speed
    for rank in plan.split.ranks:
        (row,) = (line for line in lines[head:] if line.split()[:1] == [str(rank.rank)])
        sizes = (rank.memory.weights, rank.kv_bytes, rank.device.usable_bytes)
        assert all(f" {nbytes / GIB:,.1f}" in row for nbytes in sizes)
    assert any(line.startswith(" Sizes in GiB, times in ms.") for line in lines[head:])


@pytest.mark.parametrize(
    ("model_type", "said"),
    [
        ("qwen3", "yes: tokens of engines of qwen3 models are compared with stock vLLM"),
        ("ministral3", "in parts: ministral3 models compute the layers of families that are tested "
         "(mistral)"),
        ("gpt2", "no: neither gpt2 models nor others with the same layers are tested"),
    ],
)  # fmt: skip
def test_what_was_tested_of_a_family(model_type: str, said: str) -> None:
    assert family_of(model_type) == said


@pytest.fixture
def model(tmp_path: Path) -> Path:
    config = config_of("llama", 80, 8192, 28672, (64, 8), 128256)
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def run(*arguments: object) -> Any:
    app = typer.Typer()
    app.command()(plan_command)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


TOPOLOGY = ("--topology", DATA / "h100_two_8480.yaml")


def test_the_command_prints_json_and_writes_the_picture(model: Path) -> None:
    result = run(model, *TOPOLOGY, "-pp", 3, "--json", "--svg", model / "plan.svg")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["command"].startswith("vllm serve ")
    assert found["tested"].startswith("yes: ")
    assert found["weight_bytes"] == 141107412992
    assert sum(found["layer_partition"]) == 80
    parts = sum(
        seconds for stage in found["stages"] for seconds in stage["decode_parts_s"].values()
    )
    assert parts == pytest.approx(found["decode_step_s"])
    ElementTree.parse(model / "plan.svg")  # noqa: S314


def test_the_command_prints_a_table(model: Path) -> None:
    result = run(model / "config.json", *TOPOLOGY, "-tp", 1, "--layers", "50,30", "--batch", 2)
    assert result.exit_code == 0, result.output
    assert "VLLM_PP_LAYER_PARTITION=50,30" in result.stdout


def test_the_answer_for_several_sequences_is_first_and_the_command_last(model: Path) -> None:
    result = run(model, *TOPOLOGY, "--layout", "[[cpu],[gpu]]", "--batch", 16, "--context", 512)
    assert result.exit_code == 0, result.output
    _, first, *_, last = result.stdout.splitlines()
    found = re.match(
        r" Speed +([\d.]+) tokens/s in all, ([\d.]+) for each of 16 sequences: ", first
    )
    assert found is not None
    assert float(found[1]) == pytest.approx(16 * float(found[2]), rel=0.05)
    assert last.startswith("Run: vllm serve ")
    text = " ".join(result.stdout.split())
    assert re.search(r"First token [\d.]+ m?s for the last of 16 users who send a prompt of", text)
    assert re.search(r"room for [\d.]+ sequences? of [\d,]+, [\d.]+ of 512 ", text)
    assert "Users served at the same time" not in text
    alone = run(model, *TOPOLOGY, "--layout", "[[cpu],[gpu]]", "--max-model-len", 8192)
    answered, _, table = alone.stdout.partition("\n rank ")
    assert "Users served at the same time, each with 4,096 tokens:" in answered
    first = [line.split()[0] for line in answered.splitlines() if line.strip()]
    assert first[-4:] == ["1", "4", "16", "64"]
    assert table


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--layers", "50,31"), "50 + 31 = 81 in 2 stages, but the model has 80 layers"),
        (("--layers", "many"), "expected numbers with commas"),
        (("--objective", "beauty"), "expected latency or throughput, got 'beauty'"),
        (("--layout", "[[gpu]]", "--max-model-len", "4096"), "GiB short"),
        (("--layout", "gpu"), "expected stages like [[cpu, cpu], [gpu]]"),
        (("--topology", "/nowhere.yaml"), "/nowhere.yaml: the file cannot be read: No such file"),
        (("--layout", "[[tpu]]"), "'cpu' or 'gpu'"),
        (("--layout", "[[cpu, cpu, cpu]]"), "asks for 3 CPU sockets, but 2 are free"),
        (("-pp", "7"), "7 pipeline stages"),
        (("--svg", "/nowhere/x.svg"), "cannot be written"),
    ],
)
def test_the_command_says_what_is_wrong(
    arguments: tuple[str, ...], message: str, model: Path
) -> None:
    result = run(model, *TOPOLOGY, *arguments)
    assert result.exit_code == 1
    assert result.stderr.startswith("ray-hetero: ")
    assert message in result.stderr
    assert "Traceback" not in result.output


def test_the_planner_imports_nothing_heavy() -> None:
    code = (
        "import sys, placement.plan.plan, placement.plan.picture, placement.plan.table; "
        "print([m for m in ('vllm', 'torch', 'ray', 'transformers') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"

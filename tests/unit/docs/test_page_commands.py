"""What the pages say to type that starts no engine is typed, and what they show is compared."""

from __future__ import annotations

import ast
import json
import re
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path

import jsonschema
import pytest
import yaml
from typer.testing import CliRunner

from placement.cluster.assignment import Seat
from placement.host.sockets import Socket
from placement.plan.described import read_described
from ray_hetero.cli.main import commands
from ray_hetero.config import HeteroConfig, load_config
from ray_hetero.config_sources import ENVIRONMENT_VARIABLE
from ray_hetero.names import BACKEND, actor_name, board_name

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "tests" / "cluster"))

import pages  # noqa: E402

SMALL = ROOT / "tests/packaging/config.json"
"""A model that fits on any machine."""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with the repository's own in it, and no configuration from outside."""
    for name in ("docs", "configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)


def typed(block: str, status: int = 0) -> list[str]:
    """Type the block's `ray-hetero` commands; what each has shown."""
    shown = []
    for command in pages.commands(block):
        words = shlex.split(command)
        environment = dict(word.split("=", 1) for word in words[: words.index("ray-hetero")])
        arguments = words[words.index("ray-hetero") + 1 :]
        done = CliRunner().invoke(commands, arguments, env=environment)
        assert done.exit_code == status, f"$ {command}\n{done.output}\n{done.exception!r}"
        shown.append(done.output)
    assert shown
    return shown


def normal(text: str) -> str:
    """With every run of spaces and line breaks as one space, as terminals differ in width."""
    return " ".join(text.split())


def test_plan_with_all_layouts() -> None:
    (shown,) = typed(pages.COMPARE.filled({"MODEL": str(SMALL)}))
    assert "Layouts that were looked at" in shown
    assert "vllm serve MODEL --distributed-executor-backend ray_hetero" in shown


def test_plan_of_a_mixture_on_a_described_machine() -> None:
    (shown,) = typed(pages.PLAN_OF_EXPERTS.text)
    assert "expert ranks" in shown
    assert "vllm serve MODEL --distributed-executor-backend ray_hetero" in shown


def test_plan_that_the_readme_shows() -> None:
    (shown,) = typed(pages.PLAN_OF_README.text)
    lines = pages.PLANNED_OF_README.text.splitlines()
    assert [line for line in lines if normal(line) not in normal(shown)] == []


def test_plan_that_the_planning_page_shows() -> None:
    (shown,) = typed(pages.PLAN.text)
    page = (ROOT / pages.PLANNING).read_text(encoding="utf-8")
    layers, cpus, step, more, gpu = re.findall(
        r"!\[(\d+) layers on two sockets take (\d+) ms of a step of (\d+) ms, (\d+) layers on the "
        r"GPU (\d+) ms\]", page
    )[0]  # fmt: skip
    assert f"({layers})" in shown
    assert f"({more})" in shown
    assert re.search(rf": {step}\.\d ms a token|: {int(step) - 1}\.[5-9] ms a token", shown)
    assert int(cpus) + int(gpu) == pytest.approx(int(step), abs=1)
    drawn = Path("plan.svg").read_text(encoding="utf-8")
    assert drawn == (ROOT / "docs/plan/llama-70b.svg").read_text(encoding="utf-8")


def test_plan_of_longer_contexts_moves_the_layers_that_the_page_says() -> None:
    (short,), (long,) = typed(pages.PLAN.text), typed(pages.PLAN_OF_LONG_CONTEXTS.text)
    page = normal((ROOT / pages.PLANNING).read_text(encoding="utf-8"))
    moved, of = map(int, re.findall(r"(\d+) of the GPU's (\d+) layers move:", page)[0])
    before, after = (int(re.findall(r"; layers \d+,(\d+) ", text)[0]) for text in (short, long))
    assert (before, before - after) == (of, moved)


def test_what_does_not_fit_is_refused_in_the_words_of_the_page() -> None:
    request = pages.PLAN_OF_LONG_CONTEXTS.text.replace("--max-sequences 8", "--max-sequences 64")
    (shown,) = typed(request, status=1)
    assert normal(shown) == normal(pages.REFUSED.text)


def test_a_description_with_every_key() -> None:
    Path("cluster.yaml").write_text(pages.DESCRIPTION.text)
    described = read_described(Path("cluster.yaml"))
    assert len(described.devices) > 4
    (shown,) = typed("ray-hetero plan docs/plan/llama-70b --topology cluster.yaml -tp 2")
    assert "big" in shown


def test_plan_here_and_on_the_machine_of_the_tuning_page() -> None:
    Path("cluster.yaml").write_text(pages.CLUSTER.text)
    here, there = typed(pages.PLAN_HERE_AND_THERE.filled({"MODEL": str(SMALL)}))
    assert "Layouts that were looked at" in here
    assert "server" in there
    assert Path("plan.svg").read_text(encoding="utf-8").startswith("<svg")


def test_plan_of_drafts_is_the_one_that_the_page_shows() -> None:
    (shown,) = typed(pages.PLAN_OF_DRAFTS.text)
    lines = pages.PLANNED_DRAFTS.text.splitlines()
    assert len(lines) > 3
    for line in lines:
        assert normal(line) in normal(shown)


def test_the_command_line_says_the_same_as_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (given,) = re.findall(r"--additional-config '([^']+)'", pages.SAME_AS_FILE.text)
    on_command_line = load_config(json.loads(given))
    file = tmp_path / "file.yaml"
    file.write_text(pages.CONFIG_FILE.text)
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, str(file))
    assert load_config({}) == on_command_line != HeteroConfig()


def test_config_prints_what_the_page_shows(tmp_path: Path) -> None:
    file = tmp_path / "ray_hetero.yaml"
    file.write_text(pages.CONFIG_FILE.text)
    name = "/etc/ray_hetero.yaml"
    (shown,) = typed(pages.CONFIG_COMMAND.text.replace(name, str(file)))
    rows = [normal(line.replace(str(file), name)) for line in shown.splitlines()]
    expected = [normal(line) for line in pages.CONFIG_SHOWN.text.splitlines() if line != "…"]
    assert len(expected) > 3
    assert [line for line in expected if line not in rows] == []


CONFIGURATIONS = [pages.CONFIG_FILE, pages.HUGE_PAGES]


@pytest.mark.parametrize("block", CONFIGURATIONS, ids=lambda block: block.page)
def test_the_schema_for_editors_accepts_what_is_shown(block: pages.Block) -> None:
    schema = json.loads((ROOT / "docs/ray_hetero.schema.json").read_text(encoding="utf-8"))
    content = yaml.safe_load(block.text)
    jsonschema.validate(content, schema)
    assert load_config({"ray_hetero": content}) != HeteroConfig()


def test_the_expression_asks_for_a_metric_that_there_is() -> None:
    (name,) = re.findall(r"\((ray_hetero_\w+)\[", pages.BUSY.text)
    assert f"`{name}`" in (ROOT / pages.API).read_text(encoding="utf-8")


def test_actors_have_the_names_that_are_shown() -> None:
    socket = Socket(0, (0,), (0,), (0,), 1, 1)
    node = ("node", "10.0.0.1", "node-a", 0, True)
    seats = [Seat(0, 0, 0, "cpu", *node, socket=socket), Seat(1, 1, 0, "gpu", *node)]
    names = [actor_name("ENGINE", seat) for seat in seats]
    assert [*names, board_name("ENGINE")] == pages.ACTORS.text.split()


# Python.


def keywords(text: str, name: str) -> set[str]:
    """Names of the keyword arguments of the calls of a name."""
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    found = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == name]
    assert found
    return {keyword.arg for call in found for keyword in call.keywords if keyword.arg}


def test_python_of_the_reference_is_that_of_the_notebook_page_which_is_run() -> None:
    run = [line.strip() for line in pages.FROM_PYTHON.text.splitlines()]
    lines = [line.strip() for line in pages.PYTHON.text.splitlines() if line]
    assert [line for line in lines if line not in run and "import" not in line] == []
    compile(pages.PYTHON.text, pages.API, "exec")


def test_ray_serve_gets_what_the_test_of_it_gives() -> None:
    text = pages.DEPLOYMENT_OF_SERVE.text
    run = (ROOT / "tests/cluster/serve_process.py").read_text(encoding="utf-8")
    assert keywords(text, "LLMConfig") == keywords(run, "LLMConfig")
    assert "serve.run(build_openai_app(" in run


# Transcripts.

RAW = ROOT / "benchmarks/results/cpu-host/2026-11-30-first-answer.txt"


@pytest.mark.parametrize("block", [pages.FIRST_ANSWER, pages.JOINED], ids=lambda block: block.part)
def test_a_transcript_has_lines_of_its_raw_file_in_their_order(block: pages.Block) -> None:
    kept = RAW.read_text(encoding="utf-8").splitlines()
    places = []
    for line in block.text.splitlines():
        if line != "…":
            assert line in kept
            # Some commands were typed twice.
            begun = places[-1] + 1 if places else 0
            places.append(kept.index(line, begun))
    assert len(places) > 8


def test_commands_of_transcripts_are_there_with_their_options() -> None:
    known = serve_options()
    for block in (pages.FIRST_ANSWER, pages.JOINED):
        typed_lines = [line.partition("$ ")[2] for line in block.text.splitlines() if "$ " in line]
        for command in typed_lines:
            words = shlex.split(re.sub(r"  # .*$", "", command))
            if words[0] == "ray-hetero":
                assert CliRunner().invoke(commands, [words[1], "--help"]).exit_code == 0
            elif words[0] == "vllm":
                assert set(OPTION.findall(" ".join(words))) <= known


# Commands that are only read.


def commands_of(start: str) -> list[tuple[str, str]]:
    """Every command that begins so, with its page."""
    return [
        (page, command[command.index(start) :])
        for page in pages.pages()
        for block in pages.blocks(page)
        for command in pages.commands(block)
        if start in command
    ]


SERVE = commands_of("vllm serve ")
OPTION = re.compile(r" (--[a-z][a-z-]*)")


def serve_options() -> set[str]:
    """Options of `vllm serve`, from vLLM's source: to import it takes longer than these tests."""
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0])
    files = [folder / "engine/arg_utils.py", folder / "entrypoints/launchers/cli_args.py"]
    text = "".join(file.read_text(encoding="utf-8") for file in files)
    fields = re.findall(r"^    ([a-z_]+): ", text, re.M)
    return {
        *re.findall(r'"(--[a-z-]+)"', text),
        *(f"--{name.replace('_', '-')}" for name in fields),
    }


def test_vllm_has_every_option_that_is_shown() -> None:
    assert len({page for page, _ in SERVE}) > 6
    known = serve_options()
    assert "--pipeline-parallel-sise" not in known
    named = {(page, option) for page, command in SERVE for option in OPTION.findall(command)}
    assert len(named) > 15
    assert {(page, option) for page, option in named if option not in known} == set()


@pytest.mark.slow
def test_vllm_reads_every_command_that_is_shown() -> None:
    arguments = pytest.importorskip("vllm.entrypoints.launchers.cli_args", reason="needs vLLM")
    utilities = pytest.importorskip("vllm.utils.argparse_utils")
    parser = arguments.make_arg_parser(utilities.FlexibleArgumentParser())
    for _, command in SERVE:
        # What follows belongs to the shell.
        words = shlex.split(re.sub(r" (?:&&|\||;|&)(?: .*)?$", "", command))[2:]
        assert parser.parse_args(words).distributed_executor_backend == BACKEND
    with pytest.raises(SystemExit):
        parser.parse_args(["MODEL", "--pipeline-parallel-sise", "2"])


def source_of(script: Path) -> str:
    """A script with what it imports of its own folder."""
    text = script.read_text(encoding="utf-8")
    names = re.findall(r"^(?:from|import) (\w+)", text, re.M)
    beside = [script.with_name(f"{name}.py") for name in names]
    return text + "".join(path.read_text(encoding="utf-8") for path in beside if path.exists())


SCRIPT = re.compile(r"python ((?:benchmarks|tools|tests)/\S+\.py)(.*)")


def test_scripts_have_every_option_that_is_shown() -> None:
    found = [
        (ROOT / script, options)
        for page in pages.pages()
        for block in pages.blocks(page)
        for command in pages.commands(block)
        for script, options in re.findall(
            r"python ((?:benchmarks|tools|tests)/\S+\.py)(.*)", command
        )
    ]
    assert len(found) > 15
    for script, options in found:
        source = source_of(script)
        for option in OPTION.findall(options):
            assert f'"{option}"' in source, f"{script.name} has no {option}"

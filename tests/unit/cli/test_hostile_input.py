"""Whatever the files of a command hold, it ends with an answer or one short line that says why."""

from __future__ import annotations

import datetime
import fcntl
import io
import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NoReturn

import hostile_hosts
import pytest
from hostile import LLAMA, ODD_FILES, Case, all_cases, plan_of
from rich.console import Console
from typer.testing import CliRunner

from placement.cluster.claims import held
from placement.errors import ClaimError, PlacementError, TopologyError
from placement.host.bandwidth_cache import read_figures
from placement.host.describe import host_from_json, host_table, to_json
from placement.host.sysfs import read_host
from placement.model import ignored
from placement.model.reading import UnknownModelError, shape_of
from ray_hetero.cli.main import commands
from ray_hetero.errors import RayHeteroError
from ray_hetero.preflight.host_checks import _hardware_checks, surroundings

CASES = list(all_cases())
LONGEST = 1200
"""Letters of an error."""
SECONDS = 60.0
"""Limit of one case on a busy machine; most take 0.03."""
REMEDY = re.compile(
    "expected|unknown|at most|download|correct|plan from|type:|write the|compare|missing|must"
    "|known|name another|no such|cannot be read|not JSON|not YAML|needs|should|set RAY_HETERO"
    "|is no |twice|Invalid value|does not|fetch the wheel|right one|greater than|less than|valid"
)


def answer(case: Case) -> tuple[int, str, str]:
    """Exit status, output and error of the command; what it does not report itself is raised."""
    result = CliRunner().invoke(commands, case.arguments)
    problem = result.exception
    if isinstance(problem, RayHeteroError | PlacementError):
        return 1, result.stdout, f"{result.stderr}ray-hetero: {problem}\n"
    if problem is not None and not isinstance(problem, SystemExit):
        raise problem
    return result.exit_code, result.stdout, result.stderr


def not_built(*given: object, **more: object) -> NoReturn:
    """What the sizes of a model say where vLLM knows no better."""
    raise UnknownModelError("vLLM cannot build it")


def test_there_are_many_cases_with_different_names() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names) > 600


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name[:60])
def test_an_answer_or_one_short_line(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ignored, "MATCHING_SECONDS", 0.3)
    monkeypatch.setattr("ray_hetero.compat.cpu_site.installed_version", {"vllm": "0.32.0"}.get)
    # Building a class of vLLM's takes seconds each; one case is asked of it below.
    monkeypatch.setattr("ray_hetero.planning.sizes.model_sizes.built_shape", not_built)
    case.write(tmp_path)
    monkeypatch.chdir(tmp_path)
    for name, value in case.environment.items():
        monkeypatch.setenv(name, value)
    start = time.monotonic()
    status, output, error = answer(case)
    assert time.monotonic() - start < SECONDS
    if status == 0:
        assert case.may_pass, output
        return
    assert status in (1, 2)
    assert "Traceback" not in output + error
    said = error if status == 1 else error.split("\n\n")[-1]
    assert len(said) < LONGEST
    assert re.sub(r"[\n\t ]", "", said).isprintable()
    if status == 1:
        assert said.count("\n") == 1, said
        assert said.startswith("ray-hetero: ")
        assert case.file in said
        assert case.place in said
    assert REMEDY.search(said), said


def test_the_command_line_itself_ends_so(tmp_path: Path) -> None:
    """The same in processes of their own, without this test's handling of errors."""
    plan_of(tmp_path, LLAMA)
    (tmp_path / "odd.json").write_text(json.dumps({**LLAMA, "text_config": "x"}))
    (tmp_path / "big.yaml").symlink_to("/dev/zero")
    command = [sys.executable, "-c", "from ray_hetero.cli.main import app; app()"]
    for arguments, place in (
        (["plan", "odd.json", "--topology", "cluster.yaml"], "text_config"),
        (["plan", ".", "--topology", "big.yaml"], "big.yaml"),
        (["demo-model", "/proc/x"], "/proc/x"),
    ):
        ended = subprocess.run(
            [*command, *arguments], cwd=tmp_path, capture_output=True, text=True, check=False,
            timeout=120,
        )  # fmt: skip
        assert ended.returncode == 1
        assert "Traceback" not in ended.stderr
        assert ended.stderr.count("\n") == 1, ended.stderr
        assert place in ended.stderr


CLAIMS = {
    "nothing": b"", "no JSON": b"[", "60,000 lists": b"[" * 60_000, "a list": b"[]",
    "UTF-16": '{"pid": 1, "owner": "a", "cpus": []}'.encode("utf-16"),
    **{
        f"pid {pid}": f'{{"pid": {pid}, "owner": "a", "cpus": []}}'.encode()
        for pid in ("1e400", "-1", "true", "null", '"1"', "1.5", "99999999999", "NaN", "9" * 5000)
    },
    **{
        f"CPUs {cpus}": f'{{"pid": 1, "owner": "a", "cpus": {cpus}}}'.encode()
        for cpus in ("1e400", "[-1]", "[true]", "null", '"1"', "[1.5]", "[99999999999]", "[[]]")
    },
    "an owner that is a list": b'{"pid": 1, "owner": [], "cpus": []}',
}  # fmt: skip


@pytest.mark.parametrize("name", CLAIMS)
def test_a_claim_file_that_is_none(name: str, tmp_path: Path) -> None:
    path = tmp_path / "socket-0.claim"
    path.write_bytes(CLAIMS[name])
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(
            ClaimError, match=r"socket-0\.claim: locked .*; stop that process"
        ) as said:
            held(tmp_path)
    assert len(str(said.value)) < LONGEST


def test_a_claim_file_that_is_a_pipe(tmp_path: Path) -> None:
    path = tmp_path / "socket-0.claim"
    os.mkfifo(path)
    descriptor = os.open(path, os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with pytest.raises(ClaimError, match=r"socket-0\.claim: cannot be used for claims"):
            held(tmp_path)
    finally:
        os.close(descriptor)


def test_an_owner_of_any_length_and_letters_is_one_short_line(tmp_path: Path) -> None:
    path = tmp_path / "socket-0.claim"
    owner = "\x1b[31m\n" + "a" * 5000
    path.write_text(json.dumps({"pid": os.getpid(), "owner": owner, "cpus": [0]}))
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        (holder,) = held(tmp_path)
    assert str(holder).isprintable()
    assert len(str(holder)) < LONGEST


@pytest.mark.parametrize("name", ODD_FILES)
def test_kept_figures_that_are_none(name: str, tmp_path: Path) -> None:
    ODD_FILES[name](tmp_path, "figures.json")
    assert read_figures(tmp_path / "figures.json") in ({}, {"a": 1}) or name == "a long key"


def test_expressions_of_a_checkpoint_have_a_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ignored, "MATCHING_SECONDS", 0.2)
    hostile = {
        "quant_method": "fp8",
        "ignore": ["re:" + "(.+?)" * 8 + r"\8\7\6\5\4\3\2\1$"],
    }
    config = {**LLAMA, "num_hidden_layers": 200, "quantization_config": hostile}
    with pytest.raises(UnknownModelError, match=r"takes longer than 0\.2 s; expected an expr"):
        shape_of(config)


def test_expressions_match_as_before() -> None:
    found = ignored.ignored_from(["lm_head", "self_attn", r"re:.*mlp\.(gate|up)", "re:model$"])
    assert found.has("lm_head")
    assert found.has("model.layers.0.self_attn.q_proj")
    assert found.has("model.layers.0.mlp.gate_proj")
    assert found.has("model")
    assert not found.has("model.layers.0.mlp.down_proj")
    assert not found.has("model.layers.0.my_self_attn")
    assert not found.has("my_model")


def test_a_pipe_is_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "c.json"
    os.mkfifo(path)
    # Open already when the command opens it, as with <(…) in a shell.
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    writer = path.open("w")

    def write() -> None:
        time.sleep(0.2)
        with writer:
            writer.write('{"max_restarts": 3}')

    monkeypatch.setenv("RAY_HETERO_CONFIG", str(path))
    thread = threading.Thread(target=write)
    thread.start()
    try:
        result = CliRunner().invoke(commands, ("config",))
    finally:
        thread.join()
        os.close(reader)
    assert result.exit_code == 0
    assert "RAY_HETERO_CONFIG=" in result.stdout


DAMAGED = int(os.environ.get("RAY_HETERO_SEEDS", "100"))
"""Damaged hosts of each machine; others each day."""


def of_host(root: Path) -> str:
    """Everything that is printed of a host, or the error that `ray-hetero` prints."""
    shown = io.StringIO()
    try:
        host = read_host(root)
        Console(width=160, file=shown).print(host_table(host))
        assert host_from_json(to_json(host)) == host
        found = [*_hardware_checks(root, measures=False), *surroundings(root)]
        return shown.getvalue() + "".join(f"{one.found}{one.remedy}\n" for one in found)
    except TopologyError as error:
        return f"ray-hetero: {error}"


@pytest.mark.parametrize("name", hostile_hosts.NAMES)
def test_a_host_with_damaged_files_is_shown_or_its_file_is_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("placement.host.tree.MOST_BYTES", 1 << 20)
    root = hostile_hosts.written(name, tmp_path / "host")
    assert not of_host(root).startswith("ray-hetero: ")
    refused = 0
    for damages in hostile_hosts.some(root, datetime.date.today().isoformat(), DAMAGED):
        mends = [hostile_hosts.damage(root, one) for one in damages]
        try:
            said = of_host(root)
        finally:
            for mend in mends:
                mend()
        names = ", ".join(f"{one.path}: {one.name}" for one in damages)
        assert re.sub(r"\n", "", said).isprintable(), names
        assert len(max(said.splitlines(), key=len)) < LONGEST, names
        if said.startswith("ray-hetero: "):
            refused += 1
            assert "\n" not in said, names
            assert str(root) in said, f"{names}: {said}"
            assert REMEDY.search(said), f"{names}: {said}"
    assert refused > DAMAGED / 5

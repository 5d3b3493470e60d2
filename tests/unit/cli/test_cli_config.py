"""`ray-hetero config`: every key once, with its value and where that is from."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ray_hetero.cli.config import LEFT_TO_VLLM, NOT_READ
from ray_hetero.cli.main import commands
from ray_hetero.config import HeteroConfig
from ray_hetero.config_sources import ENVIRONMENT_VARIABLE
from ray_hetero.errors import ConfigError


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for variable in (*LEFT_TO_VLLM.values(), *NOT_READ):
        monkeypatch.delenv(variable, raising=False)
    path = tmp_path / "hetero.yaml"
    path.write_text("")
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, str(path))
    return path


def printed(*arguments: str) -> str:
    result = CliRunner().invoke(commands, ["config", *arguments])
    if result.exception is not None:
        raise result.exception
    return result.output


def rows(*arguments: str) -> dict[str, dict[str, Any]]:
    found = json.loads(printed("--json", *arguments))["keys"]
    return {row["key"]: row for row in found}


def values(content: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values by their keys, sections opened."""
    found: dict[str, Any] = {}
    for name, value in content.items():
        if isinstance(value, dict) and value:
            found |= values(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = value
    return found


def test_without_settings_every_key_has_its_default() -> None:
    found = rows()
    assert {key: row["value"] for key, row in found.items()} == values(HeteroConfig().model_dump())
    assert {row["source"] for row in found.values()} == {"default"}
    assert {row["origin"] for row in found.values()} == {None}


def test_each_value_names_its_source(file: Path) -> None:
    file.write_text("ray_hetero: {layers: [1, 3], cpu: {cores: 3, unit: numa, env: {A: '1'}}}")
    found = rows("--additional-config", '{"cpu": {"cores": 5, "env": {"B": "2"}}, "gpu": {}}')
    given = {key: row for key, row in found.items() if row["source"] != "default"}
    of_file = ("file", f"{ENVIRONMENT_VARIABLE}={file}")
    of_command = ("additional_config", "--additional-config")
    assert {key: (row["value"], (row["source"], row["origin"])) for key, row in given.items()} == {
        "layers": ([1, 3], of_file),
        "cpu.unit": ("numa", of_file),
        "cpu.env.A": ("1", of_file),
        "cpu.cores": (5, of_command),
        "cpu.env.B": ("2", of_command),
    }


def test_what_is_given_by_its_old_name_is_shown_by_the_new_one() -> None:
    row = rows("--additional-config", '{"restart": 2}')["max_restarts"]
    assert (row["value"], row["source"]) == (2, "additional_config")


@pytest.mark.parametrize(("key", "variable"), LEFT_TO_VLLM.items())
def test_a_variable_of_vllm_decides_where_a_key_is_left_out(
    key: str, variable: str, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "7,7")
    assert rows()[key] == {
        "key": key, "value": "7,7", "source": "environment", "origin": variable,
    }  # fmt: skip
    section, _, name = key.rpartition(".")
    given = {"layers": [7, 7]} if not section else {section: {name: 7}}
    file.write_text(json.dumps(given))
    assert rows()[key]["source"] == "file"


def test_variables_that_nobody_reads_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "note:" not in printed()
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "40")
    (note,) = json.loads(printed("--json"))["notes"]
    assert note == (
        "VLLM_CPU_KVCACHE_SPACE=40 is not read by ranks of ray_hetero; cpu.kv_cache_gib decides"
    )
    assert f"note: {note}" in printed()
    assert set(NOT_READ.values()) <= rows().keys()


def test_the_table_is_for_people(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text("cpu: {cores: 3}")
    lines = [re.split(r"  +", line.strip()) for line in printed().splitlines()]
    assert lines[0] == ["key", "value", "from"]
    assert ["cpu.cores", "3"] in [line[:2] for line in lines]
    assert ["gpu.accelerator_type", "null", "default"] in lines
    assert ["cpu.unit", '"package"', "default"] in lines
    monkeypatch.delenv(ENVIRONMENT_VARIABLE)
    assert f"no file: {ENVIRONMENT_VARIABLE} is not set" in printed()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("{", "--additional-config: not JSON"),
        ("[1]", r"--additional-config: expected an object, got \[1\]; type: "),
        ("[" * 100_000, "nested too deeply"),
        ('{"cpu": {"cores": 0}}', r"cpu\.cores: .*got 0 \(in --additional-config\)"),
    ],
)
def test_what_cannot_be_a_configuration_is_refused(given: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        printed("--additional-config", given)

"""The configuration: defaults, merging, and a clear line for everything that is wrong."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import typing
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from ray_hetero.config import HeteroConfig, load_config
from ray_hetero.config_sources import ENVIRONMENT_VARIABLE, KEY, RENAMED
from ray_hetero.errors import ConfigError


@pytest.fixture(autouse=True)
def _no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "hetero.yaml"
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, str(path))
    return path


def load(**keys: Any) -> HeteroConfig:
    return load_config({KEY: keys})


def refused(**keys: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load(**keys)
    return str(caught.value)


@pytest.mark.parametrize("given", [None, {}, {KEY: {}}, {"other": 1}, "text"])
def test_everything_has_a_default(given: object) -> None:
    assert load_config(given) == HeteroConfig()


def test_every_key_is_described() -> None:
    def fields(model: type[BaseModel], prefix: str = "") -> typing.Iterator[tuple[str, str | None]]:
        for name, field in model.model_fields.items():
            section = field.annotation
            if isinstance(section, type) and issubclass(section, BaseModel):
                assert section.__doc__
                yield from fields(section, f"{prefix}{name}.")
            else:
                yield f"{prefix}{name}", field.description

    named = dict(fields(HeteroConfig))
    assert "warmup.step_timeout_s" in named
    assert [name for name, description in named.items() if not description] == []


def test_the_command_line_wins_key_by_key(file: Path) -> None:
    file.write_text("cpu: {cores: 3, kv_cache_gib: 2}\nlayers: [1, 3]\n")
    config = load(cpu={"cores": 5})
    assert config.cpu.cores == 5
    assert config.cpu.kv_cache_gib == 2
    assert config.layers == [1, 3]


def test_an_empty_file_is_no_setting(file: Path) -> None:
    file.write_text("# nothing yet\n")
    assert load() == HeteroConfig()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read"),
        (b"\xff\xfe\x00", "cannot be read|not YAML"),
        (b"cpu: [1", "not YAML"),
        (b"- 1\n- 2\n", r"expected keys and values, got \[1, 2\]"),
        (b"1: 2\n", "expected keys and values"),
        (b"cpu: {1: 2}\n", "cpu.1"),
        (b"cpu: {coers: 2}\n", "cpu.coers: unknown key; known here: .*cores"),
    ],
)
def test_a_bad_file_is_named(file: Path, content: bytes | None, said: str) -> None:
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=said) as caught:
        load()
    assert content is None or b"{" in content or str(file) in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"sockets": 2}, ["sockets: unknown key; known here: layout, layers"]),
        ({"cpu": {"thraeds": 1}}, ["cpu.thraeds: unknown key", "cores"]),
        ({"odd[0]": 1}, ["odd[0]: unknown key"]),
        ({"cpu": {"cores": "two"}}, ["cpu.cores: Input should be a valid integer, got 'two'"]),
        ({"cpu": {"kv_cache_gib": [1]}}, ["cpu.kv_cache_gib: Input should be a valid number"]),
        ({"cpu": {"cores": 0}}, ["cpu.cores:", "greater than or equal to 1", "got 0"]),
        ({"cpu": {"ranks_per_socket": True}}, ["cpu.ranks_per_socket:", "integer", "true"]),
        ({"cpu": {"kv_cache_gib": float("inf")}}, ["cpu.kv_cache_gib:", "inf"]),
        ({"cpu": {"env": {"A B": "1"}}}, ["cpu.env.A B", "'A B'"]),
        ({"cpu": {"env": {"A": 1}}}, ["cpu.env.A:", "string", "got 1"]),
        ({"cpu": {"cores": None}}, ["cpu.cores:", "got null"]),
        ({"cpu": 4}, ["cpu:", "got 4"]),
        ({"gpu": {"memory_utilization": 1.5}}, ["gpu.memory_utilization:", "1.5"]),
        ({"layout": [["tpu"]]}, ["layout", "'cpu' or 'gpu'", "'tpu'"]),
        ({"layout": [["cpu"], []]}, ["at least one rank", "[1, 0]"]),
        ({"layout": []}, ["layout"]),
        ({"layers": [2, 0]}, ["layers", "got 0"]),
        ({"warmup": {"step_timeout_s": 0}}, ["warmup.step_timeout_s:", "greater than 0"]),
        ({"placement": {"timeout_s": float("nan")}}, ["placement.timeout_s:", "nan"]),
        ({"pipeline": {"batches_in_flight": 0}}, ["pipeline.batches_in_flight"]),
    ],
)
def test_wrong_keys_and_values_are_named(keys: dict[str, Any], said: list[str]) -> None:
    message = refused(**keys)
    assert message.startswith("ray_hetero configuration: ")
    assert "\n" not in message
    assert [part for part in said if part not in message] == []


def test_all_problems_are_told_at_once() -> None:
    message = refused(layers="x", cpu={"cores": -1, "nope": 1})
    assert all(word in message for word in ("layers", "cpu.cores", "cpu.nope"))


def test_a_wrong_type_at_the_top() -> None:
    with pytest.raises(ConfigError, match=r"--additional-config key 'ray_hetero'.*got \[1\]"):
        load_config({KEY: [1]})


def test_a_problem_names_its_source(file: Path) -> None:
    file.write_text("cpu: {cores: 0, reserved_cores: -1}\n")
    message = refused(cpu={"cores": -2})
    assert "cpu.reserved_cores: Input should be greater than or equal to 0" in message
    assert f"got -1 (in {ENVIRONMENT_VARIABLE}={file})" in message
    assert "got -2 (in --additional-config key 'ray_hetero')" in message
    assert "got 0" not in message


@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize("name", ["hetero.yaml", "hetero.json"])
def test_a_file_and_the_command_line_have_both_forms(
    wrapped: bool, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {"layers": [1, 3], "cpu": {"cores": 2, "env": {"A": "\N{GRINNING FACE}"}}}
    content = {KEY: keys} if wrapped else keys
    expected = HeteroConfig.model_validate(keys)
    assert load_config(content) == expected
    path = tmp_path / name
    path.write_text(json.dumps(content) if name.endswith("json") else yaml.safe_dump(content))
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, str(path))
    assert load_config({}) == expected
    assert load_config({"other": 1}) == expected
    assert load_config({"cpu": {"cores": 4}}).cpu.cores == 4


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"layers": [1], "layers": [2]}', "key 'layers' comes twice"),
        ('{"cpu": {"kv_cache_gib": NaN}}', "NaN is no number"),
        ("cpu: {}", "not JSON"),
        ("[" * 100_000, "nested too deeply"),
        ('{"ray_hetero": {}, "cpu": {}}', "all keys inside 'ray_hetero' or none, got 'cpu' beside"),
        ('{"ray_hetero": null}', "key 'ray_hetero': expected keys and values, got null"),
        ("null", ""),
        (" ", ""),
    ],
)
def test_json_files(
    content: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "hetero.json"
    path.write_text(content)
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, str(path))
    if not said:
        assert load() == HeteroConfig()
        return
    with pytest.raises(ConfigError, match=re.escape(said)) as caught:
        load()
    assert str(path) in str(caught.value)


def test_settings_cannot_be_changed_later() -> None:
    config = load()
    with pytest.raises(ValueError, match="frozen"):
        config.cpu.cores = 3  # type: ignore[misc]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
    | st.sampled_from(["auto", "cpu", "gpu", "gomp", "numa"]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(["cpu", "gpu", "env", "cores", "layout", "layers", "timeout_s"])
        | st.text(max_size=5),
        inner,
        max_size=3,
    ),
    max_leaves=12,
)  # fmt: skip
KEYS = st.dictionaries(st.sampled_from(sorted(HeteroConfig.model_fields)), JSON, max_size=4)


def _outcome(given: object) -> HeteroConfig | str:
    """The configuration, or what the error says; any other exception fails the test."""
    try:
        return load_config({KEY: given})
    except ConfigError as error:
        return str(error)


@settings(max_examples=300, deadline=None)
@given(JSON | KEYS)
def test_any_json_is_a_configuration_or_an_error(settings_: object) -> None:
    outcome = _outcome(settings_)
    if isinstance(outcome, str):
        assert re.search(r"expected keys and values|^ray_hetero configuration: .", outcome)
    else:
        # What was accepted can be written down and read again.
        assert _outcome(json.loads(outcome.model_dump_json())) == outcome


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.text(alphabet="cpu: {}[],&*-!1'\n|>#", max_size=30) | st.binary(max_size=20))
def test_any_file_is_a_configuration_or_an_error(file: Path, content: str | bytes) -> None:
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    outcome = _outcome({})
    assert isinstance(outcome, HeteroConfig) or str(file) in outcome or "configuration" in outcome


def test_the_configuration_imports_neither_vllm_nor_ray() -> None:
    script = "import ray_hetero.config, sys; print({'vllm', 'ray', 'torch'} & set(sys.modules))"
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert ran.stdout.strip() == "set()"


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_a_key_is_still_taken_by_its_old_name(
    old: str, new: str, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file.write_text("")
    one, other = (True, False) if old == "cpu.borrow_gpu" else (1, 0.5 if "strict" in old else 2)

    def given(key: str, value: object) -> dict[str, Any]:
        *section, name = key.split(".")
        return {section[0]: {name: value}} if section else {name: value}

    with caplog.at_level("WARNING", "vllm.ray_hetero"):
        assert load(**given(old, one)) == load(**given(new, one)) != HeteroConfig()
    (line,) = [record.getMessage() for record in caplog.records]
    assert (
        line == f"--additional-config key 'ray_hetero': {old} is called {new} now, please rename it"
    )
    # By whatever name: the command line wins over the file.
    file.write_text(yaml.safe_dump(given(old, other)))
    assert load(**given(new, one)) == load(**given(old, one))
    both = given(old, one)
    *section, name = new.split(".")
    (both[section[0]] if section else both)[name] = one
    assert refused(**both).endswith(f"{old} is the old name of {new}; keep the new one only")


def test_an_old_name_beside_the_key_is_told_where_it_belongs() -> None:
    with pytest.raises(ConfigError, match="it belongs inside 'ray_hetero'"):
        load_config({"restart": 2, KEY: {}})

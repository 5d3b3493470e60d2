"""The JSON Schema for editors says what the configuration itself says."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from pydantic import BaseModel
from test_fuzz_config import GOOD, damaged

from ray_hetero.config import HeteroConfig, load_config
from ray_hetero.config_sources import ENVIRONMENT_VARIABLE, KEY, RENAMED
from ray_hetero.errors import ConfigError

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "tools"))

from write_configuration_schema import FILE, schema, written  # noqa: E402

VALIDATOR = Draft202012Validator(schema())


@pytest.fixture(scope="module", autouse=True)
def _no_file() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(ENVIRONMENT_VARIABLE, raising=False)
        yield


def is_accepted(keys: object) -> bool:
    try:
        load_config({KEY: keys})
    except ConfigError:
        return False
    return True


def sections(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    yield model
    for field in model.model_fields.values():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from sections(field.annotation)


def test_the_file_is_up_to_date() -> None:
    said = "type: python tools/write_configuration_schema.py"
    assert FILE.read_text(encoding="utf-8") == written(), said


def test_it_is_a_schema_that_describes_every_key() -> None:
    Draft202012Validator.check_schema(schema())
    for section in sections(HeteroConfig):
        said = schema()["$defs"][section.__name__]["properties"]
        for name in section.model_fields:
            assert "$ref" in said[name] or said[name]["description"], name


@given(GOOD)
def test_what_the_engine_accepts_is_valid_in_both_forms(keys: dict[str, Any]) -> None:
    assert is_accepted(keys)
    assert [*VALIDATOR.iter_errors(keys), *VALIDATOR.iter_errors({KEY: keys})] == []


def has_whole_float(value: object) -> bool:
    """Whether there is a number like 1.0, which is a whole number to JSON Schema only."""
    if isinstance(value, dict):
        return any(has_whole_float(one) for one in value.values())
    if isinstance(value, list):
        return any(has_whole_float(one) for one in value)
    return isinstance(value, float) and value.is_integer()


@given(damaged(GOOD) | st.dictionaries(st.text(max_size=5), st.none() | st.integers(), max_size=2))
def test_what_is_valid_the_engine_accepts(keys: Any) -> None:
    try:
        given_ = json.loads(json.dumps(keys, allow_nan=False))
    except (TypeError, ValueError):
        return
    if not isinstance(given_, dict) or has_whole_float(given_):
        return
    if VALIDATOR.is_valid({KEY: given_}):
        assert is_accepted(given_), given_


@pytest.mark.parametrize(
    "keys",
    [
        {"sockets": 2},
        {"cpu": {"cores": 0}},
        {"cpu": {"env": {"A B": "1"}}},
        {"layout": []},
        {"layout": [["cpu"], []]},
        {"cpu": {"strict": 0.1, "max_remote_memory_fraction": 0.1}},
    ],
)
def test_what_the_engine_refuses_is_not_valid(keys: dict[str, Any]) -> None:
    assert not is_accepted(keys)
    assert not VALIDATOR.is_valid(keys)
    assert not VALIDATOR.is_valid({KEY: keys})


def test_keys_beside_the_others_are_not_valid() -> None:
    assert not VALIDATOR.is_valid({KEY: {}, "layout": "auto"})
    # An empty file.
    assert VALIDATOR.is_valid(None)


@pytest.mark.parametrize("old", RENAMED)
def test_an_old_name_is_valid_and_deprecated(old: str) -> None:
    *above, name = old.split(".")
    value = True if name == "borrow_gpu" else 0.5 if name == "strict" else 1
    keys = {above[0]: {name: value}} if above else {name: value}
    assert VALIDATOR.is_valid(keys)
    assert is_accepted(keys)
    section = schema()["$defs"]["CpuConfig" if above else "HeteroConfig"]
    assert section["properties"][name]["deprecated"] is True


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda p: p.name)
def test_the_examples_are_valid_and_name_the_schema(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert [*VALIDATOR.iter_errors(yaml.safe_load(text))] == []
    (named,) = [line for line in text.splitlines() if "yaml-language-server" in line]
    assert (path.parent / named.partition("$schema=")[2]).resolve() == FILE

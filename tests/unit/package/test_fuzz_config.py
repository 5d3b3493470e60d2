"""Whatever is given as configuration is used as it was given, or refused by an error of ours.

A few hundred inputs here, thousands with `make fuzz`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from fuzzing import JSON, SCALARS, damaged, scratched
from hypothesis import given
from hypothesis import strategies as st
from worlds import node

from placement.errors import PlacementError
from ray_hetero.config import HeteroConfig, load_config
from ray_hetero.config_sources import ENVIRONMENT_VARIABLE, KEY
from ray_hetero.errors import ConfigError, RayHeteroError
from ray_hetero.planning.world_plan import compute_threads, plan_world, spare_cpus, split_layers

NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,6}", fullmatch=True)
TEXTS = st.text(st.characters(exclude_characters="\x00", exclude_categories=["Cs"]), max_size=8)
WORDS = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=8)
ENVIRONMENTS = st.dictionaries(NAMES, TEXTS, max_size=3)
SECONDS = st.floats(0, 86400, exclude_min=True) | st.integers(1, 86400)
RATES = st.floats(0.001, 100_000) | st.integers(1, 100_000)
SHARES = st.floats(0, 1, exclude_min=True)
AUTO = st.just("auto")


@st.composite
def layouts(draw: st.DrawFn) -> list[list[str]]:
    size = draw(st.integers(1, 3))
    stage = st.lists(st.sampled_from(["cpu", "gpu"]), min_size=size, max_size=size)
    return draw(st.lists(stage, min_size=1, max_size=4))


def section(**keys: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=keys)


GOOD = section(
    layout=AUTO | layouts(),
    layers=AUTO | st.lists(st.integers(1, 40), max_size=4),
    objective=st.sampled_from(["latency", "throughput"]),
    gpu=section(
        accelerator_type=st.none() | WORDS,
        memory_utilization=st.none() | SHARES,
        bandwidth_gb_s=st.none() | RATES,
        env=ENVIRONMENTS,
    ),
    cpu=section(
        unit=st.sampled_from(["package", "numa"]),
        ranks_per_socket=st.integers(1, 64),
        cores=AUTO | st.integers(1, 200),
        reserved_cores=AUTO | st.integers(0, 200),
        kv_cache_gib=AUTO | RATES,
        bandwidth_gb_s=st.none() | RATES,
        openmp=st.sampled_from(["auto", "gomp", "iomp", "none"]),
        max_remote_memory_fraction=st.none() | st.floats(0, 1),
        env=ENVIRONMENTS,
    ),
    placement=section(timeout_s=SECONDS),
    startup=section(actor_timeout_s=SECONDS, load_timeout_s=SECONDS),
    warmup=section(step_timeout_s=SECONDS),
    exchange=section(interface=WORDS, timeout_s=SECONDS),
    pipeline=section(batches_in_flight=AUTO | st.integers(1, 1024)),
)
"""Settings that are all right."""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The file that RAY_HETERO_CONFIG names; one for all inputs of a test."""
    path = tmp_path_factory.mktemp("config") / "hetero.yaml"
    before = os.environ.get(ENVIRONMENT_VARIABLE)
    os.environ[ENVIRONMENT_VARIABLE] = str(path)
    path.write_text("")
    yield path
    del os.environ[ENVIRONMENT_VARIABLE]
    if before is not None:
        os.environ[ENVIRONMENT_VARIABLE] = before


def outcome(given_: object, key: str = KEY) -> HeteroConfig | str:
    """The configuration, or what the error says; any other exception fails the test."""
    try:
        return load_config({key: given_})
    except ConfigError as error:
        return str(error)


def overlaid(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    result = dict(below)
    for key, value in above.items():
        is_section = isinstance(value, dict) and isinstance(below.get(key), dict)
        result[key] = overlaid(below[key], value) if is_section else value
    return result


def check(found: HeteroConfig | str, given_: object) -> None:
    if isinstance(found, str):
        assert len(found) < 20_000
        assert re.search(r"configuration|expected|--additional-config", found)
    else:
        assert isinstance(given_, dict)
        assert found.model_dump() == overlaid(HeteroConfig().model_dump(), given_)


@given(GOOD, GOOD)
def test_what_is_given_is_what_is_used(
    file: Path, below: dict[str, Any], above: dict[str, Any]
) -> None:
    # Escaped: PyYAML writes a few line breaks of Unicode so that it does not read them back.
    file.write_text(yaml.safe_dump(below), encoding="utf-8")
    found = outcome(json.loads(json.dumps(above)))
    assert isinstance(found, HeteroConfig), found
    defaults = HeteroConfig().model_dump()
    assert found.model_dump() == overlaid(overlaid(defaults, below), above)


@given(damaged(GOOD) | JSON)
def test_damaged_settings_are_used_as_given_or_refused(file: Path, given_: Any) -> None:
    file.write_text("")
    check(outcome(given_), given_)


@given(scratched(GOOD.map(yaml.safe_dump)) | TEXTS)
def test_a_scratched_file_is_used_as_it_reads_or_refused(file: Path, text: str) -> None:
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    found = outcome({})
    if isinstance(found, str):
        assert str(file) in found or found.startswith("ray_hetero configuration: ")
        return
    # What was accepted means the same to the usual reader, which keeps the last of two equal keys.
    read = yaml.safe_load(file.read_text(encoding="utf-8"))
    check(found, read or {})


@given(JSON | GOOD, st.text(max_size=12) | st.sampled_from(["ray-hetero", "RAY_HETERO", "layout"]))
def test_settings_under_another_name_are_not_ours(file: Path, given_: Any, name: str) -> None:
    file.write_text("")
    found = outcome(given_, name)
    letters = re.sub(r"[\W_]", "", name.lower())
    if name == KEY:
        check(found, given_)
    elif name in HeteroConfig.model_fields:
        check(found, {name: given_})
    elif letters == "rayhetero":
        assert isinstance(found, str)
        assert repr(name) in found
    else:
        assert found == HeteroConfig()


@given(
    GOOD,
    st.integers(1, 12),
    st.integers(1, 3),
    st.integers(0, 64),
    st.none() | st.lists(st.integers(-1, 40), max_size=5).map(lambda n: ",".join(map(str, n)))
    | st.text(st.sampled_from("0123456789,. -+_xe\u0663"), max_size=8),
    st.lists(st.builds(dict, sockets=st.integers(0, 3), gpus=st.integers(0, 3),
                       cores=st.integers(1, 12)), min_size=1, max_size=3),
)  # fmt: skip
def test_layout_layers_and_partition_are_taken_as_given_or_refused(
    settings_: dict[str, Any], stages: int, ranks: int, layers: int, partition: str | None,
    machines: list[dict[str, int]],
) -> None:  # fmt: skip
    config = HeteroConfig.model_validate(settings_)
    nodes = [
        node("abc"[place], is_driver=place == 0, **machine)
        for place, machine in enumerate(machines)
    ]
    try:
        shares = split_layers(config, layers, stages, partition)
        world = plan_world(
            config, nodes, pipeline_parallel_size=stages, tensor_parallel_size=ranks, layers=shares
        )
        threads = {
            seat.rank: compute_threads(seat, config.cpu)
            for seat in world.seats
            if seat.kind == "cpu"
        }
    except (RayHeteroError, PlacementError):
        return
    assert sum(world.layers) == layers
    assert min(world.layers) >= 1
    if config.layers != "auto":
        assert list(world.layers) == config.layers
    elif partition:
        assert list(world.layers) == [int(part) for part in partition.split(",")]
    if config.layout != "auto":
        assert [list(stage) for stage in world.layout.stages] == config.layout
    assert len(world.seats) == stages * ranks
    for seat in world.seats:
        if seat.kind == "cpu" and config.cpu.cores != "auto":
            assert len(threads[seat.rank]) == config.cpu.cores
    for node_id in world.node_ids:
        here = [s for s in world.seats if s.kind == "cpu" and s.node_id == node_id]
        used = [threads[seat.rank] for seat in here]
        assert not set(spare_cpus(here, used)) & {cpu for cpus in used for cpu in cpus}


@given(st.dictionaries(st.sampled_from(["cpu", "gpu"]), SCALARS | st.just({}), min_size=1))
def test_a_section_is_keys_and_values(file: Path, given_: dict[str, Any]) -> None:
    file.write_text("")
    check(outcome(given_), given_)


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n"
    for old, new in zip("abcdefghij", "bcdefghijk", strict=True)
)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("layers: [1, 2]\nlayers: [2, 1]\n", "key 'layers' comes twice"),
        ("cpu: {cores: 2, cores: 4}\n", "key 'cores' comes twice"),
        ("cpu: {cores: 010}\n", "integer, got '010'"),
        ("warmup: {step_timeout_s: 1:30}\n", "number, got '1:30'"),
        ("cpu: {cores: 1_0}\n", "integer, got '1_0'"),
        ("cpu: {openmp: no}\n", "'none', got 'no'"),
        ("cpu: {env: {A: 2020-13-45}, cores: 2020-13-45}\n", "got '2020-13-45'"),
        ("cpu: {<<: {cores: 2}}\n", "cpu.<<: unknown key"),
        ("cpu: !!int ''\n", "not YAML"),
        ("cpu: !!python/object/apply:os.getcwd []\n", "not YAML"),
        ("cpu: &a {env: *a}\n", "or repeat themselves; write"),
        ("[" * 5000, "nested too deeply"),
        (f"cpu: {{cores: {'9' * 5000}}}\n", "not YAML"),
        (BOMB, "or repeat themselves; write"),
        (f"layers: {BOMB.splitlines()[0][3:]}\n", "got 'x'"),
    ],
)  # fmt: skip
def test_files_with_two_meanings_or_none(file: Path, text: str, said: str) -> None:
    file.write_text(text)
    found = outcome({})
    assert isinstance(found, str)
    assert said in found
    assert len(found) < 5000

"""The dtype of quantised checkpoints that name float16, where nobody has said any."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.engine.arg_utils import EngineArgs
from worlds import world

from placement.cluster.assignment import Turn
from ray_hetero import plugin
from ray_hetero.cli.demo.model import DemoShape, write_demo_model
from ray_hetero.compat.engine import engine_args
from ray_hetero.config import HeteroConfig
from ray_hetero.executor.engine_plan import EnginePlanner
from ray_hetero.launch.prepare import _has_cpus
from ray_hetero.log import logger
from ray_hetero.planning.activation_dtype import dtype_of_config, dtype_with_cpus
from ray_hetero.planning.engine_facts import facts_of, facts_of_model, model_of, server_defaults

SHAPE = DemoShape(layers=2, hidden=64, heads=2)
CPUS = {"ray_hetero": {"layout": [["cpu"]]}}
GPUS = {"ray_hetero": {"layout": [["gpu"]], "experts": {"ranks": 0}}}


@pytest.fixture
def named(tmp_path: Path) -> Any:
    """Write a demo model whose config.json names a dtype."""

    def write(dtype: str, stored: str | None = "awq") -> Path:
        path = write_demo_model(tmp_path / "model", stored=stored, shape=SHAPE)
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**config, "dtype": dtype}))
        return path

    return write


def configured(path: Path, backend: Any = "ray_hetero", **arguments: Any) -> Any:
    engine_args.teach_backend_name(plugin.is_ours, plugin.prepare)
    asked = {"additional_config": CPUS, "max_model_len": 128, **arguments}
    return EngineArgs(
        model=str(path), distributed_executor_backend=backend, **asked
    ).create_engine_config()


@pytest.mark.parametrize(
    ("names", "stored", "asked", "dtype"),
    [
        ("float16", "awq", {}, torch.bfloat16),
        ("float16", "gptq", {}, torch.bfloat16),
        ("float16", "int8", {"additional_config": {}}, torch.bfloat16),
        ("float16", "awq", {"dtype": "float16"}, torch.float16),
        ("float16", "awq", {"dtype": "half"}, torch.float16),
        ("float16", "awq", {"additional_config": GPUS}, torch.float16),
        ("float16", "awq", {"backend": None}, torch.float16),
        ("float16", None, {}, torch.float16),
        ("float32", "awq", {}, torch.bfloat16),
        ("bfloat16", "awq", {}, torch.bfloat16),
    ],
)
def test_the_dtype_of_an_engine(
    names: str, stored: str | None, asked: dict[str, Any], dtype: torch.dtype, named: Any
) -> None:
    config = configured(path := named(names, stored), **asked)
    assert config.model_config.dtype == dtype
    was_changed = (names, dtype) == ("float16", torch.bfloat16)
    assert (engine_args.stock_dtype(config.model_config) is not None) == was_changed
    # The command plans for CPU ranks; GPUs by themselves have no use for the answer.
    if asked.get("additional_config") is not GPUS and "backend" not in asked:
        content = json.loads((path / "config.json").read_text())
        planned = dtype_of_config(content, asked.get("dtype", "auto"))
        assert (planned == "bfloat16") == facts_of(config).is_bf16


def test_it_is_as_if_it_had_been_typed_and_goes_to_other_processes(named: Any) -> None:
    path = named("float16")
    chosen, typed = configured(path), configured(path, dtype="bfloat16")
    assert chosen.model_config.compute_hash() == typed.model_config.compute_hash()
    assert engine_args.stock_dtype(typed.model_config) is None
    there = pickle.loads(pickle.dumps(chosen.model_config))  # noqa: S301
    assert (there.dtype, engine_args.stock_dtype(there)) == (torch.bfloat16, torch.float16)
    engine_args.take_stock_dtype(there)
    assert there.dtype == torch.float16


def test_stages_are_chosen_by_what_cpu_ranks_would_take(named: Any) -> None:
    arguments = EngineArgs(model=str(named("float16")), max_model_len=128)
    for has_cpus in (True, None, False):
        engine_args.choose_dtype(arguments, dtype_with_cpus, has_cpus=has_cpus)
        found = facts_of_model(arguments, model_of(arguments), server_defaults([]))
        assert found.is_bf16 == (has_cpus is not False)
    assert arguments.dtype == "auto"


def test_a_model_with_images_is_not_changed_before_cpu_ranks_are_certain(
    named: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.config import ModelConfig

    monkeypatch.setattr(ModelConfig, "is_multimodal_model", property(lambda self: True))
    arguments = EngineArgs(model=str(named("float16")), max_model_len=128)
    for has_cpus, dtype in ((None, torch.float16), (True, torch.bfloat16)):
        engine_args.choose_dtype(arguments, dtype_with_cpus, has_cpus=has_cpus)
        assert arguments.create_model_config().dtype == dtype


@pytest.mark.parametrize(
    ("stages", "engines", "dtype"),
    [
        (("g", "c"), 1, torch.bfloat16),
        (("g", "g"), 1, torch.float16),
        # All engines of a server have the same.
        (("g", "g"), 2, torch.bfloat16),
    ],
)
def test_ranks_that_are_known_late_settle_it(
    stages: tuple[str, str], engines: int, dtype: torch.dtype, named: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    config = configured(named("float16"))
    spec = replace(engine_args.spec_of(config), engines=engines)
    planner = EnginePlanner(config, spec, Turn(), None, None)
    lines: list[str] = []
    monkeypatch.setattr(logger, "info", lambda line, *values: lines.append(line % values))
    planner._settle_dtype(world(*stages, layers=1))
    assert config.model_config.dtype == dtype
    assert ["--dtype float16 keeps it" in line for line in lines] == [True] * (
        dtype == torch.bfloat16
    )


@pytest.mark.parametrize(
    ("layout", "experts", "gpus", "answer"),
    [
        ("auto", "auto", None, None), ("auto", "auto", 0, True), ("auto", 0, 1, True),
        ([["cpu"], ["gpu"]], 0, None, True), ([["gpu"]], 0, None, False),
        ([["gpu"]], 2, None, True), ([["gpu"]], "auto", 1, None),
    ],
)  # fmt: skip
def test_whether_there_are_cpu_ranks(
    layout: Any, experts: Any, gpus: int | None, answer: bool | None
) -> None:
    config = HeteroConfig.model_validate({"layout": layout, "experts": {"ranks": experts}})
    assert _has_cpus(config, gpus) is answer


@pytest.mark.parametrize(
    ("config", "asked", "dtype"),
    [
        ({"dtype": "float16"}, "auto", "float16"),
        ({"torch_dtype": "float16", "quantization_config": {"bits": 4}}, "auto", "bfloat16"),
        ({"text_config": {"dtype": "float16", "quantization_config": {"bits": 4}}}, "auto",
         "bfloat16"),
        ({"dtype": "float16", "compression_config": {"bits": 4}}, "float16", "float16"),
        ({"dtype": "float32"}, "auto", "bfloat16"),
        ({}, "auto", "bfloat16"),
    ],
)  # fmt: skip
def test_the_dtype_that_is_planned_with(config: dict[str, Any], asked: str, dtype: str) -> None:
    assert dtype_of_config(config, asked) == dtype

"""Stages where nobody has asked for any, before vLLM builds its configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from plan_cases import config_of
from vllm.engine.arg_utils import EngineArgs

from placement.plan.described import described
from ray_hetero.config import HeteroConfig
from ray_hetero.launch import chosen_stages
from ray_hetero.launch.chosen_stages import choose_stages, settle_experts, take_sizes
from ray_hetero.planning.machine import Machine

XEON = {"part": "Xeon 8480+", "cores": 56, "memory_gib": 512}


@pytest.fixture
def arguments(tmp_path: Path) -> EngineArgs:
    config = config_of("llama", 32, 4096, 14336, (32, 8), 128256, max_position_embeddings=8192)
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"architectures": ["LlamaForCausalLM"]})
    )
    return EngineArgs(model=str(tmp_path), skip_tokenizer_init=True)


def on(monkeypatch: pytest.MonkeyPatch, **node: Any) -> None:
    nodes = described({"nodes": [{"name": "a", **node}]}).as_nodes()
    machine = Machine(nodes, lambda seats, threads: {})
    monkeypatch.setattr(chosen_stages, "_machine", lambda config: machine)


@pytest.mark.parametrize(
    ("node", "layout", "sizes"),
    [
        ({"sockets": {**XEON, "count": 2}}, [["cpu", "cpu"]], (1, 2)),
        ({"sockets": XEON}, [["cpu"]], (1, 1)),
        ({"gpus": {"part": "H100 SXM"}, "sockets": {**XEON, "count": 2}}, [["gpu"]], (1, 1)),
    ],
)
def test_sizes_follow_from_the_machine_and_the_model(
    node: dict[str, Any],
    layout: list[list[str]],
    sizes: tuple[int, int],
    arguments: EngineArgs,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on(monkeypatch, **node)
    chosen = choose_stages(arguments, HeteroConfig(), group=None, engines=1)
    assert chosen.layout == layout
    assert (arguments.pipeline_parallel_size, arguments.tensor_parallel_size) == sizes


MIXTRAL = config_of(
    "mixtral", 32, 4096, 14336, (32, 8), 32000, num_local_experts=8, num_experts_per_tok=2,
    max_position_embeddings=8192, architectures=["MixtralForCausalLM"],
)  # fmt: skip
NONE = HeteroConfig.model_validate({"experts": {"ranks": 0}})


@pytest.mark.parametrize(("config", "ranks"), [(HeteroConfig(), 2), (NONE, 0)])
def test_expert_ranks_are_written_out_unless_there_are_to_be_none(
    config: HeteroConfig,
    ranks: int,
    arguments: EngineArgs,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL))
    on(monkeypatch, gpus={"part": "L40S"}, sockets={**XEON, "count": 2})
    chosen = choose_stages(arguments, config, group=None, engines=1)
    assert chosen.experts.ranks == ranks
    assert (chosen.layout == [["gpu"]]) == bool(ranks)


@pytest.mark.parametrize(
    ("asked", "ranks"),
    [
        ({}, "auto"),
        ({"enable_lora": True}, 0),
        ({"enable_lora": True, "lora_target_modules": ["q_proj"]}, "auto"),
        ({"data_parallel_size": 2}, 0),
    ],
)
def test_auto_is_no_expert_rank_where_these_are_refused(
    asked: dict[str, Any], ranks: Any, arguments: EngineArgs
) -> None:
    for name, value in asked.items():
        setattr(arguments, name, value)
    assert settle_experts(arguments, HeteroConfig()).experts.ranks == ranks
    given = HeteroConfig.model_validate({"experts": {"ranks": 1}})
    assert settle_experts(arguments, given) is given


def test_what_was_asked_for_wins(arguments: EngineArgs, monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, sockets={**XEON, "count": 2})
    config = HeteroConfig()
    assert choose_stages(arguments, config, group="a group", engines=1) is config
    assert choose_stages(arguments, config, group=None, engines=2) is config
    given = HeteroConfig(layout=[["cpu"]])
    assert choose_stages(arguments, given, group=None, engines=1) is given
    arguments.pipeline_parallel_size = 2
    assert choose_stages(arguments, config, group=None, engines=1) is config
    assert arguments.tensor_parallel_size == 1


def test_a_layout_gives_the_sizes_that_were_left_out(arguments: EngineArgs) -> None:
    take_sizes(arguments, HeteroConfig(layout=[["cpu", "cpu"], ["gpu"]]))
    assert (arguments.pipeline_parallel_size, arguments.tensor_parallel_size) == (2, 2)
    arguments.pipeline_parallel_size, arguments.tensor_parallel_size = 1, 2
    take_sizes(arguments, HeteroConfig(layout=[["cpu", "cpu"], ["gpu"]]))
    assert (arguments.pipeline_parallel_size, arguments.tensor_parallel_size) == (1, 2)


@pytest.mark.parametrize("name", ["RAY_ADDRESS", "RAY_OVERRIDE_RESOURCES"])
def test_a_cluster_that_is_not_connected_to_is_not_guessed(
    name: str, arguments: EngineArgs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "x")
    config = HeteroConfig()
    assert choose_stages(arguments, config, group=None, engines=1) is config

"""Stages where nobody has asked for any, before vLLM builds its configuration."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from plan_cases import config_of
from vllm.engine.arg_utils import EngineArgs

from placement.errors import DoesNotFitError
from placement.plan.described import described
from ray_hetero.compat.engine import engine_environment
from ray_hetero.config import HeteroConfig
from ray_hetero.errors import UnsupportedError
from ray_hetero.launch import chosen_stages
from ray_hetero.launch.chosen_stages import AUTO_LENGTH, choose_stages, settle_experts, take_sizes
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
    monkeypatch.setattr(chosen_stages, "found_machine", lambda config, group: nullcontext(machine))


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


def test_without_cpu_kernels_no_stage_is_on_a_socket(
    arguments: EngineArgs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chosen_stages, "lacking_kernels", lambda: "0.33.0")
    on(monkeypatch, sockets=XEON)
    with pytest.raises(UnsupportedError, match=r"vLLM 0\.33\.0 .* install-cpu-kernels"):
        choose_stages(arguments, HeteroConfig(), group=None, engines=1)
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL))
    on(monkeypatch, gpus={"part": "L40S"}, sockets={**XEON, "count": 2})
    chosen = choose_stages(arguments, HeteroConfig(), group=None, engines=1)
    assert (chosen.layout, chosen.experts.ranks) == ([["gpu"]], 2)


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


@pytest.mark.parametrize(("sockets", "layout"), [(1, None), (2, [["cpu"]]), (4, [["cpu", "cpu"]])])
def test_engines_of_one_server_share_the_sockets(
    sockets: int,
    layout: list[list[str]] | None,
    arguments: EngineArgs,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on(monkeypatch, sockets={**XEON, "count": sockets})
    if layout is None:
        with pytest.raises(DoesNotFitError, match="there is no device to plan on"):
            choose_stages(arguments, HeteroConfig(), group=None, engines=2)
        return
    assert choose_stages(arguments, HeteroConfig(), group=None, engines=2).layout == layout


def test_a_device_that_is_not_known_is_a_warning_that_says_what_to_type(
    arguments: EngineArgs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gpu = {"memory_gib": 24, "read_gb_s": 1000, "bf16_tflop_s": 100, "name": "Z9"}
    on(monkeypatch, gpus=gpu, sockets=XEON)
    config = HeteroConfig()
    assert choose_stages(arguments, config, group=None, engines=1) is config
    (record,) = (one for one in caplog.records if one.levelname == "WARNING")
    assert "Z9 (GPU 0 of node a): its memory bandwidth is not known" in record.message
    assert "Set gpu.bandwidth_gb_s" in record.message
    assert "The engine takes one rank" in record.message
    assert "--pipeline-parallel-size 2" in record.message
    assert not caplog.records[-1].message.startswith("stages: ")


def test_what_does_not_fit_is_an_error_before_anything_is_loaded(
    arguments: EngineArgs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    on(monkeypatch, sockets={**XEON, "memory_gib": 12})
    with pytest.raises(DoesNotFitError, match="does not fit"):
        choose_stages(arguments, HeteroConfig(), group=None, engines=1)
    # What another engine holds may be free by the time that this one plans.
    nodes = described({"nodes": [{"name": "a", "sockets": {**XEON, "memory_gib": 12}}]}).as_nodes()
    held = tuple(replace(node, holders=("engine 7",)) for node in nodes)
    monkeypatch.setattr(
        chosen_stages, "found_machine",
        lambda config, group: nullcontext(Machine(held, lambda seats, threads: {})),
    )  # fmt: skip
    config = HeteroConfig()
    assert choose_stages(arguments, config, group=None, engines=1) is config
    assert "what other engines leave is not enough" in caplog.text


def test_the_longest_length_is_what_fits(
    arguments: EngineArgs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 131072}))
    on(monkeypatch, gpus={"part": "L40S", "memory_gib": 26}, sockets={**XEON, "count": 2})
    arguments.max_model_len = AUTO_LENGTH
    assert choose_stages(arguments, HeteroConfig(), group=None, engines=1).layout == [["gpu"]]
    # 131,072 bytes a token, in what 15 GiB of weights leave.
    assert 40_000 < arguments.max_model_len < 70_000


def test_processes_of_a_server_take_what_their_parent_has_chosen(
    arguments: EngineArgs, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(monkeypatch, sockets={**XEON, "count": 2})
    chosen = choose_stages(arguments, HeteroConfig(), group=None, engines=1)
    # The engine has the sockets by then.
    on(monkeypatch, sockets={**XEON, "count": 1})
    arguments.tensor_parallel_size = 1
    monkeypatch.setattr(chosen_stages.multiprocessing, "parent_process", lambda: "a parent")
    again = choose_stages(arguments, HeteroConfig(), group=None, engines=1)
    engine_environment.take_back()
    assert again == chosen
    assert arguments.tensor_parallel_size == 2

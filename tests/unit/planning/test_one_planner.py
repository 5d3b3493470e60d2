"""The command and the engine plan alike, and what is chosen where nothing is asked for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
from plan_cases import LLAMA_8B, LLAMA_70B, config_of, request_for
from typer.testing import CliRunner

from placement.cluster.assignment import Node
from placement.model.reading import UnknownModelError, shape_from_config
from placement.plan.described import described
from ray_hetero.cli.plan import plan as plan_command
from ray_hetero.config import HeteroConfig
from ray_hetero.planning.activation_dtype import own_dtype
from ray_hetero.planning.engine_facts import (
    EngineFacts,
    EngineOptions,
    facts_of_checkpoint,
    own_length,
    server_defaults,
)
from ray_hetero.planning.layer_plan import plan_layers
from ray_hetero.planning.layout_choice import choose_layout, layout_of, layouts_to_try
from ray_hetero.planning.seat_devices import UnknownDeviceError

XEON = {"part": "Xeon 8480+", "cores": 56, "memory_gib": 512}
AMX = {"instruction_sets": ["amx_bf16", "avx512f"]}
MACHINES: dict[str, list[dict[str, Any]]] = {
    "one gpu, two sockets": [
        {"name": "a", "gpus": {"part": "H100 SXM"}, "sockets": {**XEON, "count": 2}}
    ],
    "two gpus, two amx sockets": [
        {"name": "a", "gpus": {"part": "H200", "count": 2}, "sockets": {**XEON, **AMX, "count": 2}}
    ],
    "one gpu, two amx sockets": [
        {"name": "a", "gpus": {"part": "H100 SXM"}, "sockets": {**XEON, **AMX, "count": 2}}
    ],
    "two sockets": [{"name": "a", "sockets": {**XEON, "count": 2}}],
    "two nodes": [
        {"name": "a", "gpus": {"part": "L40S"}, "sockets": {**XEON, "count": 1}},
        {"name": "b", "sockets": {**XEON, **AMX, "count": 2}},
    ],
}
MODELS = {
    "8B": config_of("llama", 32, 4096, 14336, (32, 8), 128256, max_position_embeddings=8192),
    "70B": config_of("llama", 80, 8192, 28672, (64, 8), 128256, max_position_embeddings=131072),
    "qwen 32B": config_of("qwen2", 64, 5120, 27648, (40, 8), 152064, max_position_embeddings=32768),
}


def command(*arguments: object) -> Any:
    app = typer.Typer()
    app.command()(plan_command)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("model", MODELS)
def test_the_command_and_the_engine_answer_the_same(
    model: str, machine: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS[model]))
    # JSON is YAML.
    topology = tmp_path / "cluster.yaml"
    topology.write_text(json.dumps({"nodes": MACHINES[machine]}))
    answer = command(tmp_path, "--topology", topology, "--json")
    # What the engine does: the stages before vLLM's configuration, all else in the executor.
    nodes = described({"nodes": MACHINES[machine]}).as_nodes()
    shape = shape_from_config(MODELS[model])
    facts = facts_of_checkpoint(MODELS[model], shape, nodes)
    choice = choose_layout(request_for(HeteroConfig(), nodes, facts))
    engine = plan_layers(request_for(HeteroConfig(layout=layout_of(choice)), nodes, facts))
    assert answer.exit_code == 0, answer.output
    found = json.loads(answer.stdout)
    assert engine.split is not None
    ranks = [(rank["node"], rank["kind"], rank["device"]) for s in found["stages"]
             for rank in s["ranks"]]  # fmt: skip
    assert ranks == [
        (seat.node_name, seat.kind, rank.device.label)
        for seat, rank in zip(engine.world.seats, engine.split.ranks, strict=True)
    ]
    assert tuple(found["layer_partition"]) == engine.world.layers
    assert found["kv_tokens"] == engine.kv_tokens
    assert found["decode_step_s"] == engine.split.step_s
    assert found["prefill_s"] == engine.split.prefill_s
    assert found["max_model_len"] == MODELS[model]["max_position_embeddings"]


def test_the_command_prices_prompts_that_a_gpu_computes_for_two_sockets(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS["70B"]))
    topology = tmp_path / "cluster.yaml"
    topology.write_text(json.dumps({"nodes": MACHINES["one gpu, two amx sockets"]}))
    asked = (tmp_path, "--topology", topology, "--context", 8192)
    found = json.loads(command(*asked, "--json").stdout)
    assert [len(stage["ranks"]) for stage in found["stages"]] == [2, 1]
    # Chunks of 8,192 tokens at most; of a layer's weights three quarters, over 51.2 GB/s.
    layers = found["stages"][0]["layers"]
    crossing = 0.75 * layers * 1_711_308_800 / 51.2e9
    computing = found["stages"][0]["prefill_parts_s"]
    assert computing["weights"] == pytest.approx(crossing, rel=0.01)
    assert found["prefill_s"] < 6
    text = command(*asked).stdout
    assert "a GPU computes passes of 96 tokens or more for CPU stages" in normal(text)


def normal(text: str) -> str:
    """With every run of spaces and line breaks as one space."""
    return " ".join(text.split())


def facts_for(shape: Any, length: int = 4096) -> EngineFacts:
    return EngineFacts(shape, "", len(shape.layers), length, 256, 2048, 0.92)


def chosen(shape: Any, *nodes: dict[str, Any]) -> Any:
    there: Sequence[Node] = described({"nodes": list(nodes)}).as_nodes()
    return choose_layout(request_for(HeteroConfig(), there, facts_for(shape)))


H100 = {"part": "H100 SXM"}


@pytest.mark.parametrize(
    ("shape", "node", "layouts"),
    [
        (LLAMA_8B, {"gpus": H100, "sockets": {**XEON, "count": 2}}, ["[gpu]"]),
        (
            LLAMA_70B,
            {"gpus": H100, "sockets": {**XEON, "count": 2}},
            ["[cpu, cpu] → [gpu]", "[gpu] → [cpu, cpu]"],
        ),
        (LLAMA_70B, {"gpus": {**H100, "count": 2}}, ["[gpu, gpu]"]),
        (LLAMA_8B, {"sockets": {**XEON, "count": 2}}, ["[cpu, cpu]"]),
        (LLAMA_8B, {"sockets": {**XEON, "count": 1}}, ["[cpu]"]),
    ],
)
def test_what_is_chosen_where_nothing_is_asked_for(
    shape: Any, node: dict[str, Any], layouts: list[str]
) -> None:
    choice = chosen(shape, {"name": "a", **node})
    assert str(choice.chosen.layout) in layouts
    line = str(choice)
    assert line.startswith(f"{choice.chosen.layout.words} – ")
    assert "\n" not in line
    fitting = [other for other in choice.others if other.plan is not None]
    assert ("Runner-up: " in line) == bool(fitting)
    if choice.chosen.layout.count("cpu"):
        # No other that fits is faster by more than a hundredth.
        assert all(0.99 * choice.chosen.step_s <= other.step_s for other in fitting)


def test_what_is_not_known_is_said_where_the_choice_is_left_to_the_user() -> None:
    gpu = {"memory_gib": 80, "read_gb_s": 3000, "bf16_tflop_s": 900, "name": "Z9"}
    # Figures of the description are not handed to the engine, as of a real GPU that is not known.
    with pytest.raises(
        UnknownDeviceError, match=r"^Z9 \(GPU 0 of node a\): .* Set gpu\.bandwidth_gb_s"
    ):
        chosen(LLAMA_8B, {"name": "a", "gpus": gpu, "sockets": {**XEON, "count": 1}})
    nothing = EngineFacts(None, "why", 32, 4096, 256, 2048, 0.92)
    nodes = described({"nodes": MACHINES["two sockets"]}).as_nodes()
    with pytest.raises(UnknownModelError, match="why"):
        choose_layout(request_for(HeteroConfig(), nodes, nothing))


def test_stages_have_sizes_that_divide_the_heads() -> None:
    nodes = described(
        {"nodes": [{"name": "a", "gpus": {**H100, "count": 3}, "sockets": {**XEON, "count": 3}}]}
    ).as_nodes()
    layouts = layouts_to_try(nodes, LLAMA_8B)
    assert {size for layout in layouts for size in layout.sizes} == {1, 2}
    assert len({layout.stages for layout in layouts}) == len(layouts)


def test_the_command_compares_layouts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS["70B"]))
    topology = tmp_path / "cluster.yaml"
    topology.write_text(json.dumps({"nodes": MACHINES["one gpu, two sockets"]}))
    answer = command(
        tmp_path, "--topology", topology, "--max-model-len", 8192, "--compare", "--json"
    )
    candidates = json.loads(answer.stdout)["candidates"]
    assert [["gpu"]] in [one["layout"] for one in candidates]
    steps = [one["decode_step_s"] for one in candidates if "decode_step_s" in one]
    assert steps[1:] == sorted(steps[1:])
    shown = command(tmp_path, "--topology", topology, "--max-model-len", 8192, "--compare")
    assert "Layouts that were looked at" in shown.stdout
    assert "first token" in shown.stdout
    assert "2 sockets → GPU" in shown.stdout


def test_the_command_refuses_what_the_engine_refuses(tmp_path: Path) -> None:
    quantised = MODELS["8B"] | {
        "quantization_config": {"quant_method": "gptq", "bits": 8, "group_size": 128}
    }
    (tmp_path / "config.json").write_text(json.dumps(quantised))
    topology = tmp_path / "cluster.yaml"
    topology.write_text(json.dumps({"nodes": MACHINES["two sockets"]}))
    answer = command(tmp_path, "--topology", topology)
    assert answer.exit_code == 1
    assert "8-bit GPTQ" in answer.stderr
    (tmp_path / "config.json").write_text(json.dumps(MODELS["8B"]))
    answer = command(tmp_path, "--topology", topology, "-tp", 3)
    assert answer.exit_code == 1
    assert "3" in answer.stderr


def test_a_name_that_the_hub_does_not_give_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    answer = command("nobody/no-such-model")
    assert answer.exit_code == 1
    assert answer.stderr.startswith(
        "ray-hetero: nobody/no-such-model: there is no such folder, it is not in the hub's cache, "
        "and HF_HUB_OFFLINE is set"
    )
    assert answer.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({}, None),
        ({"max_position_embeddings": 4096}, 4096),
        ({"text_config": {"n_positions": 1024}}, 1024),
        ({"max_position_embeddings": 131072, "rope_scaling": {"rope_type": "llama3", "factor": 8}},
         131072),
        ({"max_position_embeddings": 32768,
          "rope_scaling": {"type": "yarn", "factor": 4.0,
                           "original_max_position_embeddings": 32768}}, 32768),
        ({"text_config": {"model_type": "gemma3_text", "rope_scaling": {"factor": 8.0}}}, 131072),
        ({"max_position_embeddings": 2048, "rope_scaling": {"type": "linear", "factor": 2}}, 4096),
        ({"max_position_embeddings": 131072, "original_max_position_embeddings": 4096,
          "rope_scaling": {"type": "longrope"}}, 4096),
        ({"max_position_embeddings": 131072, "original_max_position_embeddings": 4096,
          "rope_scaling": {"type": "su"}}, 4096),
        ({"max_position_embeddings": 131072, "rope_scaling": {"type": "longrope"}}, 131072),
        ({"max_position_embeddings": 4096, "original_max_position_embeddings": 4096,
          "rope_scaling": None}, 4096),
    ],
)  # fmt: skip
def test_the_models_own_length(config: dict[str, Any], length: int | None) -> None:
    assert own_length(config) == length


FACTORS = {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16}


@pytest.mark.parametrize(
    "more",
    [
        {"rope_scaling": {"type": "longrope", **FACTORS}},
        {"rope_scaling": {"type": "su", "original_max_position_embeddings": 4096, **FACTORS}},
        {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, **FACTORS}},
        {"max_position_embeddings": 4096, "rope_scaling": None},
    ],
)
def test_the_length_of_phi_3_is_vllms(more: dict[str, Any], tmp_path: Path) -> None:
    from vllm.config import ModelConfig

    config = {
        "model_type": "phi3", "architectures": ["Phi3ForCausalLM"], "hidden_size": 128,
        "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 2,
        "intermediate_size": 256, "vocab_size": 512, "dtype": "bfloat16", "pad_token_id": 0,
        "max_position_embeddings": 131072, "original_max_position_embeddings": 4096, **more,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = ModelConfig(str(tmp_path), skip_tokenizer_init=True)
    assert own_length(config) == model.max_model_len == 4096


def test_the_models_own_dtype() -> None:
    assert own_dtype({"torch_dtype": "bfloat16"}) == "bfloat16"
    assert own_dtype({"text_config": {"dtype": "torch.float16"}}) == "float16"
    assert own_dtype({}) == ""


def test_defaults_are_those_of_a_server_on_the_drivers_devices() -> None:
    nodes = described({"nodes": MACHINES["one gpu, two sockets"]}).as_nodes()
    assert server_defaults(nodes).max_num_batched_tokens == 8192
    sockets = described({"nodes": MACHINES["two sockets"]}).as_nodes()
    facts = facts_of_checkpoint(MODELS["8B"], LLAMA_8B, sockets)
    assert facts.in_world(2).max_num_seqs == 256
    assert facts.in_world(2).max_num_batched_tokens == 4096
    given = facts_of_checkpoint(MODELS["8B"], LLAMA_8B, sockets, EngineOptions(max_num_seqs=7))
    assert (given.in_world(2).max_num_seqs, given.in_world(2).in_world(2).max_num_seqs) == (7, 7)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("nothing-here", "nothing-here: there is no such file; expected a checkpoint's folder"),
        (".", ".: in this folder there is no config.json; expected a checkpoint's folder"),
        ("machine.yaml", "got YAML; a description of machines is for --topology"),
    ],
)
def test_a_model_that_is_none_is_refused_with_what_one_is(
    model: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    answer = command(model)
    assert answer.exit_code == 1
    assert message in answer.stderr
    assert answer.stderr.count("\n") == 1

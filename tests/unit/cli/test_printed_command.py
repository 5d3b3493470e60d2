"""The command that `ray-hetero plan` prints, parsed as vLLM's arguments, gives the plan shown."""

from __future__ import annotations

import json
import shlex
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
from plan_cases import config_of
from typer.testing import CliRunner
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from placement.plan.described import described, read_described
from ray_hetero.cli.plan import plan as plan_command
from ray_hetero.config import load_config
from ray_hetero.launch import chosen_stages
from ray_hetero.launch.chosen_stages import choose_stages
from ray_hetero.planning.engine_facts import facts_of_model, model_of, server_defaults
from ray_hetero.planning.layer_plan import plan_layers
from ray_hetero.planning.machine import Machine, described_machine
from ray_hetero.planning.plan_request import PlanRequest

XEON = {"part": "Xeon 8480+", "cores": 56, "memory_gib": 512,
        "instruction_sets": ["amx_bf16", "avx512f"]}  # fmt: skip
MACHINES: dict[str, Any] = {
    "H100 and two sockets": {"gpus": {"part": "H100 SXM"}, "sockets": {**XEON, "count": 2}},
    "L40S and a socket": {"gpus": {"part": "L40S"}, "sockets": XEON},
    "two sockets": {"sockets": {**XEON, "count": 2}},
}
MODELS = {
    "llama-8b": config_of(
        "llama", 32, 4096, 14336, (32, 8), 128256, max_position_embeddings=131072,
        architectures=["LlamaForCausalLM"],
    ),
    "mixtral": config_of(
        "mixtral", 32, 4096, 14336, (32, 8), 32000, num_local_experts=8, num_experts_per_tok=2,
        max_position_embeddings=32768, architectures=["MixtralForCausalLM"],
    ),
}  # fmt: skip
ASKED = [
    (),
    ("--users", 16),
    ("--users", 8, "--context", "16k", "--max-model-len", 16384),
    ("--batch", 2, "--context", 30000, "--max-model-len", 32768),
    ("--max-sequences", 4, "--max-model-len", "32K"),
    ("--max-model-len", "auto", "--gpu-memory-utilization", 0.5),
]


def shown(*arguments: object) -> str:
    app = typer.Typer()
    app.command()(plan_command)
    answer = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert answer.exit_code == 0, answer.output
    return str(answer.stdout)


@cache
def arguments_of_vllm() -> FlexibleArgumentParser:
    return AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())


def typed(command: str, folder: Path) -> AsyncEngineArgs:
    """vLLM's arguments, as its server takes them from a line that was typed."""
    words = shlex.split(command[command.index("vllm serve") :])
    given = arguments_of_vllm().parse_args(["--model", str(folder), *words[3:]])
    return AsyncEngineArgs.from_cli_args(given)


@pytest.mark.parametrize("asked", ASKED, ids=lambda asked: " ".join(map(str, asked)))
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("model", MODELS)
def test_the_printed_command_gives_the_plan_shown(
    model: str,
    machine: str,
    asked: tuple[object, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS[model]))
    topology = tmp_path / "cluster.yaml"
    topology.write_text(json.dumps({"nodes": [{"name": "a", **MACHINES[machine]}]}))
    plan = json.loads(shown(tmp_path, "--topology", topology, *asked, "--json"))
    line = shown(tmp_path, "--topology", topology, *asked).splitlines()[-1]

    there = described_machine(read_described(topology))
    monkeypatch.setattr(chosen_stages, "found_machine", lambda config, group: nullcontext(there))
    arguments = typed(line, tmp_path)
    arguments.skip_tokenizer_init = True
    config = load_config(arguments.additional_config)
    chosen = choose_stages(arguments, config, None, engines=1)
    facts = facts_of_model(arguments, model_of(arguments), server_defaults(there.nodes))
    sizes = arguments.pipeline_parallel_size, arguments.tensor_parallel_size
    engine = plan_layers(PlanRequest(chosen, Machine(there.nodes, there.measure), facts, *sizes))
    assert engine.split is not None
    assert [[rank["kind"] for rank in stage["ranks"]] for stage in plan["stages"]] == chosen.layout
    assert tuple(plan["layer_partition"]) == engine.world.layers
    assert len(plan["experts"]) == len(engine.world.experts)
    assert {one["layers"] for one in plan["experts"]} == (
        {engine.world.expert_layers} if engine.world.experts else set()
    )
    for key, value in (
        ("kv_tokens", engine.kv_tokens),
        ("batch", engine.split.work.batch),
        ("context", engine.split.work.context),
        ("max_model_len", engine.split.work.max_model_len),
        ("decode_step_s", engine.split.step_s),
    ):
        assert plan[key] == value, key


def test_users_see_times_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS["mixtral"]))
    topology = tmp_path / "cluster.yaml"
    topology.write_text(json.dumps({"nodes": [{"name": "a", **MACHINES["H100 and two sockets"]}]}))
    plan = json.loads(shown(tmp_path, "--topology", topology, "--json"))
    one, four, *others = plan["users"]
    assert [each["users"] for each in plan["users"]] == [1, 4, 16, 64]
    assert one["tokens_per_s"] == pytest.approx(plan["tokens_per_s"])
    assert one["first_token_s"] == pytest.approx(plan["prefill_s"])
    assert four["total_per_s"] == pytest.approx(4 * four["tokens_per_s"])
    # Prompts wait for each other, and steps of more sequences read more experts.
    times = [each["first_token_s"] for each in plan["users"]]
    assert times == sorted(times)
    assert times[1] > 2 * times[0]
    speeds = [each["tokens_per_s"] for each in plan["users"]]
    assert speeds == sorted(speeds, reverse=True)
    assert others[-1]["room"] == plan["kv_tokens"] / 4096
    asked = json.loads(shown(tmp_path, "--topology", topology, "--users", 5, "--json"))
    assert [each["users"] for each in asked["users"]] == [5]
    assert asked["kv_tokens"] >= 5 * 4096
    assert described({"nodes": [{"name": "a", **MACHINES["two sockets"]}]})

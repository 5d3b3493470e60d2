"""What a plan says of the same model in fewer bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from plan_cases import config_of
from typer.testing import CliRunner

from placement.errors import DoesNotFitError
from placement.model.reading import shape_from_config
from placement.plan.described import described
from ray_hetero.cli.plan import plan as plan_command
from ray_hetero.config import ExpertsConfig, HeteroConfig
from ray_hetero.planning.engine_facts import facts_of_checkpoint
from ray_hetero.planning.machine import described_machine
from ray_hetero.planning.model_plan import ModelPlan, plan_model
from ray_hetero.planning.plan_request import PlanRequest
from ray_hetero.planning.quantise_first import (
    FP8_IN_BLOCKS,
    INTEGERS_OF_4_BITS,
    WORTH_IT,
    quantised_forms,
)

SMALL = config_of("llama", 32, 4096, 14336, (32, 8), 128256, max_position_embeddings=8192)
LARGE = config_of("llama", 80, 8192, 28672, (64, 8), 128256, max_position_embeddings=8192)
HUGE = config_of("llama", 126, 16384, 53248, (128, 8), 128256, max_position_embeddings=8192)
XEON = {"part": "Xeon 8480+", "cores": 56, "instruction_sets": ["amx_bf16"]}
ONE_GPU = {"gpus": {"part": "H100 SXM"}, "sockets": {**XEON, "count": 2, "memory_gib": 512}}
SOCKETS = {"sockets": {**XEON, "count": 2, "memory_gib": 512}}
START = "Quantise first: "


def planned(config: dict[str, Any], node: dict[str, Any], **keys: Any) -> ModelPlan:
    machine = described_machine(described({"nodes": [{"name": "a", **node}]}))
    facts = facts_of_checkpoint(config, shape_from_config(config), machine.nodes)
    request = PlanRequest(HeteroConfig(**keys), machine, facts)
    return plan_model("m", request, quantised=quantised_forms(config))


def remark(found: ModelPlan) -> str:
    said = [note for note in found.plan.notes if note.startswith(START)]
    assert len(said) <= 1
    return said[0] if said else ""


def test_a_quantised_form_that_fits_the_gpu_is_named_with_its_step() -> None:
    found = planned(LARGE, ONE_GPU)
    alone = planned(LARGE | {"quantization_config": INTEGERS_OF_4_BITS}, ONE_GPU)
    assert alone.layers.world.is_stock
    assert alone.layers.split is not None
    assert found.layers.split is not None
    before, after = found.layers.split.step_s, alone.layers.split.step_s
    assert remark(found) == (
        f"{START}with 4-bit weights this model has "
        f"{alone.plan.shape.weight_bytes / 2**30:.1f} GiB, fits on the GPUs alone (GPU), and a "
        f"decode step takes {1e3 * after:.1f} ms instead of {1e3 * before:.1f} ms, "
        f"{before / after:.1f} times as fast."
    )


def test_of_two_forms_that_fit_the_gpus_the_one_that_loses_less_is_named() -> None:
    assert "with FP8 weights" in remark(planned(LARGE, {**ONE_GPU, "gpus": {"part": "H200"}}))


def test_a_form_that_does_not_fit_the_gpu_is_named_where_it_is_much_faster() -> None:
    found = remark(planned(HUGE, {**ONE_GPU, "sockets": {**XEON, "count": 2, "memory_gib": 1024}}))
    assert "with 4-bit weights" in found
    assert "fits on GPUs and sockets" in found
    assert float(found.split(" times as fast")[0].rsplit(" ", 1)[1]) >= WORTH_IT


def test_nothing_is_said_where_there_is_nothing_to_gain() -> None:
    assert remark(planned(SMALL, ONE_GPU)) == ""
    # Two sockets read 12 bits of a weight as it is, and what is beside the reads stays.
    assert remark(planned(SMALL, SOCKETS)) == ""
    assert remark(planned(LARGE | {"quantization_config": FP8_IN_BLOCKS}, ONE_GPU)) == ""
    assert quantised_forms({**LARGE, "model_type": "unknown"}) == ()


def test_expert_ranks_are_looked_at_unless_there_are_to_be_none() -> None:
    mixture = config_of(
        "qwen3_moe", 94, 4096, 12288, (64, 4), 151936, max_position_embeddings=8192,
        num_experts=128, num_experts_per_tok=8, moe_intermediate_size=1536, head_dim=128,
    )  # fmt: skip
    said = remark(planned(mixture, ONE_GPU))
    assert "on GPUs and sockets (GPU, experts on 2 sockets)" in said
    assert "for experts" not in remark(planned(mixture, ONE_GPU, experts=ExpertsConfig(ranks=0)))


def test_layers_of_ones_own_are_compared_with_what_would_be_chosen() -> None:
    own = planned(LARGE, ONE_GPU, layout=[["cpu"], ["gpu"]], layers=[50, 30])
    assert "fits on the GPUs alone (GPU)" in remark(own)


def test_a_model_that_does_not_fit_at_all_is_told_what_would() -> None:
    small = {"gpus": {"part": "L40S"}, "sockets": {**XEON, "memory_gib": 96}}
    with pytest.raises(DoesNotFitError) as error:
        planned(LARGE, small)
    *_, last = str(error.value).splitlines()
    assert last.startswith(f"{START}with FP8 weights this model has 67.7 GiB, fits on GPUs and")
    assert "instead of" not in last
    with pytest.raises(DoesNotFitError) as error:
        planned(HUGE, {"gpus": {"part": "L40S"}})
    assert START not in str(error.value)


def test_the_command_says_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LARGE))
    topology = tmp_path / "cluster.yaml"
    topology.write_text(json.dumps({"nodes": [{"name": "a", **ONE_GPU}]}))
    app = typer.Typer()
    app.command()(plan_command)
    arguments = [str(tmp_path), "--topology", str(topology), "--json"]
    answer = json.loads(CliRunner().invoke(app, arguments).stdout)
    assert answer["notes"][0].startswith(f"{START}with 4-bit weights")
    answer = json.loads(CliRunner().invoke(app, [*arguments, "-pp", "2"]).stdout)
    assert answer["notes"][0].startswith(START)

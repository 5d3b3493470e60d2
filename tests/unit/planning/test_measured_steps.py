"""Predicted decode steps of CPU ranks beside measured ones, from the raw files."""

from __future__ import annotations

import json
import re
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from plan_cases import config_of, request_for

from placement.cluster.assignment import Node
from placement.model.reading import shape_from_config
from placement.plan.described import described
from placement.plan.step_time import Step
from ray_hetero.config import HeteroConfig
from ray_hetero.planning.engine_facts import EngineFacts
from ray_hetero.planning.layer_plan import plan_layers
from ray_hetero.planning.planned_layers import LayerPlan

MODELS = Path(__file__).parents[1] / "data" / "models"
PUBLISHED = Path(__file__).parents[3] / "configs/models"
RESULTS = Path(__file__).parents[3] / "benchmarks/results"
STORED: dict[str, dict[str, Any]] = {
    "": {},
    " fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    " w4a16": {"quant_method": "gptq", "bits": 4, "group_size": 128},
}
HALVES = [
    ("2026-11-22-h100-decode-step-half", ""),
    ("2026-11-22-two-h200-half", ""),
    ("2026-11-23-h200-14-cores-half", ""),
    ("2026-11-23-half", ""),
    *((f"2026-11-26-{name}-formats", stored)
      for name in ("h100-one-card", "h100-rows", "h200") for stored in STORED),
]  # fmt: skip
"""Runs of half an 8B model whose socket computed all of its layers' columns; the first file of
formats had older kernels of these, and on the host of 2026-11-26-h200-rows-formats other work took
the memory's bandwidth."""
CLOSE = 0.25


def node(gpus: dict[str, Any] | None = None, **sockets: Any) -> tuple[Node, ...]:
    sets = ["avx512f", "avx512_bf16", *(["amx_bf16"] if sockets["cores"] > 2 else [])]
    given: dict[str, Any] = {"name": "a", "sockets": {"instruction_sets": sets, **sockets}}
    if sockets["cores"] > 2:
        given["gpus"] = gpus or {"part": "H100 SXM"}
    return described({"nodes": [given]}).as_nodes()


def planned(
    config: dict[str, Any], nodes: tuple[Node, ...], read: float, users: int, context: int,
    stages: int = 1, *, share: float = 0.9, **given: Any,
) -> LayerPlan:  # fmt: skip
    """The plan of a model for users on sockets that read so many bytes a second."""
    shape = shape_from_config(config)
    layers = len(shape.layers)
    facts = EngineFacts(shape, "", layers, context, 16, 2048, share, is_bf16=True)
    keys = {"workload": {"users": users, "context": context}} | given
    return plan_layers(
        request_for(
            HeteroConfig.model_validate(keys), nodes, facts, stages, 1,
            measure=lambda seats, threads: {seat.rank: read for seat in seats if seat.socket},
        )
    )  # fmt: skip


def cpu_step(found: LayerPlan) -> Step:
    """The CPU stage's part of a decode step."""
    assert found.split is not None
    return found.split.stages[found.world.layout.stages.index(("cpu",))].decode


@pytest.mark.parametrize(("name", "stored"), HALVES, ids=lambda value: value or "bf16")
def test_half_of_an_8b_model_is_predicted(name: str, stored: str) -> None:
    raw = json.loads((RESULTS / "gpu-host" / f"{name}.json").read_text())
    run = raw["contenders"][f"ray_hetero cpu-gpu{stored or (' bf16' if 'formats' in name else '')}"]
    point = next(p for p in run["points"] if (p["batch"], p["prompt"]) == (1, 128))
    measured = point["decode_ms"] * point["ranks"][0]["busy_share"]
    read = statistics.median(one["socket"] for one in run["bandwidths"] if one.get("socket"))
    nodes = node(cores=raw["cores"], memory_gib=126, read_gb_s=1, bf16_tflop_s=8)
    config = config_of("llama", 32, 4096, 14336, (32, 8), 128256)
    config |= {"quantization_config": STORED[stored]} if stored else {}
    found = planned(config, nodes, read, 1, 144, 2, layers=[16, 16])
    assert 1e3 * cpu_step(found).seconds == pytest.approx(measured, rel=CLOSE)


@pytest.mark.parametrize("users", [1, 4])
def test_a_small_model_on_two_cores_is_predicted(users: int) -> None:
    text = (RESULTS / "cpu-host/2026-11-30-first-answer.txt").read_text()
    (measured,) = re.findall(rf"^ +{users} +([0-9.]+) ms +[0-9.]+ ", text, re.M)
    smollm2 = config_of("llama", 30, 576, 1536, (9, 3), 49152, tie_word_embeddings=True)
    nodes = node(cores=2, memory_gib=24, read_gb_s=1, bf16_tflop_s=0.3)
    # These answers were greedy, and nothing was drawn.
    step = replace(cpu_step(planned(smollm2, nodes, 61e9, users, 320)), sampling=0)
    assert 1e3 * step.seconds == pytest.approx(float(measured), rel=CLOSE)


@pytest.mark.parametrize("run", [0, 1], ids=["vLLM 0.32", "vLLM 0.33"])
@pytest.mark.parametrize("users", [1, 8])
def test_experts_in_mxfp4_on_16_cores_are_predicted(run: int, users: int) -> None:
    text = (RESULTS / "gpu-host/2026-11-30-h200-one-flag.txt").read_text()
    line = re.findall(r"^gpt-oss: .*$", text, re.M)[run]
    (measured,) = re.findall(rf"; {users} users: ([0-9.]+) ms", line)
    (read,) = re.findall(r"cores read ([0-9.]+) GB/s", line)
    config = json.loads((MODELS / "gpt-oss-120b.json").read_text())
    config |= {"num_hidden_layers": 18, "layer_types": config["layer_types"][:18]}
    gpus = {"part": "H200", "read_gb_s": 4230, "host_link_gb_s": 55.4}
    nodes = node(cores=16, gpus=gpus, memory_gib=126, read_gb_s=1, bf16_tflop_s=8)
    found = planned(
        config, nodes, 1e9 * float(read), users, 272, share=20 / 139,
        layout=[["gpu"]], experts={"ranks": 1, "layers": 10},
    )  # fmt: skip
    assert found.split is not None
    assert float(measured) == pytest.approx(1e3 * found.split.step_s, rel=CLOSE)


@pytest.mark.parametrize("users", [1, 8])
def test_experts_in_bf16_on_24_cores_are_predicted(users: int) -> None:
    raw = json.loads((RESULTS / "gpu-host/2026-11-26-h200-experts16.json").read_text())
    run = raw["contenders"]["ray_hetero experts"]
    point = next(p for p in run["points"] if (p["batch"], p["prompt"]) == (users, 128))
    read = statistics.median(one["socket"] for one in run["bandwidths"])
    config = json.loads((PUBLISHED / "qwen3-30b-a3b.json").read_text())
    gpus = {"part": "H200", "read_gb_s": 4230, "host_link_gb_s": 55.4}
    nodes = node(cores=24, gpus=gpus, memory_gib=126, read_gb_s=1, bf16_tflop_s=8)
    found = planned(
        config | {"num_hidden_layers": 16}, nodes, read, users, 144,
        layout=[["gpu"]], experts={"ranks": 1, "layers": 8},
    )  # fmt: skip
    assert found.split is not None
    assert point["decode_ms"] == pytest.approx(1e3 * found.split.step_s, rel=CLOSE)

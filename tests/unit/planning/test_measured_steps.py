"""Predicted decode steps of CPU ranks beside measured ones, from the raw files."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

import pytest
from plan_cases import config_of, request_for

from placement.cluster.assignment import Node
from placement.model.reading import shape_from_config
from placement.plan.described import described
from ray_hetero.config import HeteroConfig
from ray_hetero.planning.engine_facts import EngineFacts
from ray_hetero.planning.layer_plan import plan_layers

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


def node(**sockets: Any) -> tuple[Node, ...]:
    sets = ["avx512f", "avx512_bf16", *(["amx_bf16"] if sockets["cores"] > 2 else [])]
    given: dict[str, Any] = {"name": "a", "sockets": {"instruction_sets": sets, **sockets}}
    if sockets["cores"] > 2:
        given["gpus"] = {"part": "H100 SXM"}
    return described({"nodes": [given]}).as_nodes()


def step_ms(
    config: dict[str, Any], nodes: tuple[Node, ...], read: float, users: int, context: int
) -> float:
    """Predicted milliseconds of the CPU stage in a decode step."""
    shape = shape_from_config(config)
    layers = len(shape.layers)
    facts = EngineFacts(shape, "", layers, context, 16, 2048, 0.9, is_bf16=True)
    has_gpu = bool(nodes[0].host.gpus)
    work = {"users": users, "context": context}
    given = {"workload": work} | ({"layers": [layers // 2] * 2} if has_gpu else {})
    found = plan_layers(
        request_for(
            HeteroConfig.model_validate(given), nodes, facts, 1 + has_gpu, 1,
            measure=lambda seats, threads: {seat.rank: read for seat in seats if seat.socket},
        )
    )  # fmt: skip
    assert found.split is not None
    return 1e3 * found.split.stages[found.world.layout.stages.index(("cpu",))].decode.seconds


@pytest.mark.parametrize(("name", "stored"), HALVES, ids=lambda value: value or "bf16")
def test_half_of_an_8b_model_is_predicted(name: str, stored: str) -> None:
    raw = json.loads((RESULTS / "gpu-host" / f"{name}.json").read_text())
    run = raw["contenders"][f"ray_hetero cpu-gpu{stored or (' bf16' if 'formats' in name else '')}"]
    point = next(p for p in run["points"] if (p["batch"], p["prompt"]) == (1, 128))
    measured = point["decode_ms"] * point["ranks"][0]["busy_share"]
    read = statistics.median(one["socket"] for one in run["bandwidths"] if one.get("socket"))
    nodes = node(cores=raw["cores"] - 2, memory_gib=126, read_gb_s=1, bf16_tflop_s=8)
    config = config_of("llama", 32, 4096, 14336, (32, 8), 128256)
    config |= {"quantization_config": STORED[stored]} if stored else {}
    assert step_ms(config, nodes, read, 1, 144) == pytest.approx(measured, rel=CLOSE)


@pytest.mark.parametrize(("users", "close"), [(1, CLOSE), (4, 0.4)])
def test_a_small_model_on_two_cores_is_predicted(users: int, close: float) -> None:
    # Of AVX512-BF16, further rows are counted for more than they take, and draws, where these
    # answers were greedy.
    text = (RESULTS / "cpu-host/2026-11-30-first-answer.txt").read_text()
    (measured,) = re.findall(rf"^ +{users} +([0-9.]+) ms +[0-9.]+ ", text, re.M)
    smollm2 = config_of("llama", 30, 576, 1536, (9, 3), 49152, tie_word_embeddings=True)
    nodes = node(cores=2, memory_gib=24, read_gb_s=1, bf16_tflop_s=0.3)
    assert step_ms(smollm2, nodes, 61e9, users, 320) == pytest.approx(float(measured), rel=close)

"""First tokens of prompts that a GPU computes for CPU stages: as predicted, as measured."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from plan_cases import config_of, request_for

from placement.model.reading import shape_from_config
from placement.plan.cost import fixed_step, layer_step, output_step, send_step
from placement.plan.described import described
from placement.plan.devices import Links, StageDevices
from placement.plan.passes import Pass, prefill_passes
from placement.plan.stage_plan import Split
from placement.plan.step_time import PICO, total_step
from ray_hetero.config import HeteroConfig
from ray_hetero.planning.engine_facts import EngineFacts
from ray_hetero.planning.layer_plan import plan_layers
from ray_hetero.planning.quantise_first import FP8_IN_BLOCKS, INTEGERS_OF_4_BITS

RESULTS = Path(__file__).parents[3] / "benchmarks/results/gpu-host"
CLOSE = 0.08
"""How far predictions of CPU stages may be from what was measured, relative to it."""
CLOSE_STREAMING = 0.15
"""The same of prefetching, which the figures of GPU and link were not chosen by."""
CODED = 0.20
"""The same of FP8 and 4 bits, of which one round was measured."""
LLAMA = config_of("llama", 32, 4096, 14336, (32, 8), 128256)
STEP_TOKENS = 8192
GPU = {"part": "H200"}
SOCKET: dict[str, Any] = {
    "part": "Xeon 8480+", "cores": 14, "read_gb_s": 143, "memory_gib": 120,
    "instruction_sets": ["amx_bf16", "avx512f"],
}  # fmt: skip


def split_of(
    layout: Sequence[Sequence[str]], *, context: int = 1024, model: Any = LLAMA, **cpu: Any
) -> Split:
    """Half of a model's layers on a CPU stage, on the machine that was measured."""
    shape = shape_from_config(model)
    facts = EngineFacts(shape, "", 32, 32768, 256, STEP_TOKENS, 0.92, is_bf16=True)
    sockets = len(layout[0])
    parts = {key: SOCKET[key] // sockets for key in ("cores", "read_gb_s", "memory_gib")}
    node = {"name": "a", "gpus": GPU, "sockets": {**SOCKET, **parts, "count": sockets}}
    config = HeteroConfig(
        layout=[list(stage) for stage in layout], layers=[16, 16], cpu=cpu,
        workload={"users": 1, "context": context},
    )  # fmt: skip
    nodes = described({"nodes": [node]}).as_nodes()
    rate = 1e9 * parts["read_gb_s"]
    found = plan_layers(
        request_for(
            config, nodes, facts, measure=lambda seats, _: {seat.rank: rate for seat in seats}
        )
    )
    assert found.split is not None
    return found.split


ONE = [["cpu"], ["gpu"]]
TWO = [["cpu", "cpu"], ["gpu"]]


def passes_of(requests: int, prompt: int) -> list[Pass]:
    """What vLLM computes until all of some requests that arrive one after the other are answered:
    the first one by itself, the others meanwhile gathered.
    """
    numbers = [1, requests - 1] if requests > 1 else [1]
    return [Pass(n * prompt, n, prompt // 2, n) for n in numbers]


def seconds(split: Split, run: Pass) -> float:
    shape, (first, last) = shape_from_config(LLAMA), [one.devices for one in split.stages]
    layers = (layer_step(shape, shape.layers[0], one, run, Links()) * 16 for one in (first, last))
    beside = (
        fixed_step(shape, first, run), fixed_step(shape, last, run),
        output_step(shape, last, run), send_step(shape, first, last, Links().boundary, run),
    )  # fmt: skip
    return total_step([*layers, *beside]).total / PICO


@cache
def result() -> Any:
    return json.loads((RESULTS / "2026-11-23-h200-14-cores-half.json").read_text())


def measured(contender: str) -> dict[tuple[int, int], float]:
    points = result()["contenders"][contender]["points"]
    return {(one["batch"], one["prompt"]): one["prefill_s"] for one in points}


@pytest.mark.parametrize("point", measured("ray_hetero cpu-gpu"))
def test_half_of_an_8b_model_as_measured(point: tuple[int, int]) -> None:
    split = split_of(ONE)
    predicted = sum(seconds(split, run) for run in passes_of(*point))
    assert predicted == pytest.approx(measured("ray_hetero cpu-gpu")[point], rel=CLOSE)


@pytest.mark.parametrize("tokens", [128, 1024, 8192])
def test_what_the_plan_says_of_a_prompt_as_measured(tokens: int) -> None:
    split = split_of(ONE, context=tokens)
    assert split.prefill_s == pytest.approx(measured("ray_hetero cpu-gpu")[1, tokens], rel=CLOSE)


@pytest.mark.parametrize("point", measured("vllm prefetch"))
def test_the_same_figures_give_what_prefetching_takes(point: tuple[int, int]) -> None:
    """All layers on the GPU, half of their weights over the link in 16 bits meanwhile."""
    shape, gpu = shape_from_config(LLAMA), split_of(ONE).stages[1].devices
    link, planned = result()["gpu"]["link_bytes_per_s"], gpu.ranks[0].figures.host_link
    assert planned == pytest.approx(link, rel=0.05)
    over_link = sum(layer.nbytes for layer in shape.layers[:16]) / link
    predicted = 0.0
    for run in passes_of(*point):
        layer = layer_step(shape, shape.layers[0], gpu, run, Links())
        predicted += max(over_link, 32 * layer.total / PICO) + fixed_step(shape, gpu, run).seconds
    assert predicted == pytest.approx(measured("vllm prefetch")[point], rel=CLOSE_STREAMING)


@pytest.mark.parametrize(
    ("form", "scheme"), [("fp8", FP8_IN_BLOCKS), ("w4a16", INTEGERS_OF_4_BITS)]
)
def test_codes_are_expanded_on_the_gpu(form: str, scheme: Any) -> None:
    split = split_of(ONE, context=128, model={**LLAMA, "quantization_config": dict(scheme)})
    found = measured(f"ray_hetero cpu-gpu {form}")[1, 128]
    assert split.prefill_s == pytest.approx(found, rel=CODED)


def test_ranks_of_a_group_take_as_long_as_one() -> None:
    one, two = (split_of(layout, context=8192) for layout in (ONE, TWO))
    assert two.stages[0].devices.size == 2
    assert two.prefill_s == pytest.approx(one.prefill_s, rel=0.01)
    # Where each has its own linear layers computed, as if the cores computed all.
    apart = split_of(TWO, context=8192, fuse_layers=False)
    assert apart.stages[0].devices.prompt_gpu is None
    assert apart.prefill_s > 4 * two.prefill_s


def test_short_prompts_are_the_cores() -> None:
    on_gpu, alone = (split_of(ONE, context=64, prefill_on_gpu=one) for one in ("auto", False))
    assert on_gpu.stages[0].devices.prompt_gpu is not None
    assert alone.stages[0].devices.prompt_gpu is None
    assert on_gpu.prefill_s == alone.prefill_s
    later = split_of(ONE, context=1000, prefill_on_gpu_tokens=1001)
    assert later.prefill_s == split_of(ONE, context=1000, prefill_on_gpu=False).prefill_s


def test_weights_cross_the_link_once_a_chunk_and_earlier_keys_and_values_too() -> None:
    split = split_of(ONE, context=20_000)
    (cpu, _) = split.stages
    shape, gpu = shape_from_config(LLAMA), cpu.devices.prompt_gpu
    assert gpu is not None
    assert gpu.figures.host_link is not None
    stored = 16 * sum(
        tensor.nbytes * (0.75 if tensor.is_16_bit_matrix else 1)
        for tensor in shape.layers[0].tensors
    )
    assert cpu.prefill.weights / PICO == pytest.approx(3 * stored / gpu.figures.host_link)
    # 8,192 tokens in the second chunk and 16,384 in the third, 4,096 bytes each in a layer.
    cached = 16 * 4096 * (8192 + 16384)
    assert cpu.prefill.kv / PICO == pytest.approx(cached / gpu.figures.host_link)
    # Decode steps are the cores' in any case.
    alone = split_of(ONE, context=20_000, prefill_on_gpu=False)
    assert split.step_s == alone.step_s
    assert split.prefill_s < alone.prefill_s / 4


def test_a_prompt_in_passes() -> None:
    assert prefill_passes(100, 256) == ((1, Pass(100, 1, 50, 1)),)
    assert prefill_passes(512, 256) == ((2, Pass(256, 1, 256, 1, 128)),)
    assert prefill_passes(600, 256) == (
        (2, Pass(256, 1, 256, 1, 128)), (1, Pass(88, 1, 556, 1, 512)),
    )  # fmt: skip
    # Every token looks at half of all on average, whatever the chunks.
    for chunk in (1, 7, 100, 512):
        pairs = sum(times * run.tokens * run.context for times, run in prefill_passes(700, chunk))
        assert pairs == pytest.approx(700 * 350, rel=0.01)


def test_only_a_gpu_of_the_same_node_is_lent() -> None:
    shape = shape_from_config(LLAMA)
    facts = EngineFacts(shape, "", 32, 4096, 256, 2048, 0.92, is_bf16=True)

    def with_prompt_gpu(nodes: Any, facts: EngineFacts = facts, **keys: Any) -> list[StageDevices]:
        config = HeteroConfig(layout=[["cpu"], ["gpu"]], **keys)
        found = plan_layers(request_for(config, described({"nodes": nodes}).as_nodes(), facts))
        assert found.split is not None
        return [one.devices for one in found.split.stages if one.devices.prompt_gpu is not None]

    beside = [{"name": "a", "gpus": GPU, "sockets": SOCKET}]
    assert len(with_prompt_gpu(beside)) == 1
    assert not with_prompt_gpu([{"name": "a", "gpus": GPU}, {"name": "b", "sockets": SOCKET}])
    assert not with_prompt_gpu(beside, cpu={"linear_kernel": "vllm"})
    assert not with_prompt_gpu(beside, replace(facts, is_bf16=False))
    windows = shape_from_config({**LLAMA, "model_type": "mistral", "sliding_window": 512})
    assert not with_prompt_gpu(beside, replace(facts, shape=windows))

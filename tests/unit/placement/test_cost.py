"""What a layer and a step cost beside their bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from plan_cases import LLAMA_8B, MIXTRAL_8X22B, device, split_of, stage

from placement.plan.cost import layer_step, output_step
from placement.plan.devices import DeviceFigures, Links, StageDevices
from placement.plan.memory import activation_bytes
from placement.plan.passes import decode_pass
from placement.plan.step_time import PICO
from placement.plan.workload import Workload

LAYER_BYTES = 2 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 4096 * 14336 + 2 * 4096)
DECODE = decode_pass(1, 1)


def with_figures(part: str, **changes: object) -> StageDevices:
    rank = device(part)
    return stage(replace(rank, figures=replace(rank.figures, **changes)))  # type: ignore[arg-type]


def seconds_of_a_layer(devices: StageDevices) -> float:
    return layer_step(LLAMA_8B, LLAMA_8B.layers[0], devices, DECODE, Links()).total / PICO


def reading(figures: DeviceFigures) -> float:
    """Seconds in which a device reads a layer; the KV cache of one token is nothing beside it."""
    return LAYER_BYTES / figures.read_bandwidth


def test_a_layers_latency_comes_on_top_of_its_reads() -> None:
    devices = with_figures("H100 SXM", layer_latency_s=0.2e-3)
    expected = reading(devices.ranks[0].figures) + 0.2e-3
    assert seconds_of_a_layer(devices) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(("latency_s", "is_longer"), [(0.31e-3, True), (0.1e-3, False)])
def test_kernels_that_are_launched_one_by_one_take_the_longer_of_both(
    latency_s: float, is_longer: bool
) -> None:
    devices = with_figures("H100 SXM", layer_latency_s=latency_s, is_launching=True)
    expected = latency_s if is_longer else reading(devices.ranks[0].figures)
    assert seconds_of_a_layer(devices) == pytest.approx(expected, rel=1e-3)


def test_a_steps_latency_comes_once_for_each_stage() -> None:
    plain = [stage(device("Xeon 8480+")), stage(device("H100 SXM"))]
    slow = [
        with_figures("Xeon 8480+", step_latency_s=0.5e-3),
        with_figures("H100 SXM", step_latency_s=1.5e-3),
    ]
    splits = [
        split_of(
            LLAMA_8B, stages, batch=1, context=512, max_sequences=1, layers=[8, 24], order="fixed"
        )
        for stages in (plain, slow)
    ]
    added = [s.decode.seconds - p.decode.seconds for p, s in zip(splits[0].stages, splits[1].stages,
                                                                 strict=True)]  # fmt: skip
    assert added == pytest.approx([0.5e-3, 1.5e-3])
    assert splits[1].stages[0].decode.parts()["fixed"] == pytest.approx(0.5e-3)


def test_experts_that_are_woken_are_read_as_they_are_held() -> None:
    layer = MIXTRAL_8X22B.layers[0]
    experts = sum(tensor.nbytes for tensor in layer.tensors if tensor.role == "expert")
    others = sum(t.nbytes for t in layer.tensors if t.role not in ("expert", "norm"))
    for tokens, awake in ((1, 1 / 4), (2, 1 - (3 / 4) ** 2)):
        devices = with_figures("Xeon 8480+", read_share=0.75)
        step = layer_step(MIXTRAL_8X22B, layer, devices, decode_pass(tokens, 1), Links())
        expected = 0.75 * (awake * experts + others) / devices.ranks[0].figures.read_bandwidth
        assert step.weights / PICO == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(("rate", "is_limit"), [(1e11, True), (1e13, False)])
def test_codes_take_what_their_cores_expand(rate: float, *, is_limit: bool) -> None:
    layer = LLAMA_8B.layers[0]
    codes = tuple(
        replace(tensor, elements=tensor.elements // 2, dtype_bytes=1, values=2)
        if tensor.values
        else tensor
        for tensor in layer.tensors
    )
    devices = with_figures("Xeon 8480+", expanded={4: rate, 8: 1.0})
    step = layer_step(LLAMA_8B, replace(layer, tensors=codes), devices, DECODE, Links())
    read = sum(t.nbytes for t in codes) / devices.ranks[0].figures.read_bandwidth
    expected = sum(t.weights for t in codes) / rate if is_limit else read
    assert step.weights / PICO == pytest.approx(expected, rel=1e-3)


def test_sampling_the_most_sequences_of_a_step_takes_memory_of_the_last_stage() -> None:
    few, many = (
        Workload(1, 4096, 1, 4096, max_batched_tokens=8192, max_num_seqs=count)
        for count in (16, 1024)
    )
    passing = activation_bytes(LLAMA_8B, 1, few, last=False)
    assert activation_bytes(LLAMA_8B, 1, few, last=True) == passing
    assert activation_bytes(LLAMA_8B, 1, many, last=False) == passing
    # Logits in bf16, and four times in float32.
    expected = 1024 * LLAMA_8B.vocab_size * 18
    assert activation_bytes(LLAMA_8B, 1, many, last=True) == expected > passing


def test_a_socket_draws_one_token_after_the_other_and_a_gpu_at_once() -> None:
    def sampling(part: str, sequences: int) -> float:
        devices, run = stage(device(part)), decode_pass(sequences, 1)
        return output_step(LLAMA_8B, devices, run).sampling / PICO

    one = LLAMA_8B.vocab_size * 8e-9
    assert sampling("Xeon 8480+", 1) == pytest.approx(one)
    assert sampling("Xeon 8480+", 32) == pytest.approx(32 * one)
    assert sampling("H100 SXM", 32) == 0

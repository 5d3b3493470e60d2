"""CPU ranks with vLLM's V2 model runner give the greedy tokens of stock vLLM."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from any_request import any_request
from engines import (
    IN_THIS_PROCESS,
    REFUSED,
    TOTALS,
    Json,
    Model,
    Stock,
    batch,
    compared_until_near_ties,
    engine,
    hetero,
    metrics,
    prompts,
    run_engines,
    tokens,
)
from leftovers import Scene

from ray_hetero.kernels.linear import streaming_linear

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.mark.parametrize(("pipeline", "tensor"), [(1, 2), (2, 1)])
def test_tokens_are_those_of_stock_vllm(
    pipeline: int, tensor: int, scene: Scene, logs: Path, model: Model, stock: Stock
) -> None:
    cpu = {"ranks_per_socket": 2, "model_runner": "v2", "linear_kernel": "vllm"}
    arguments = engine(model("llama", "f32"), pipeline, tensor, dtype="float32", **hetero(cpu=cpu))
    batches = [REFUSED, batch(prompts()), batch(prompts(), logprobs=1)]
    (answers,) = run_engines(
        scene, logs / f"{pipeline}x{tensor}", [(arguments, batches)], extra=IN_THIS_PROCESS
    )
    refused, plain, with_logprobs = answers
    assert refused == [{"requests": 0}] * 3
    assert tokens(plain) == tokens(with_logprobs) == stock("llama-f32")
    for answer in with_logprobs:
        for token, values in zip(answer["tokens"][0], answer["logprobs"][0], strict=True):
            assert max(values, key=values.__getitem__) == str(token)


PENALISED: Json = {
    "repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2, "min_tokens": 3,
    "stop_token_ids": list(range(8, 640, 9)), "ignore_eos": False, "max_tokens": 48,
}  # fmt: skip
SEEDED: Json = {"temperature": 0.8, "top_p": 0.9, "min_p": 0.01, "seed": 5}


def _greedy_requests(seed: int) -> Json:
    """Greedy requests with any other parameters, of which some are aborted."""
    draw = random.Random(seed)
    given = [any_request(draw) for _ in range(24)]
    for one in given:
        for name in ("seed", "top_p", "top_k", "min_p"):
            one["sampling"].pop(name, None)
        one["sampling"]["temperature"] = 0.0
        if draw.random() < 0.25:
            one["leave_after"] = draw.randrange(1, 12)
    return {"requests": given}


def test_requests_of_any_kind_are_answered_as_with_v1(
    scene: Scene, logs: Path, model: Model
) -> None:
    drawn = [_greedy_requests(seed) for seed in range(3)]
    asked = [
        batch(prompts(), **PENALISED), batch(prompts(), prompt_logprobs=2, logprobs=3),
        batch(prompts(), **SEEDED), batch(prompts(), **SEEDED),
        metrics("vllm:num_preemptions"), *drawn,
    ]  # fmt: skip
    runs = []
    for runner in ("v1", "v2"):
        cpu = {"ranks_per_socket": 2, "model_runner": runner}
        arguments = engine(
            model("llama", "f32"), 2, dtype="float32", disable_log_stats=False,
            max_num_batched_tokens=64, max_num_seqs=12, num_gpu_blocks_override=14,
            async_scheduling=False, **hetero(cpu=cpu, pipeline={"batches_in_flight": 2}),
        )  # fmt: skip
        runs.append((arguments, asked))
    v1, v2 = run_engines(scene, logs / "any", runs, extra=IN_THIS_PROCESS)
    assert tokens(v2[0]) == tokens(v1[0])
    assert len({len(one) for one in tokens(v2[0])}) > 3
    assert tokens(v2[1]) == tokens(v1[1])
    for ours, theirs in zip(v2[1], v1[1], strict=True):
        for name in ("logprobs", "prompt_logprobs"):
            assert _nearly(ours[name], theirs[name])
    # The numbers are others than with V1; a seed gives the same each time.
    assert tokens(v2[2]) == tokens(v2[3])
    assert tokens(v2[2]) != tokens(v1[2])
    for answers in (v1, v2):
        assert sum(entry["vllm:num_preemptions"] for entry in answers[4]) > 0
    for place, given in enumerate(drawn, start=5):
        for number, one in enumerate(given["requests"]):
            found, wanted = (answers[place][number]["tokens"][0] for answers in (v2, v1))
            length = min(len(found), len(wanted)) if "leave_after" in one else None
            assert found[:length] == wanted[:length], (number, one)


@pytest.mark.skipif(streaming_linear._native is None, reason="needs the native module")
@pytest.mark.parametrize(("pipeline", "tensor"), [(2, 1), (1, 2)])
def test_decode_steps_are_the_native_calls_of_v1(
    pipeline: int, tensor: int, scene: Scene, logs: Path, model: Model
) -> None:
    runs = []
    for runner in ("v1", "v2"):
        cpu = {"ranks_per_socket": 2, "linear_kernel": "streaming", "model_runner": runner}
        arguments = engine(
            model("llama", "bf16"), pipeline, tensor, dtype="bfloat16", **hetero(cpu=cpu)
        )
        runs.append((arguments, [batch(prompts(), logprobs=2), TOTALS]))
    v1, v2 = run_engines(scene, logs / f"native{pipeline}", runs, extra=IN_THIS_PROCESS)
    for ours, theirs in zip(v2[0], v1[0], strict=True):
        assert compared_until_near_ties(ours, theirs)
    for ours, theirs in zip(v2[1], v1[1], strict=True):
        assert ours["native_layer_tokens"] == theirs["native_layer_tokens"] > 0


def _nearly(ours: Any, theirs: Any) -> bool:
    """Whether logprobs are of the same tokens, and as large up to rounding."""
    if isinstance(ours, list):
        pairs = zip(ours, theirs, strict=True)
        return all(_nearly(one, other) for one, other in pairs)
    if ours is None or theirs is None:
        return ours is theirs
    return ours.keys() == theirs.keys() and all(
        value == pytest.approx(theirs[token], abs=1e-3) for token, value in ours.items()
    )

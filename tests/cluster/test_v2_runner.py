"""CPU ranks with vLLM's V2 model runner give the greedy tokens of stock vLLM."""

from __future__ import annotations

from pathlib import Path

import pytest
from engines import (
    IN_THIS_PROCESS,
    REFUSED,
    Model,
    Stock,
    batch,
    engine,
    hetero,
    prompts,
    run_engines,
    tokens,
)
from leftovers import Scene

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

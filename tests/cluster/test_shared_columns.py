"""The cores and a GPU, pretended, split the columns of every MLP in decode steps of an engine.

The cores are those of one CPU rank, or of two that share every layer.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from engines import Json, batch, engine, hetero, prompts, run_engines
from leftovers import Scene
from test_prompts_of_groups import RAY, differs

from ray_hetero.cli.demo.model import DemoShape, write_demo_model
from ray_hetero.kernels.linear import streaming_linear

pytestmark = [
    pytest.mark.skipif(streaming_linear._native is None, reason="needs the native module"),
    pytest.mark.timeout(1800),
    pytest.mark.slow,
]

PARTS = (0, 5, 16, 21)
"""Parts of all columns that the GPU has, of 16; of one CPU rank it has outputs too behind them."""
SHAPE = DemoShape(layers=4, hidden=1024)
"""Shape whose weights are large enough to be read by a GPU."""


@pytest.mark.parametrize("ranks", [1, 2])
def test_answers_are_those_of_the_cores_alone(
    ranks: int, scene: Scene, logs: Path, tmp_path: Path
) -> None:
    cpu = {
        "linear_kernel": "streaming", "prefill_on_gpu_tokens": 32, "decode_gpu_share": 0.5,
        "ranks_per_socket": ranks,
    }  # fmt: skip
    arguments = engine(
        write_demo_model(tmp_path / "model", shape=SHAPE, dtype="bf16"), dtype="bfloat16",
        max_num_batched_tokens=128, **hetero(layout=[["cpu"] * ranks, ["gpu"]], cpu=cpu),
    )  # fmt: skip
    # Prompts come between decode steps, and take the memory in which columns are expanded.
    alone = [batch([one], logprobs=2) for one in prompts(3)]
    asked = [*alone, batch(prompts(12), logprobs=2)]
    steps: list[Json] = [step for parts in PARTS for step in ({"columns": parts}, *asked)]
    steps += [{"columns": 0}, {"ahead": True}]
    environment = {"RAY_HETERO_PRETEND_GPU": "1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    (answers,) = run_engines(
        scene, logs / f"columns-{ranks}", [(arguments, steps)], ray=RAY, extra=environment
    )
    # No request is left: the first rank, which has the GPU, reads what a prompt needs.
    assert [one["ahead"] for one in answers.pop()] == [True] + [False] * ranks
    each = 1 + len(asked)
    *cpus, gpu = zip(*([one["layers"] for one in found] for found in answers[::each]), strict=True)
    assert len(cpus) == ranks
    assert not any(gpu)
    for layers in cpus:
        assert layers[0] == layers[1] == 0
        # As many steps with a few columns as with all, or one more or less: requests of a batch may
        # begin in one step or in two.
        assert layers[2] > 0
        for times, found in enumerate(layers[3:], 2):
            assert abs(found - times * layers[2]) <= (times - 1) * SHAPE.layers
    (_, *cores), *others = (answers[at : at + each] for at in range(0, each * len(PARTS), each))
    for _, *mine in others:
        for left, right in zip(cores, mine, strict=True):
            assert not differs(left, right)

"""One GPU, pretended, computes the prompts of a stage of several CPU ranks in whole layers."""

from __future__ import annotations

from pathlib import Path

import pytest
from engines import TOTALS, Json, Model, batch, engine, hetero, prompts, run_engines
from leftovers import Scene

from ray_hetero.kernels.linear import streaming_linear

pytestmark = [
    pytest.mark.skipif(streaming_linear._native is None, reason="needs the native module"),
    pytest.mark.timeout(1800),
    pytest.mark.slow,
]

LAYOUTS = {"first": [["cpu", "cpu"], ["gpu"]], "last": [["gpu"], ["cpu", "cpu"]]}
FROM_TOKENS = 32
STEP_TOKENS = {"first": 128, "last": 64}
"""Most of a step: as many as the cores decode in one call, so that both are measured, or fewer."""
RAY: Json = {
    "num_cpus": 2, "num_gpus": 1, "object_store_memory": 100 << 20, "include_dashboard": False
}  # fmt: skip
NEAR_TIE = 0.13
"""Of logprobs in bfloat16: a rounding may exchange tokens that are nearer to each other, by two of
its steps between 8 and 16, where the largest logits of these models are."""


def differs(left: list[Json], right: list[Json]) -> list[str]:
    """Where greedy tokens are others, but for where two are likely alike."""
    found = []
    for number, (one, other) in enumerate(zip(left, right, strict=True)):
        rows = zip(one["tokens"][0], other["tokens"][0], one["logprobs"][0], strict=True)
        for at, (mine, theirs, values) in enumerate(rows):
            if mine != theirs:
                first, second = sorted(values.values(), reverse=True)[:2]
                if first - second >= NEAR_TIE:
                    found.append(f"answer {number}, token {at}: {mine}, {theirs} of {values}")
                break
    return found


@pytest.mark.parametrize(
    ("name", "architecture"),
    # Granite scales what is looked up, in place.
    [*((name, "llama") for name in LAYOUTS), ("first", "granite")],
)
def test_tokens_are_those_of_the_cores(
    name: str, architecture: str, scene: Scene, logs: Path, model: Model
) -> None:
    def arguments(*, prefill_on_gpu: bool) -> Json:
        cpu = {
            "ranks_per_socket": 2, "linear_kernel": "streaming", "prefill_on_gpu": prefill_on_gpu,
            "prefill_on_gpu_tokens": FROM_TOKENS,
        }  # fmt: skip
        keys = hetero(layout=LAYOUTS[name], cpu=cpu)
        return engine(
            model(architecture), dtype="bfloat16", max_num_batched_tokens=STEP_TOKENS[name], **keys
        )

    # Together some decode beside chunks of others; alone each is by itself.
    alone = [batch([one], logprobs=2) for one in prompts(6)]
    asked = [*alone, batch(prompts(12), logprobs=2)]
    runs = [(arguments(prefill_on_gpu=on_gpu), [*asked, TOTALS]) for on_gpu in (False, True)]
    folder = logs / f"group-{name}-{architecture}"
    (*cores, neither), (*gpu, totals) = run_engines(
        scene, folder, runs, ray=RAY, extra={"RAY_HETERO_PRETEND_GPU": "1"}
    )
    assert all(not one["gpu_layer_tokens"] for one in neither)
    computed = [one["gpu_layer_tokens"] for one in totals if one["gpu_layer_tokens"]]
    assert len(computed) == 2
    assert computed[0] == computed[1]
    on_gpu = [one["prompts_steps"] for one in totals if one["gpu_layer_tokens"]]
    assert on_gpu[0] == on_gpu[1] > 0
    assert all(not one["prompts_steps"] and not one["many_requests_steps"] for one in neither)
    log = (folder / "log").read_text()
    assert log.count("in whole layers, their attention too, for all of the ranks") == 1
    for left, right in zip(cores, gpu, strict=True):
        assert not differs(left, right)

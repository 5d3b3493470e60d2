"""Requests with adapters beside requests without, in native calls: stock vLLM's tokens."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest
from engines import (
    IN_THIS_PROCESS,
    TOTALS,
    Json,
    Model,
    batch,
    engine,
    hetero,
    prompts,
    run_engines,
    tokens,
)
from leftovers import Scene
from lora_adapters import write_adapter
from test_tokens import NEARLY_EQUAL, differences, gap_where_different

from ray_hetero.cli.demo.model import DemoShape
from ray_hetero.kernels.linear import streaming_linear

pytestmark = [
    pytest.mark.timeout(2400),
    pytest.mark.slow,
    pytest.mark.skipif(streaming_linear._native is None, reason="needs the native module"),
]
SHAPE = DemoShape()
RANKS = {1: 8, 2: 16, 3: 8}
"""Of the adapters, by number."""
COUNT = 9
"""Of prompts."""
START_SECONDS = 500.0
GROUPS = {"pipeline": (2, 1), "group": (1, 2)}
DRAFTS = {
    "speculative_config": {
        "method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3,
        "prompt_lookup_min": 1,
    }
}  # fmt: skip


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    folder = tmp_path_factory.mktemp("adapters")
    # Larger ones drown what makes one token of the demo model much likelier than the others.
    return {
        number: str(
            write_adapter(folder / f"adapter-{number}", SHAPE, rank=rank, seed=number, scale=0.05)
        )
        for number, rank in RANKS.items()
    }


def _batches(adapters: dict[int, str]) -> list[Json]:
    """Two adapters and none; then a third, whose matrices come in the place of another's; none."""
    given = batch(prompts(COUNT), logprobs=2, max_tokens=16)

    def chosen(*numbers: int) -> Json:
        cycle = [adapters.get(numbers[place % len(numbers)]) for place in range(COUNT)]
        return given | {"adapters": cycle}

    return [chosen(1, 0, 2), chosen(3, 0), given]


@pytest.fixture(scope="module")
def stock(scene: Scene, logs: Path, model: Model, adapters: dict[int, str]) -> list[list[Json]]:
    # Tokens without an adapter get what is in the last slot there; here nothing ever is.
    arguments = engine(
        model("llama", "bf16"), dtype="bfloat16", enable_lora=True, max_loras=4, max_cpu_loras=4
    )
    runs = [(arguments, _batches(adapters))]
    (found,) = run_engines(
        scene, logs / "stock", runs, extra=IN_THIS_PROCESS, limit_s=START_SECONDS
    )
    return found


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("pipeline", {"max_num_batched_tokens": 64, "max_num_seqs": 16}),
        ("group", {"enforce_eager": False}),
        ("pipeline", DRAFTS),
    ],
    ids=["chunks in a pipeline", "compiled group", "drafts in a pipeline"],
)
def test_tokens_are_those_of_stock(
    name: str, arguments: Json, scene: Scene, tmp_path: Path, model: Model,
    adapters: dict[int, str], stock: list[list[Json]],
) -> None:  # fmt: skip
    pipeline, tensor = GROUPS[name]
    cpu = {"ranks_per_socket": 2, "linear_kernel": "streaming"}
    made = engine(
        model("llama", "bf16"), pipeline, tensor, dtype="bfloat16", enable_lora=True,
        max_loras=2, max_cpu_loras=2, **arguments, **hetero(cpu=cpu),
    )  # fmt: skip
    runs = [(made, [*_batches(adapters), TOTALS])]
    ((*ours, totals),) = run_engines(
        scene, tmp_path / "ours", runs, extra=IN_THIS_PROCESS, limit_s=START_SECONDS
    )
    log = (tmp_path / "ours/log").read_text()
    assert f"{4 // pipeline} layers are computed as one operator" in log
    assert "adapters of requests are added in the same call, up to 2 at once, of rank 16" in log
    for mine, theirs in zip(ours, stock, strict=True):
        found = [gap_where_different(*pair) for pair in zip(mine, theirs, strict=True)]
        gaps = [gap for gap in found if gap is not None]
        assert len(gaps) <= 2
        assert all(gap < NEARLY_EQUAL for gap in gaps)
        for pair in zip(mine, theirs, strict=True):
            assert statistics.fmean(differences(*pair)) < 0.1
    plain, mixed = tokens(ours[2]), tokens(ours[0])
    assert all((plain[at] == mixed[at]) == (at % 3 == 1) for at in range(len(plain)))
    assert all(_native(rank) for rank in totals)


def _native(rank: dict[str, Any]) -> bool:
    """Whether a rank has computed decode steps in native calls."""
    return bool(rank["native_layer_tokens"])

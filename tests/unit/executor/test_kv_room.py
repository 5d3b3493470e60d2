"""What is said of a rank whose memory has no room for one request's keys and values."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from worlds import world

from placement.units import GIB
from ray_hetero.executor.kv_room import shortages
from ray_hetero.planning.planned_layers import LayerPlan

PLAN = LayerPlan(replace(world("c", "g"), layers=(19, 13)), None)


class Spec:
    """A layer that keeps so many bytes for the longest request."""

    def __init__(self, nbytes: int) -> None:
        self._bytes = nbytes

    def max_memory_usage_bytes(self, vllm_config: Any) -> int:
        return self._bytes


def config(blocks: int | None = None) -> Any:
    return SimpleNamespace(
        cache_config=SimpleNamespace(num_gpu_blocks_override=blocks),
        scheduler_config=SimpleNamespace(max_num_seqs=1024, max_num_batched_tokens=8192),
        model_config=SimpleNamespace(max_model_len=65536),
    )


def specs(*layers: int, nbytes: int = GIB // 4) -> list[dict[str, Any]]:
    return [{str(i): Spec(nbytes) for i in range(count)} for count in layers]


def test_nothing_is_said_where_one_request_has_room() -> None:
    assert shortages([19 * GIB // 4, 13 * GIB // 4], specs(19, 13), PLAN, config()) == []


@pytest.mark.parametrize(
    ("room", "left", "layers"), [(2 * GIB, "2.00", "[24, 8]"), (-GIB, "0.00", "[31, 1]")]
)
def test_the_rank_and_its_layers_are_named(room: int, left: str, layers: str) -> None:
    (line,) = shortages([100 * GIB, room], specs(19, 13), PLAN, config())
    assert line.startswith(
        f"rank 1 (gpu, gpu 0, node a) has {left} GiB left for its KV cache, and one request of "
        "65536 tokens takes 3.25 GiB in its 13 layers."
    )
    assert f'"layers": {layers}' in line
    assert "in place of [19, 13]" in line
    assert "--max-num-seqs (1024)" in line
    assert "--gpu-memory-utilization" in line


def test_a_socket_is_not_told_of_the_gpus_share() -> None:
    (line,) = shortages([GIB, 100 * GIB], specs(19, 13), PLAN, config())
    assert line.startswith("rank 0 (cpu, ")
    assert "--gpu-memory-utilization" not in line
    assert '"layers": [4, 28]' in line


def test_a_number_of_blocks_that_was_asked_for_is_the_users() -> None:
    assert shortages([0, 0], specs(19, 13), PLAN, config(blocks=4)) == []


def test_one_stage_has_no_other_one() -> None:
    plan = LayerPlan(replace(world("g"), layers=(32,)), None)
    (line,) = shortages([0], specs(32), plan, config())
    assert "fewer layers" not in line

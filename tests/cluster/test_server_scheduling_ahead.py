"""`vllm serve` over a CPU rank and a pretended GPU, whose steps are scheduled ahead, answers as
stock `vllm serve` does.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from engines import Model, hetero, serve, wait_until_healthy
from leftovers import Scene
from server_checks import (  # noqa: F401
    OPTIONS,
    Pair,
    stop,
    test_64_at_once,
    test_a_client_that_leaves_in_the_middle,
    test_a_streamed_chat_is_the_whole_one,
    test_chunked_prefill,
    test_logprobs,
    test_logprobs_of_the_prompt,
    test_prefix_caching,
    test_several_seeded_samples,
    test_stop_strings,
    test_structured_output,
)

pytestmark = pytest.mark.timeout(600)

AHEAD = "plan: each step is scheduled while the one before it is computed"


@pytest.fixture(scope="module")
def servers(scene: Scene, logs: Path, model: Model) -> Iterator[Pair]:
    checkpoint = model("llama", "f32")
    both = hetero(layout=[["cpu"], ["gpu"]])
    ours = serve(
        scene,
        logs / "ours",
        checkpoint,
        *OPTIONS,
        *("--distributed-executor-backend", "ray_hetero", "--pipeline-parallel-size", "2"),
        *("--additional-config", json.dumps(both["additional_config"])),
        extra={"RAY_HETERO_PRETEND_GPU": "1", "RAY_OVERRIDE_RESOURCES": '{"GPU": 1}'},
    )
    stock = serve(scene, logs / "stock", checkpoint, *OPTIONS)
    for server in (ours, stock):
        wait_until_healthy(server)
    yield Pair(ours, stock)
    stop(ours, stock)


def test_a_server_over_both_kinds_schedules_ahead(servers: Pair) -> None:
    assert AHEAD in servers.ours.child.log

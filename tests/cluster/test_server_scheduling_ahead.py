"""`vllm serve` over a CPU rank and a pretended GPU, whose steps are scheduled ahead, answers as
stock `vllm serve` does.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from engines import Model, backend
from leftovers import Scene
from server_checks import (  # noqa: F401
    Pair,
    beside_stock,
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

# The default run compares another server with stock, and engines that schedule ahead.
pytestmark = [pytest.mark.timeout(1800), pytest.mark.slow]

AHEAD = "plan: each step is scheduled while the one before it is computed"


@pytest.fixture(scope="module")
def servers(scene: Scene, logs: Path, model: Model) -> Iterator[Pair]:
    options = backend(2, layout=[["cpu"], ["gpu"]], cpu={"ranks_per_socket": 1})
    extra = {"RAY_HETERO_PRETEND_GPU": "1", "RAY_OVERRIDE_RESOURCES": '{"GPU": 1}'}
    with beside_stock(scene, logs, model("llama", "f32"), *options, extra=extra) as pair:
        yield pair


def test_a_server_over_both_kinds_schedules_ahead(servers: Pair) -> None:
    assert AHEAD in servers.ours.child.log

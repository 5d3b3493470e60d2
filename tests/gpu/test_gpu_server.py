"""`vllm serve` over a GPU and a CPU rank answers as stock `vllm serve` on the GPU alone does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from engines import Server, backend, serve, wait_until_healthy
from gpu_host import (
    IS_PRETENDED,
    SHARES,
    SLICES,
    Checkpoint,
    confined,
    environment,
    needs_gpus,
)
from leftovers import Scene
from server_checks import (  # noqa: F401
    OPTIONS,
    Pair,
    assert_placed,
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

pytestmark = [pytest.mark.gpu, needs_gpus(1)]

TOLERANCE = 0.02
WANTED = {
    "cpu → gpu": [["cpu"], ["gpu"]],
    "[gpu, cpu]": [["gpu", "cpu"]],
    "gpu → cpu": [["gpu"], ["cpu"]],
}
LAYOUTS = dict(list(WANTED.items())[: max(SLICES - 1, SHARES)])
"""All at the same time, beside stock vLLM, so no more than the host has cores for."""
SIZES = ("--gpu-memory-utilization", "0.1", "--kv-cache-memory-bytes", str(1 << 30))
"""Several servers share the GPU, so none may size itself by what is free."""


def _options(layout: list[list[str]]) -> list[str]:
    cpu = {"ranks_per_socket": SHARES}
    return backend(len(layout), len(layout[0]), layout=layout, cpu=cpu)


@dataclass(frozen=True)
class Servers:
    """All of them start at the same time."""

    stock: Server
    ours: dict[str, Server]


@pytest.fixture(scope="module")
def all_servers(scene: Scene, logs: Path, checkpoint: Checkpoint) -> Iterator[Servers]:
    def start(number: int, name: str, *more: str) -> Server:
        folder = checkpoint("llama", "float32")
        slices = len(LAYOUTS) + 1 if len(LAYOUTS) < SLICES else 1
        with confined(number % slices, slices):
            return serve(scene, logs / name, folder, *OPTIONS, *SIZES, *more, extra=environment())

    ours = [
        start(number, f"server{number}", *_options(layout))
        for number, layout in enumerate(LAYOUTS.values())
    ]
    stock = start(len(ours), "stock")
    yield Servers(stock, dict(zip(LAYOUTS, ours, strict=True)))
    stop(stock, *ours)


@pytest.fixture(scope="module", params=LAYOUTS)
def servers(request: pytest.FixtureRequest, all_servers: Servers) -> Pair:
    ours = all_servers.ours[request.param]
    for server in (ours, all_servers.stock):
        wait_until_healthy(server)
    return Pair(ours, all_servers.stock, TOLERANCE, is_same_kind=IS_PRETENDED)


def test_the_log_shows_the_six_steps_and_the_placement(servers: Pair) -> None:
    assert_placed(servers.ours.child.log)


def test_sigterm_ends_all_servers_and_leaves_nothing(all_servers: Servers, scene: Scene) -> None:
    # As stock ends, whatever its status is.
    assert len(stop(all_servers.stock, *all_servers.ours.values())) == 1
    scene.assert_clean()

"""`vllm serve` over a pipeline of two CPU ranks answers as stock `vllm serve` does."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from engines import NAME, STOP_SECONDS, Model, backend
from leftovers import Scene, wait_until
from quiet import noise
from server_checks import (  # noqa: F401
    Pair,
    assert_placed,
    beside_stock,
    complete,
    long,
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

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def servers(scene: Scene, logs: Path, model: Model) -> Iterator[Pair]:
    with beside_stock(scene, logs, model("llama", "f32"), *backend(2)) as pair:
        yield pair


def test_the_log_shows_the_six_steps_and_the_placement(servers: Pair) -> None:
    assert_placed(servers.ours.child.log, "[cpu] → [cpu]", "0-1 (2)", "2-3 (2)")


def steps_on_metrics(text: str) -> dict[str, float]:
    """Steps of each rank of a pipeline over the CPU, by stage, off a server's `/metrics`."""
    sample = r'^ray_hetero_rank_steps_total\{.*kind="cpu".*stage="(\d+)".*\} (\S+)$'
    return {stage: float(value) for stage, value in re.findall(sample, text, flags=re.M)}


def test_metrics_count_the_steps_of_every_rank(servers: Pair) -> None:
    with servers.ours.client() as client:
        client.completions.create(model=NAME, prompt="one two", max_tokens=4)

    def both_have_run() -> bool:
        steps = steps_on_metrics(servers.ours.get("/metrics").text)
        return set(steps) == {"0", "1"} and min(steps.values()) >= 4

    assert wait_until(both_have_run, STOP_SECONDS), servers.ours.get("/metrics").text


def test_sockets_of_ranks_have_no_names_left(servers: Pair, scene: Scene) -> None:
    pids = re.findall(r"started rank \d+ .*, pid (\d+)$", servers.ours.child.log, flags=re.M)
    assert len(pids) == 2
    for pid in map(int, pids):
        sockets = [
            Path(connection.laddr)
            for connection in psutil.Process(pid).net_connections("unix")
            if connection.laddr.startswith(f"{scene.temporary}/")
        ]
        # The queue of its answers has two; nobody could remove their names after kill -9.
        assert len(sockets) >= 2
        assert not any(socket.exists() for socket in sockets)


REQUESTS, AT_ONCE = 500, 64


def _answered(text: str) -> float:
    sample = r"^vllm:request_success_total\{.*\} (\S+)$"
    return sum(map(float, re.findall(sample, text, flags=re.M)))


@pytest.mark.slow
def test_500_requests_are_answered_once_each_as_by_stock(servers: Pair) -> None:
    chance = random.Random(5)
    requests = [
        {"prompt": [*long(chance.randint(1, 150), seed=number + 1), number + 8],
         "max_tokens": chance.randint(1, 24), "extra_body": {"ignore_eos": True}}
        for number in range(REQUESTS)
    ]  # fmt: skip
    before = _answered(servers.ours.get("/metrics").text)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        ours = list(pool.map(lambda request: complete(servers.ours, **request), requests))
        stock = list(pool.map(lambda request: complete(servers.stock, **request), requests))
    assert len({answer.id for answer in ours}) == REQUESTS
    for request, mine, theirs in zip(requests, ours, stock, strict=True):
        assert mine.usage.prompt_tokens == len(request["prompt"])
        assert mine.usage.completion_tokens == request["max_tokens"]
        servers.assert_same(mine, theirs)

    def are_counted() -> bool:
        return _answered(servers.ours.get("/metrics").text) - before == REQUESTS

    assert wait_until(are_counted, STOP_SECONDS)


def test_sigterm_ends_the_server_as_normal_and_leaves_nothing(servers: Pair, scene: Scene) -> None:
    assert servers.ours.get("/health").status_code == 200
    assert stop(servers.ours, servers.stock) == {0}
    assert noise(servers.ours.child.log) == []
    scene.assert_clean()

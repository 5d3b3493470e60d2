"""`vllm serve` that verifies drafts answers as stock `vllm serve` does without them."""

from __future__ import annotations

import json
import random
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
from engines import STOP_SECONDS, Json, Model, Server, backend
from leftovers import AGENTS_GONE_SECONDS, Scene, wait_until
from server_checks import (  # noqa: F401
    CHUNK,
    Pair,
    ask,
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
    test_stop_strings,
    test_structured_output,
    texts,
)

pytestmark = [pytest.mark.timeout(1800), pytest.mark.slow]

DRAFTS = {
    "method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3
}  # fmt: skip
REQUESTS, AT_ONCE = 500, 16


@pytest.fixture(scope="module")
def servers(scene: Scene, logs: Path, model: Model) -> Iterator[Pair]:
    options = [*backend(2), "--speculative-config", json.dumps(DRAFTS)]
    with beside_stock(scene, logs, model("llama", "f32"), *options) as pair:
        yield pair


def test_seeded_samples_are_the_same_each_time(servers: Pair) -> None:
    prompt = long(CHUNK + 15, seed=9)
    request = {"prompt": prompt, "temperature": 0.9, "seed": 11, "max_tokens": 32}
    said = texts(complete(servers.ours, **request))
    assert texts(complete(servers.ours, **request)) == said
    assert texts(complete(servers.ours, **{**request, "seed": 12})) != said


def test_500_requests_of_16_clients_are_answered_as_by_stock(servers: Pair) -> None:
    chance = random.Random(6)
    requests = [
        {"prompt": long(chance.randint(1, 150), seed=number + 1),
         "max_tokens": chance.randint(1, 24), "extra_body": {"ignore_eos": True}}
        for number in range(REQUESTS)
    ]  # fmt: skip
    ours, stock = (answers(server, requests) for server in (servers.ours, servers.stock))
    assert len({answer.id for answer in ours}) == REQUESTS
    for request, mine, theirs in zip(requests, ours, stock, strict=True):
        assert mine.usage.completion_tokens == request["max_tokens"]
        servers.assert_same(mine, theirs)


def answers(server: Server, requests: list[Json]) -> list[Any]:
    """Answers of a server to clients that each ask one request after the other."""

    def of_client(number: int) -> list[Any]:
        # A new client reads all certificates: for every request that is most of the time.
        with server.client() as client:
            return [ask(client, **request) for request in requests[number::AT_ONCE]]

    with ThreadPoolExecutor(AT_ONCE) as pool:
        parts = list(pool.map(of_client, range(AT_ONCE)))
    return [parts[at % AT_ONCE][at // AT_ONCE] for at in range(len(requests))]


def test_metrics_and_log_tell_what_was_accepted(servers: Pair) -> None:
    text = servers.ours.get("/metrics").text
    drafted, accepted = (
        float(found)
        for name in ("draft", "accepted")
        for found in re.findall(rf"^vllm:spec_decode_num_{name}_tokens_total\S* (\S+)$", text, re.M)
    )
    assert drafted > accepted > 0
    assert wait_until(lambda: "SpecDecoding metrics" in servers.ours.child.log, 30)
    of_rank = r"cpu rank [01]: .*; \d+ of them verified drafts: \d+\.\d tokens, \d+\.\d+ ms busy"
    assert wait_until(lambda: re.search(of_rank, servers.ours.child.log) is not None, 60)


def test_a_rank_that_is_killed_while_it_verifies(servers: Pair, scene: Scene) -> None:
    stop(servers.stock)
    (pid,) = re.findall(r"started rank 1 .*, pid (\d+)$", servers.ours.child.log, flags=re.M)
    with ThreadPoolExecutor(4) as pool:
        asked = [
            pool.submit(complete, servers.ours, prompt=long(100, seed=seed), max_tokens=900,
                        extra_body={"ignore_eos": True})
            for seed in range(4)
        ]  # fmt: skip
        assert wait_until(lambda: servers.ours.running == 4, 30)
        psutil.Process(int(pid)).send_signal(signal.SIGKILL)
        assert servers.ours.child.wait(STOP_SECONDS) == 1
        for one in asked:
            assert isinstance(one.exception(STOP_SECONDS), openai.APIError)
    last = servers.ours.child.log.splitlines()[-1]
    assert "rank 1 (cpu, socket 1" in last
    assert "SIGKILL" in last
    scene.assert_clean(AGENTS_GONE_SECONDS)

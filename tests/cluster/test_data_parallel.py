"""Engines that start at the same time: each has sockets of its own, and all answer."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
from engines import (
    NAME,
    STOP_SECONDS,
    Model,
    Stock,
    backend,
    prompts,
    serve,
    tokens_of_engine,
    wait_until_healthy,
)
from leftovers import Scene

from placement.cluster.claims import held

pytestmark = [pytest.mark.timeout(1800), pytest.mark.slow]

FLOAT32 = ("--dtype", "float32")


def test_engines_of_one_server_share_the_machine_and_nothing_on_it(
    scene: Scene, logs: Path, model: Model, stock: Stock
) -> None:
    options = [*FLOAT32, *backend(1, cpu={"ranks_per_socket": 2}), "--data-parallel-size", "2"]
    server = serve(scene, logs / "server", model("llama", "f32"), *options)
    wait_until_healthy(server)
    claims = held(scene.claims)
    assert len(claims) == len({claim.owner for claim in claims}) == 2
    assert not set(claims[0].cpus) & set(claims[1].cpus)
    with server.client() as client:
        for number in "01":
            assert tokens_of_engine(client, number) == stock("llama-f32")
    found = re.findall(
        r'^vllm:request_success_total\{engine="(\d)",.*\} (.*)$', server.get("/metrics").text, re.M
    )
    for number in "01":
        assert sum(float(count) for name, count in found if name == number) == len(prompts())
    server.child.signal(signal.SIGTERM)
    server.child.wait(STOP_SECONDS)
    scene.assert_clean()


def test_engines_that_know_nothing_of_each_other_do_not_race(
    scene: Scene, logs: Path, model: Model, stock: Stock
) -> None:
    # Each starts a Ray of its own; both plan with the same half of the socket first.  Without a
    # layout one of them might take both halves.
    options = [*FLOAT32, *backend(1, cpu={"ranks_per_socket": 2}, layout=[["cpu"]])]
    servers = [serve(scene, logs / name, model("llama", "f32"), *options) for name in "ab"]
    for server in servers:
        wait_until_healthy(server)
    claims = held(scene.claims)
    assert len({claim.owner for claim in claims}) == 2
    assert not set(claims[0].cpus) & set(claims[1].cpus)
    for server in servers:
        with server.client() as client:
            answer = client.completions.create(
                model=NAME, prompt=prompts(), temperature=0, max_tokens=24,
                extra_body={"ignore_eos": True, "return_token_ids": True},
            )  # fmt: skip
        assert [choice.token_ids for choice in answer.choices] == stock("llama-f32")
        server.child.signal(signal.SIGTERM)
    for server in servers:
        server.child.wait(STOP_SECONDS)
    scene.assert_clean()

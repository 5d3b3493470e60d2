"""Engines that start at the same time: each has sockets of its own, and all answer."""

from __future__ import annotations

import re
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from engines import (
    NAME,
    STOP_SECONDS,
    Model,
    Stock,
    backend,
    batch,
    engine,
    hetero,
    prompts,
    run_engines,
    serve,
    tokens,
    wait_until_healthy,
)
from leftovers import Scene

from placement.claims import held

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]


def test_engines_of_one_server_share_the_machine_and_nothing_on_it(
    scene: Scene, logs: Path, model: Model, stock: Stock
) -> None:
    options = [*backend(1, cpu={"ranks_per_socket": 2}), "--data-parallel-size", "2"]
    server = serve(scene, logs / "server", model("llama", "bf16"), *options)
    wait_until_healthy(server)
    claims = held(scene.claims)
    assert len(claims) == len({claim.owner for claim in claims}) == 2
    assert not set(claims[0].cpus) & set(claims[1].cpus)
    with server.client() as client:
        for number in "01":
            answer = client.completions.create(
                model=NAME, prompt=prompts(), temperature=0, max_tokens=24,
                extra_headers={"X-data-parallel-rank": number},
                extra_body={"ignore_eos": True, "return_token_ids": True},
            )  # fmt: skip
            assert [choice.token_ids for choice in answer.choices] == stock("llama-bf16")
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
    # Each starts a Ray of its own; both plan with the same half of the socket first.
    arguments = engine(
        model("llama", "bf16"), max_model_len=2048, **hetero(cpu={"ranks_per_socket": 2})
    )
    # The first must still be there when the second takes its socket.
    batches = [batch(prompts()), batch(prompts(8), max_tokens=1800)]

    def run(name: str) -> list[list[int]]:
        ((answers, _),) = run_engines(scene, logs / name, [(arguments, batches)])
        return tokens(answers)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(run, ("one", "other"))) == [stock("llama-bf16")] * 2
    seats = [
        re.findall(r"│ (socket \d)", (logs / name / "log").read_text()) for name in ("one", "other")
    ]
    assert {found[-1] for found in seats} == {"socket 0", "socket 1"}
    scene.assert_clean()

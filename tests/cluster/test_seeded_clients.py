"""64 seeded clients at once, whose prompts come in chunks, are answered as one after the other."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from engines import Model, Server, backend, serve, wait_until_healthy
from leftovers import Scene
from server_checks import ask, complete, long, stop, texts

pytestmark = [pytest.mark.timeout(1800), pytest.mark.slow]

CLIENTS, BUDGET = 64, 2048
OPTIONS = (
    "--dtype", "float32", "--max-model-len", "1024", "--max-num-batched-tokens", str(BUDGET),
    "--max-num-seqs", str(CLIENTS), "--block-size", "32", "--enable-prompt-tokens-details",
)  # fmt: skip
LAYOUTS = {"pipeline": (2, 1), "tensor parallel": (1, 2)}
"""Stages, and ranks of each, of CPUs."""


@pytest.fixture(scope="module", params=LAYOUTS)
def server(
    request: pytest.FixtureRequest, scene: Scene, logs: Path, model: Model
) -> Iterator[Server]:
    stages, ranks = LAYOUTS[request.param]
    chosen = backend(
        stages, ranks, layout=[["cpu"] * ranks] * stages, cpu={"ranks_per_socket": stages * ranks}
    )
    log = logs / request.param.replace(" ", "_")
    served = serve(scene, log, model("llama", "f32"), *OPTIONS, *chosen)
    wait_until_healthy(served)
    yield served
    assert stop(served) == {0}


def test_64_seeded_clients(server: Server) -> None:
    chance = random.Random(17)
    requests: list[dict[str, Any]] = [
        {"prompt": [*long(chance.randint(200, 700), seed=number + 1), number + 8],
         "temperature": chance.choice((0.5, 0.8, 1.2)), "top_p": chance.choice((0.9, 1.0)),
         "seed": chance.randint(0, 2**40), "extra_body": {"ignore_eos": True}}
        for number in range(CLIENTS)
    ]  # fmt: skip
    assert sum(len(request["prompt"]) for request in requests) > 8 * BUDGET
    with server.client() as client, ThreadPoolExecutor(CLIENTS) as pool:
        together = list(pool.map(lambda request: ask(client, **request), requests))
    alone = [complete(server, **request) for request in requests]
    assert [texts(answer) for answer in together] == [texts(answer) for answer in alone]
    assert len({texts(answer)[0] for answer in together}) > 3 * CLIENTS // 4
    greedy = [complete(server, **{**request, "temperature": 0}) for request in requests[:8]]
    assert [texts(answer) for answer in greedy] != [texts(answer) for answer in together[:8]]

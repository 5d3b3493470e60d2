"""A `vllm serve` whose processes can be found, killed and stopped, with clients at work."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
from engines import (
    NAME,
    START_SECONDS,
    STOP_SECONDS,
    Server,
    backend,
    prompts,
    serve,
    wait_until_healthy,
)
from faulty_rank import VARIABLE, site
from leftovers import Scene, wait_until

RANKS = 2
LONG = [(31 * at) % 600 + 8 for at in range(1900)]
"""A prompt of many steps."""
OPTIONS = ("--max-model-len", "2048", "--max-num-batched-tokens", "64")


@dataclass
class Client:
    """One request under way; its thread ends with an answer or an error."""

    server: Server
    request: dict[str, Any]
    again: bool = False
    """Whether it is made again once it is answered, until it fails: a fast host may have answered
    all requests before a fault comes."""
    text: str = ""
    error: openai.APIError | None = None
    thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._ask)
        self.thread.start()

    def _ask(self) -> None:
        try:
            with self.server.client().with_options(max_retries=0) as client:
                self._answer(client)
                while self.again:
                    self._answer(client)
        except openai.APIError as error:
            self.error = error

    def _answer(self, client: openai.OpenAI) -> None:
        answer = client.completions.create(model=NAME, temperature=0, **self.request)
        for chunk in answer if self.request.get("stream") else [answer]:
            self.text += chunk.choices[0].text


def ask(server: Server, **request: Any) -> str:
    """One answer; raises what the client raises."""
    client = Client(server, request)
    client.thread.join()
    if client.error is not None:
        raise client.error
    return client.text


def errors_of(clients: list[Client]) -> list[openai.APIError]:
    """Wait for all clients: each has an answer or an error, and asks no more.  The errors."""
    for client in clients:
        client.again = False
    for client in clients:
        client.thread.join(STOP_SECONDS)
        assert client.error or client.text
    return [client.error for client in clients if client.error]


class FaultyServer:
    """A server of two ranks, on CPUs unless `keys` say otherwise.

    Args:
        scene: where it runs.
        directory: for its log.
        model: checkpoint.
        fault: what `faulty_rank` makes a rank do; None for ranks that behave.
        within: a command that executes it.
        sizes: of pipeline and tensor parallelism.
        more: options of `vllm serve`.
        extra: environment.
        keys: configuration of the backend.

    """

    def __init__(
        self,
        scene: Scene,
        directory: Path,
        model: Path,
        fault: dict[str, Any] | None = None,
        within: Sequence[str] = (),
        sizes: tuple[int, int] = (RANKS, 1),
        more: Sequence[str] = (),
        extra: Mapping[str, str] | None = None,
        **keys: Any,
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.scene = scene
        self.held = directory / "held"
        extra = dict(extra or {})
        if fault is not None:
            path = [site(directory / "site"), os.environ.get("PYTHONPATH", "")]
            extra |= {
                VARIABLE: json.dumps({**fault, "file": str(self.held)}),
                "PYTHONPATH": os.pathsep.join(filter(None, path)),
            }
        options = (*OPTIONS, *backend(*sizes, **keys), *more)
        self.server = serve(scene, directory / "log", model, *options, extra=extra, within=within)

    @property
    def log(self) -> str:
        """Everything that it has written so far."""
        return self.server.child.log

    @property
    def pids(self) -> dict[int, int]:
        """The processes of the ranks that were started last."""
        found = re.findall(r"started rank (\d+) \(.*\), pid (\d+)$", self.log, re.M)
        return {int(rank): int(pid) for rank, pid in found}

    @property
    def engine(self) -> psutil.Process:
        """vLLM's engine process."""
        children = psutil.Process(self.server.child.process.pid).children()
        return next(child for child in children if "EngineCore" in " ".join(child.cmdline()))

    def wait_for(self, condition: Any) -> None:
        """Wait for something on the way up; fails the test when the server ends before."""
        ended = self.server.child.process.poll
        assert wait_until(lambda: condition() or ended() is not None, START_SECONDS, 0.05)
        assert ended() is None, self.server.child.tail()

    def wait_until_in(self, phase: str) -> list[Client]:
        """Bring it into a phase of its life; the clients that are at work then."""
        if phase == "loading":
            self.wait_for(lambda: len(self.pids) == RANKS)
            return []
        if phase == "warm-up":
            self.wait_for(self.held.exists)
            return []
        wait_until_healthy(self.server)
        if phase == "idle":
            return []
        if phase == "prefill":
            # Many prompts each, for many steps: without it all may be over before a signal comes.
            clients = [
                Client(
                    self.server,
                    {
                        "prompt": [[8 + 50 * number + at, *LONG] for at in range(50)],
                        "max_tokens": 2,
                    },
                )
                for number in range(4)
            ]
        else:
            clients = [
                Client(
                    self.server,
                    {"prompt": prompt, "max_tokens": 1500, "stream": bool(number % 2),
                     "extra_body": {"ignore_eos": True}},
                    again=True,
                )
                for number, prompt in enumerate(prompts(8))
            ]  # fmt: skip
        assert wait_until(lambda: self.server.running > 0, START_SECONDS, 0.1), (
            self.server.child.tail()
        )
        return clients

    def send(self, number: signal.Signals, rank: int) -> int:
        """Send a signal to a rank; its process id."""
        pid = self.pids[rank]
        os.kill(pid, number)
        return pid

    def last_line(self) -> str:
        """What a user sees last."""
        return [line for line in self.log.splitlines() if line.strip()][-1]

    def wait_for_new_ranks(self, old: dict[int, int]) -> None:
        """Wait until it serves with other ranks than these."""

        def is_back() -> bool:
            is_new = self.pids != old and not set(self.pids.values()) & set(old.values())
            return is_new and self.server.get("/health").status_code == 200

        self.wait_for(is_back)


def seconds_since(start: float) -> float:
    """For reports."""
    return round(time.monotonic() - start, 1)


def answers(server: FaultyServer) -> list[str]:
    """Answers to a few prompts."""
    return [ask(server.server, prompt=prompt, max_tokens=24) for prompt in prompts()[:6]]


def lives_through(
    server: FaultyServer, number: signal.Signals, rank: int, kind: str = "cpu"
) -> None:
    """Clients get an error that says why, others 503, until the server serves again."""
    old = server.pids
    clients = server.wait_until_in("decode")
    pid = server.send(number, rank)
    assert wait_until(lambda: server.server.get("/health").status_code == 503, STOP_SECONDS)
    with pytest.raises(openai.InternalServerError, match="please retry") as refused:
        ask(server.server, prompt=prompts()[3], max_tokens=4)
    assert refused.value.status_code == 503
    server.wait_for_new_ranks(old)
    # A client that came late is answered by the new ranks.
    errors = errors_of(clients)
    assert errors
    assert all("starts its ranks again" in one.message for one in errors)
    # Which rank, where and why is in the log; clients are not told.
    told = " ".join(one.message for one in (*errors, refused.value))
    assert not re.search(rf"pid|node|{pid}|socket", told)
    assert f"rank {rank} ({kind}" in server.log

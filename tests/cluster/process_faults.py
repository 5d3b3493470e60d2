"""Every process of an engine is stopped, and then killed: who notices, in which time, what is left.

A server lives through the stops, and through the end of its ranks where it may restart them; then
one of its other processes is killed, which ends it with a reason.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

import httpx
import psutil
from engines import STOP_SECONDS, prompts, wait_until_healthy
from faulty_server import FaultyServer, ask, errors_of
from leftovers import AGENTS_GONE_SECONDS, wait_until

HEARTBEAT_S = 4.0
STEP_S = 8.0
LIMITS = {
    "serving": {"step_timeout_s": STEP_S, "heartbeat_timeout_s": HEARTBEAT_S},
    "exchange": {"timeout_s": STEP_S},
}
"""Keys of the backend that make the waits short."""
RESTARTS = 2
OTHERS = ("engine", "api server", "keeper", "gcs_server", "raylet")
"""Processes of an engine that are no ranks."""
SERVES_ON = ("keeper", "gcs_server", "raylet")
"""Of these, those without which an engine serves for a while, until they are killed."""
STOPPED_S = HEARTBEAT_S + 3
NOTICED_S = 20.0
"""Longest time from the end of one of Ray's processes to that of the server."""
NAMES = {
    "gcs_server": "the head of this engine's Ray (gcs_server, pid {pid})",
    "raylet": "this engine's raylet (raylet, pid {pid})",
    "keeper": "the process that keeps this engine's Ray (ray_ahead, pid {pid})",
    "engine": "the engine's process, pid {pid}, was ended by SIGKILL",
}
"""How the last line begins that each of them leaves when it is killed."""


@dataclass(frozen=True)
class Fault:
    """What was done to one process, and what came of it."""

    process: str
    done: str
    seconds: float
    """From the signal to what is said."""
    seen: str

    def __str__(self) -> str:
        return f"{self.process:<10}  {self.done:<8}  {self.seconds:6.1f} s  {self.seen}"


def process_of(server: FaultyServer, name: str) -> psutil.Process:
    """One of `OTHERS`."""
    root = psutil.Process(server.server.child.process.pid)
    if name == "api server":
        return root
    if name == "engine":
        return server.engine
    for child in root.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            is_keeper = "ray_ahead.keep" in " ".join(child.cmdline())
            if child.name() == name or (is_keeper and name == "keeper"):
                return child
    raise AssertionError(f"no {name} below {root}")


def health(server: FaultyServer) -> int | None:
    """Status of /health; None where nobody answers."""
    with suppress(httpx.TransportError):
        return httpx.get(f"{server.server.url}/health", trust_env=False, timeout=2).status_code
    return None


def answers(server: FaultyServer) -> list[str]:
    """Greedy answers, in which a wrong token would be seen."""
    return [ask(server.server, prompt=prompt, max_tokens=16) for prompt in prompts()[:4]]


def took(condition: Callable[[], bool], limit_s: float, what: str) -> float:
    """Seconds until something is so."""
    began = time.monotonic()
    assert wait_until(condition, limit_s, 0.1), f"{what}: not within {limit_s:g} s"
    return time.monotonic() - began


def stops(server: FaultyServer, wanted: list[str]) -> Iterator[Fault]:
    """SIGSTOP and SIGCONT of everything that is no rank."""
    for name in OTHERS:
        process = process_of(server, name)
        process.send_signal(signal.SIGSTOP)
        try:
            if name in SERVES_ON:
                time.sleep(STOPPED_S)
                assert health(server) == 200, name
                assert answers(server) == wanted, name
                seconds, seen = STOPPED_S, "serves on"
            elif name == "engine":
                seconds = took(lambda: health(server) == 503, STOPPED_S, "/health")
                seen = "/health says 503"
                refused = httpx.post(
                    f"{server.server.url}/v1/completions",
                    json={"model": "demo", "prompt": [8], "max_tokens": 1},
                    trust_env=False, timeout=10,
                )  # fmt: skip
                assert (refused.status_code, "has not moved" in refused.text) == (503, True)
            else:
                seconds = took(lambda: health(server) is None, STOPPED_S, "/health")
                seen = "/health does not answer"
        finally:
            process.send_signal(signal.SIGCONT)
        yield Fault(name, "SIGSTOP", seconds, seen)
        back = took(lambda: health(server) == 200, 2 * STOPPED_S, f"/health after {name}")
        assert answers(server) == wanted, name
        yield Fault(name, "SIGCONT", back, "healthy, tokens as before")


def ends_of_ranks(server: FaultyServer, wanted: list[str]) -> Iterator[Fault]:
    """SIGKILL of one rank and SIGSTOP of the other; both are started again."""
    for rank, number in enumerate((signal.SIGKILL, signal.SIGSTOP)):
        old = server.pids
        clients = server.wait_until_in("decode")
        began = time.monotonic()
        server.send(number, rank)
        noticed = took(lambda: health(server) == 503, STEP_S + 10, f"/health, rank {rank}")
        yield Fault(f"rank {rank}", number.name, noticed, "/health says 503")
        server.wait_for_new_ranks(old)
        assert errors_of(clients)
        assert answers(server) == wanted
        seen = "started again, tokens as before"
        yield Fault(f"rank {rank}", number.name, time.monotonic() - began, seen)


def end(server: FaultyServer, name: str) -> Iterator[Fault]:
    """SIGKILL of one of `OTHERS`, while clients are answered; the server ends, and with it all."""
    clients = server.wait_until_in("decode")
    process = process_of(server, name)
    began = time.monotonic()
    process.kill()
    status = server.server.child.wait(STOP_SECONDS)
    seconds = time.monotonic() - began
    for client in clients:
        client.again = False
        client.thread.join(STOP_SECONDS)
    if name == "api server":
        assert status == -signal.SIGKILL
        yield Fault(name, "SIGKILL", seconds, "its end is the server's")
    else:
        said = f"ray_hetero: {NAMES[name].format(pid=process.pid)}"
        assert status == 1, (status, server.server.child.tail())
        assert server.last_line().startswith(said), (said, server.server.child.tail())
        assert seconds < NOTICED_S
        assert not re.search("starting the ranks again", server.log.rpartition(said)[0][-2000:])
        yield Fault(name, "SIGKILL", seconds, f"status 1: {server.last_line()}")
    left = took(lambda: not server.scene.leftovers(), AGENTS_GONE_SECONDS, "what is left")
    yield Fault(name, "SIGKILL", left, "nothing left: processes, /dev/shm, claims, TMPDIR")
    found = [path.name for path in server.scene.temporary.iterdir()]
    assert found == [], found


def all_faults(server: FaultyServer, last: str, *, lives: bool) -> Iterator[Fault]:
    """Everything that one server is for.

    Args:
        server: with `LIMITS`, and `RESTARTS` where it lives through the end of its ranks.
        last: which of `OTHERS` is killed in the end.
        lives: whether it is first made to live through the other faults.

    """
    wait_until_healthy(server.server)
    if lives:
        wanted = answers(server)
        yield from stops(server, wanted)
        yield from ends_of_ranks(server, wanted)
    yield from end(server, last)

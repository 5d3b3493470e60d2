"""With `max_restarts` an engine lives through the death of its ranks: 503, then correct tokens."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from engines import STOP_SECONDS, Model, wait_until_healthy
from faulty_server import FaultyServer, answers, errors_of, lives_through
from leftovers import Scene, segments

pytestmark = [pytest.mark.timeout(1800), pytest.mark.slow]


def test_kill_stop_and_the_end(scene: Scene, logs: Path, model: Model) -> None:
    server = FaultyServer(
        scene, logs / "restart", model("llama"), max_restarts=2, serving={"step_timeout_s": 8}
    )
    wait_until_healthy(server.server)
    wanted = answers(server)
    # In the prefix cache of ranks that will be gone.
    assert answers(server) == wanted
    lives_through(server, signal.SIGKILL, rank=0)
    assert answers(server) == wanted
    lives_through(server, signal.SIGSTOP, rank=1)
    assert answers(server) == wanted
    clients = server.wait_until_in("prefill")
    pid = server.send(signal.SIGKILL, rank=1)
    assert server.server.child.wait(STOP_SECONDS) == 1
    assert len(errors_of(clients)) == len(clients)
    assert server.last_line().startswith("ray_hetero: rank 1 (cpu, socket 1")
    assert f"pid {pid}, died" in server.last_line()
    scene.assert_clean()


DRAFTS = {
    "method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3
}  # fmt: skip
OTHERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "drafts": ("llama", "cpu", {"more": ("--speculative-config", json.dumps(DRAFTS))}),
    "experts on a socket": ("mixtral", "experts", {
        "sizes": (1, 1), "layout": [["gpu"]], "experts": {"ranks": 1},
        "extra": {"RAY_HETERO_PRETEND_GPU": "1", "RAY_OVERRIDE_RESOURCES": '{"GPU": 1}'},
    }),
}  # fmt: skip
"""Model, kind of rank 1 and arguments of servers that have more than CPU stages."""


@pytest.mark.parametrize("name", OTHERS)
def test_so_do_engines_with(name: str, scene: Scene, logs: Path, model: Model) -> None:
    architecture, kind, arguments = OTHERS[name]
    directory = logs / name.replace(" ", "-")
    server = FaultyServer(scene, directory, model(architecture), max_restarts=2, **arguments)
    wait_until_healthy(server.server)
    wanted = answers(server)
    for rank, killed in ((1, kind), (0, "cpu" if kind == "cpu" else "gpu")):
        lives_through(server, signal.SIGKILL, rank, killed)
        assert answers(server) == wanted
    server.server.child.signal(signal.SIGTERM)
    server.server.child.wait(STOP_SECONDS)
    scene.assert_clean()


GROWTH_MIB = 32
"""Of the engine's own memory over all kills, for what the allocator keeps."""
KILLS = int(os.environ.get("RAY_HETERO_TEST_KILLS", "20"))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_kills_in_a_row_leave_nothing_behind(scene: Scene, logs: Path, model: Model) -> None:
    server = FaultyServer(scene, logs / "many", model("llama"), max_restarts=KILLS)
    wait_until_healthy(server.server)
    wanted = answers(server)
    engine, sizes, memory = server.engine, [], []
    for kill in range(KILLS):
        lives_through(server, signal.SIGKILL, rank=kill % 2)
        assert answers(server) == wanted
        sizes.append((engine.num_fds(), engine.num_threads(), len(segments() - scene.before)))
        memory.append(engine.memory_full_info().uss >> 20)
    # The first one makes what later ones use again.  A thread more or less at one moment is no
    # growth; what every kill left behind would be there in all of the last ones.
    third = max(1, KILLS // 3)
    for column in zip(*sizes, strict=True):
        assert min(column[-third:]) <= max(column[1 : 1 + third]), sizes
    assert min(memory[-third:]) <= max(memory[1 : 1 + third]) + GROWTH_MIB, memory
    server.server.child.signal(signal.SIGTERM)
    server.server.child.wait(STOP_SECONDS)
    scene.assert_clean()

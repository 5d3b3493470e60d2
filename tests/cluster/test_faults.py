"""A rank that dies or hangs ends the engine: an error for each client, one line, nothing left.

Each fault ends its server, so they are for `make test-slow`; one server that lives through
several faults, and ends with one, is in test_restart.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import psutil
import pytest
from engines import (
    START_SECONDS,
    STOP_SECONDS,
    Model,
    backend,
    batch,
    engine,
    prompts,
    run_engines,
    start,
    vllm_command,
)
from faulty_rank import VARIABLE, site
from faulty_server import LONG, RANKS, Client, FaultyServer, ask, errors_of
from leftovers import AGENTS_GONE_SECONDS, Scene, wait_until

from ray_hetero.kernels.linear import streaming_linear

pytestmark = pytest.mark.timeout(1800)

RANKS_GONE_SECONDS = 20.0
HOLD_IN_WARM_UP = {"rank": 1, "step": 1, "do": "hold"}
LIMITS = {
    "serving": {"step_timeout_s": 8},
    "warmup": {"step_timeout_s": 8},
    "startup": {"load_timeout_s": 8},
}
KEYS = {
    "loading": "startup.load_timeout_s",
    "warm-up": "warmup.step_timeout_s",
    "idle": "serving.step_timeout_s",
    "prefill": "serving.step_timeout_s",
    "decode": "serving.step_timeout_s",
}


@pytest.mark.slow
def test_ranks_that_disagree_on_a_warm_up_step_are_an_error_with_both_steps(
    scene: Scene, logs: Path, model: Model, tmp_path: Path
) -> None:
    fault = '{"rank": 1, "step": 1, "do": "disagree"}'
    path = os.pathsep.join(filter(None, [site(tmp_path), os.environ.get("PYTHONPATH", "")]))
    broken = {**engine(model("llama"), RANKS), "fails": True}
    (failed,) = run_engines(
        scene, logs / "disagree", [(broken, [batch(prompts(1))])],
        extra={VARIABLE: fault, "PYTHONPATH": path},
    )  # fmt: skip
    assert failed[0]["left"] == []
    log = (logs / "disagree" / "log").read_text()
    assert "rank 1 (cpu, socket 1" in log
    assert "acknowledged step 2, expected step 1: dummy forward pass" in log
    scene.assert_clean()


@pytest.mark.slow
@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize("phase", KEYS)
def test_a_rank_that_is_killed(
    phase: str, rank: int, scene: Scene, logs: Path, model: Model
) -> None:
    hold = {**HOLD_IN_WARM_UP, "rank": 1 - rank} if phase == "warm-up" else None
    server = FaultyServer(scene, logs / f"kill-{phase}-{rank}", model("llama"), hold)
    clients = server.wait_until_in(phase)
    pid = server.send(signal.SIGKILL, rank)
    _check_end(server, clients)
    assert f"rank {rank} (cpu, socket {rank}" in server.last_line()
    assert f"pid {pid}" in server.last_line() or phase == "loading"
    assert "SIGKILL" in server.last_line()


# Before it loads, rank 0 opens the rendezvous, under another limit.
STOPPED = [(phase, at % RANKS) for at, phase in enumerate(KEYS, 1)]


@pytest.mark.slow
@pytest.mark.parametrize(("phase", "rank"), STOPPED)
def test_a_rank_that_is_stopped(
    phase: str, rank: int, scene: Scene, logs: Path, model: Model
) -> None:
    hold = {**HOLD_IN_WARM_UP, "rank": rank} if phase == "warm-up" else None
    # Loading takes longer than this limit; only where that is the one to be reached.
    limits = {key: value for key, value in LIMITS.items() if key in KEYS[phase]}
    server = FaultyServer(scene, logs / f"stop-{phase}-{rank}", model("llama"), hold, **limits)
    clients = server.wait_until_in(phase)
    pid = server.send(signal.SIGSTOP, rank)
    if phase == "idle":
        # Nobody waits for a rank of an idle engine.
        clients = [Client(server.server, {"prompt": prompts()[1], "max_tokens": 4})]
    _check_end(server, clients)
    assert f"({KEYS[phase]}" in server.last_line()
    assert f"rank {rank} (cpu, socket {rank}" in server.last_line()
    assert f"pid {pid}, is stopped by a signal (kill -CONT {pid}" in server.last_line()


@pytest.mark.slow
@pytest.mark.skipif(streaming_linear._native is None, reason="needs the native module")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_of_a_group_that_is_missing_inside_of_the_native_step(
    number: signal.Signals, scene: Scene, logs: Path, model: Model
) -> None:
    server = FaultyServer(
        scene,
        logs / f"native-{number.name}",
        model("llama"),
        {"rank": 1, "do": "vanish", "signal": int(number)},
        sizes=(1, RANKS),
        cpu={"ranks_per_socket": RANKS, "linear_kernel": "streaming"},
        # Longer than vLLM's own collectives take on the way up; the step's own limit is 300 s.
        exchange={"timeout_s": 30},
    )
    clients = server.wait_until_in("decode")
    assert "add up their products in shared memory" in server.log
    server.held.touch()
    _check_end(server, clients)
    assert "rank 1 (cpu, socket 1" in server.last_line()
    if number == signal.SIGKILL:
        assert "SIGKILL" in server.last_line()
        return
    late = "rank 1, of the same tensor-parallel group, was not there in 30 s (exchange.timeout_s)"
    assert late in server.last_line()
    assert f"pid {server.pids[1]}, is stopped by a signal" in server.last_line()


def _check_end(server: FaultyServer, clients: list[Client]) -> None:
    status = server.server.child.wait(STOP_SECONDS)
    assert errors_of(clients) or clients == []
    assert status not in (0, -signal.SIGKILL), server.server.child.tail()
    assert server.last_line().startswith("ray_hetero: "), server.server.child.tail()
    server.scene.assert_clean()


@pytest.mark.slow
@pytest.mark.parametrize("who", ["api server", "engine"])
def test_a_driver_that_is_killed_leaves_nothing(
    who: str, scene: Scene, logs: Path, model: Model
) -> None:
    server = FaultyServer(scene, logs / f"kill-{who[:3]}", model("llama"))
    clients = server.wait_until_in("decode")
    ranks = [psutil.Process(pid) for pid in server.pids.values()]
    (server.server.child.process if who == "api server" else server.engine).kill()
    status = server.server.child.wait(STOP_SECONDS)
    for client in clients:
        client.thread.join(STOP_SECONDS)
    assert wait_until(lambda: not any(rank.is_running() for rank in ranks), RANKS_GONE_SECONDS)
    if who == "engine":
        assert status == 1
        assert "was ended by SIGKILL. If nobody did that, memory ran out" in server.last_line()
    scene.assert_clean(AGENTS_GONE_SECONDS)


def _with_shared_memory(mebibytes: int) -> list[str]:
    """What executes a command with a /dev/shm of its own; skips the test where it can have none."""
    mount = f'mount -t tmpfs -o size={mebibytes}m tmpfs /dev/shm && exec "$@"'
    whole = ["unshare", "--mount", "sh", "-c", mount, "sh"]
    if not shutil.which("unshare") or subprocess.run([*whole, "true"], check=False).returncode:
        pytest.skip("needs unshare and root, to mount a /dev/shm for one process")
    return whole


@pytest.mark.slow
def test_a_full_shared_memory_is_an_error_that_says_so(
    scene: Scene, logs: Path, model: Model
) -> None:
    command = [*vllm_command(), "serve", str(model("llama")), "--enforce-eager", *backend(RANKS)]
    child = start(scene, [*_with_shared_memory(48), *command], logs / "full")
    assert child.wait(START_SECONDS) == 1
    said = r"^ray_hetero: node \S+ \(.*\): shared memory: 48 MiB free in /dev/shm, needed"
    assert re.search(said, child.log.splitlines()[-1]), child.tail()
    assert "started rank" not in child.log
    scene.assert_clean()


@pytest.mark.slow
def test_shared_memory_that_fills_up_while_it_serves(
    scene: Scene, logs: Path, model: Model
) -> None:
    within = _with_shared_memory(512)
    server = FaultyServer(scene, logs / "fills", model("llama"), within=within)
    server.wait_until_in("idle")
    assert ask(server.server, prompt=prompts()[3], max_tokens=4)
    # That of its mount namespace.
    shared = Path(f"/proc/{server.server.child.process.pid}/root/dev/shm")
    with (shared / "filler").open("wb") as filler:
        os.posix_fallocate(filler.fileno(), 0, shutil.disk_usage(shared).free)
    # Messages that are larger than any before need memory that is not there.
    clients = [Client(server.server, {"prompt": [LONG] * 40, "max_tokens": 4}) for _ in range(4)]
    assert server.server.child.wait(STOP_SECONDS) == 1
    assert errors_of(clients)
    scene.assert_clean(AGENTS_GONE_SECONDS)
    assert "was ended by SIGBUS" in server.last_line()
    assert "Look at `df -h /dev/shm`" in server.last_line()


@pytest.mark.slow
def test_a_step_that_raises_names_its_rank(scene: Scene, logs: Path, model: Model) -> None:
    # Stage 0 gives no answers: stock vLLM would not hear of its error.
    server = FaultyServer(scene, logs / "raise", model("llama"), {"rank": 0, "do": "raise"})
    server.wait_until_in("idle")
    _check_end(server, [Client(server.server, {"prompt": prompts()[3], "max_tokens": 4})])
    assert "rank 0 (cpu, socket 0" in server.last_line()
    assert "RuntimeError('no such kernel')" in server.last_line()

"""What a process is doing is read right, of real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from ray_hetero.runtime.process_state import Doing, ProcessId, ProcessState, states

SLEEP = "import sys, time; print(flush=True); time.sleep(60)"
SPIN = "print(flush=True)\nwhile True: pass"


@contextmanager
def child(program: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.communicate()


def doing(process: ProcessId) -> Doing:
    return states({3: process})[3].doing


def test_one_that_sleeps_waits_and_one_that_is_stopped_says_how_to_go_on() -> None:
    with child(SLEEP) as process:
        named = ProcessId.of(process.pid)
        assert doing(named) is Doing.WAITING
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        assert doing(named) is Doing.STOPPED
        assert named.is_there
        state = states({0: named})[0]
    assert f"kill -CONT {process.pid}" in str(state)


def test_one_that_spins_computes() -> None:
    with child(SPIN) as process:
        # On a busy host it may get too little of a core during one look.
        assert Doing.COMPUTING in (doing(ProcessId.of(process.pid)) for _ in range(20))


def test_one_that_was_killed_is_gone_before_and_after_its_parent_has_noticed() -> None:
    with child(SLEEP) as process:
        named = ProcessId.of(process.pid)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert not named.is_there
        assert doing(named) is Doing.GONE
        process.wait()
        assert doing(named) is Doing.GONE
        assert ProcessId.of(process.pid).started == ""


def test_a_later_process_of_the_same_number_is_another_one() -> None:
    assert ProcessId.of(os.getpid()).is_there
    assert not ProcessId(os.getpid(), "1").is_there


def test_every_state_has_words() -> None:
    assert len({str(ProcessState(7, doing)) for doing in Doing}) == len(Doing)

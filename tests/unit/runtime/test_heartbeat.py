"""A server sees an engine process that is stopped, or hangs in a step, and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine.core import EngineCoreProc

from ray_hetero.compat.engine import engine_core
from ray_hetero.runtime import heartbeat
from ray_hetero.runtime.heartbeat import BEAT_SECONDS, Heartbeat, late

LIMIT_S = 3 * BEAT_SECONDS
ENGINE = """
import sys, time
from ray_hetero.runtime.heartbeat import Heartbeat
heart = Heartbeat(sys.argv[1], 3)
print("beats", flush=True)
for line in sys.stdin:
    getattr(heart, line.strip())()
    print(line, end="", flush=True)
"""


@pytest.fixture
def path(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.delenv(heartbeat.VARIABLE, raising=False)
    return heartbeat.new_path()


def comes(condition: Callable[[], bool], limit_s: float = 30.0) -> bool:
    end = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def test_an_engine_that_is_stopped_is_late_until_it_goes_on(path: str) -> None:
    assert late(path, LIMIT_S, 100) is None
    with subprocess.Popen(
        [sys.executable, "-c", ENGINE, path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as engine:
        assert engine.stdin is not None
        assert engine.stdout is not None

        def say(word: str) -> None:
            assert engine.stdin is not None
            assert engine.stdout is not None
            print(word, file=engine.stdin, flush=True)
            assert engine.stdout.readline() == f"{word}\n"

        assert engine.stdout.readline() == "beats\n"
        time.sleep(2 * LIMIT_S)
        assert late(path, LIMIT_S, 100) is None
        os.kill(engine.pid, signal.SIGSTOP)
        assert comes(lambda: "has not moved" in (late(path, LIMIT_S, 100) or ""), 3 * LIMIT_S)
        os.kill(engine.pid, signal.SIGCONT)
        assert comes(lambda: late(path, LIMIT_S, 100) is None)
        # A step may take its time.
        say("begin_step")
        time.sleep(2 * LIMIT_S)
        assert late(path, LIMIT_S, 100) is None
        assert "in one step" in (late(path, LIMIT_S, 0) or "")
        say("end_step")
        assert comes(lambda: late(path, LIMIT_S, 0) is None)
        say("end")
        # What ends in order may take its time too.
        os.kill(engine.pid, signal.SIGKILL)
    time.sleep(2 * LIMIT_S)


def test_an_engine_that_has_said_that_it_ends_is_not_late(path: str) -> None:
    heart = Heartbeat(path, 0)
    heart.end()
    time.sleep(2 * BEAT_SECONDS)
    assert late(path, 0, 0) is None


def test_all_processes_of_a_command_share_one_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(heartbeat.VARIABLE, raising=False)
    monkeypatch.setattr(heartbeat.exit_reason, "is_command", lambda: True)
    monkeypatch.setattr(heartbeat.os, "environ", dict(os.environ))
    assert heartbeat.new_path() == heartbeat.new_path()
    monkeypatch.setattr(heartbeat.exit_reason, "is_command", lambda: False)
    monkeypatch.delitem(heartbeat.os.environ, heartbeat.VARIABLE)
    # Engines of one notebook are told apart.
    assert heartbeat.new_path() != heartbeat.new_path()


def test_a_server_that_is_gone_has_no_memory() -> None:
    assert late("/proc/0/fd/3", 1, 1) is None
    heart = Heartbeat("/proc/0/fd/3", 0)
    heart.begin_step()
    heart.end_step()


def test_vllms_loop_tells_of_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    config: Any = object()
    monkeypatch.setattr(EngineCoreProc, "_process_engine_step", EngineCoreProc._process_engine_step)
    said: list[str] = []
    engine_core.tell_of_steps(config, lambda: said.append("begin"), lambda: said.append("end"))

    def step() -> tuple[dict[int, Any], bool]:
        said.append("step")
        return {}, True

    own = SimpleNamespace(vllm_config=config, step_fn=step, post_step=lambda executed: None)
    assert EngineCoreProc._process_engine_step(own) is True
    assert said == ["begin", "step", "end"]
    own.step_fn = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        EngineCoreProc._process_engine_step(own)
    assert said[3:] == ["begin", "end"]
    other = SimpleNamespace(vllm_config=None, step_fn=step, post_step=lambda executed: None)
    EngineCoreProc._process_engine_step(other)
    assert said[5:] == ["step"]

"""An engine whose API server was killed ends too."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

FAMILY = """
import multiprocessing, os, signal, sys, time

def child(said):
    from ray_hetero.runtime import parent_watch
    parent_watch.END_SECONDS = 1.0
    if "deaf" in sys.argv:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    parent_watch.end_with_parent(lambda: print("ranks stopped", file=open(said, "a"), flush=True))
    print(os.getpid(), file=open(said, "a"), flush=True)
    time.sleep(120)

if __name__ == "__main__":
    # Forked, as vLLM's: the pipe to the parent must not be held by anybody else.
    context = multiprocessing.get_context("fork")
    context.Process(target=child, args=(sys.argv[1],), name=sys.argv[2]).start()
    time.sleep(120)
"""


def _wait_for(lines: int, said: Path, limit_s: float = 60) -> list[str]:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        found = said.read_text().split("\n")[:-1] if said.exists() else []
        if len(found) >= lines:
            return found
        time.sleep(0.05)
    raise AssertionError(f"only {found}")


def _is_there(pid: int) -> bool:
    path = Path(f"/proc/{pid}/stat")
    return path.exists() and path.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize("mood", ["polite", "deaf"])
def test_the_engine_ends_with_its_parent_even_if_it_is_stuck(mood: str, tmp_path: Path) -> None:
    said = tmp_path / "said"
    parent = subprocess.Popen([sys.executable, "-c", FAMILY, str(said), "EngineCore", mood])
    engine = int(_wait_for(1, said)[0])
    parent.kill()
    parent.wait()
    assert _wait_for(2, said)[1] == "ranks stopped"
    deadline = time.monotonic() + 30
    while _is_there(engine) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _is_there(engine)


def test_a_program_of_the_users_is_left_alone(tmp_path: Path) -> None:
    said = tmp_path / "said"
    parent = subprocess.Popen([sys.executable, "-c", FAMILY, str(said), "Worker", "polite"])
    child = int(_wait_for(1, said)[0])
    parent.kill()
    parent.wait()
    time.sleep(1)
    try:
        assert _is_there(child)
    finally:
        os.kill(child, signal.SIGKILL)

"""What a dead rank leaves behind is found in its log."""

from __future__ import annotations

import os
import subprocess
import sys
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

from ray_hetero.executor import rank_processes
from ray_hetero.executor.rank_processes import LOG_TAIL_BYTES, Place, crash_in, oom_kills
from ray_hetero.runtime.process_state import ProcessId

CRASH = """
import faulthandler, os, signal, sys
faulthandler.enable()
sys.stderr.write("x" * {noise} + "\\n")
sys.stderr.flush()
os.kill(os.getpid(), signal.SIGSEGV)
"""


def test_a_crash_in_native_code_is_named(tmp_path: Path) -> None:
    log = tmp_path / "rank.err"
    with log.open("wb") as file:
        program = CRASH.format(noise=2 * LOG_TAIL_BYTES)
        subprocess.run([sys.executable, "-c", program], stderr=file, check=False)
    assert crash_in(str(log)) == "Fatal Python error: Segmentation fault"


def test_a_log_that_ends_in_peace_or_is_not_there_names_nothing(tmp_path: Path) -> None:
    log = tmp_path / "rank.err"
    log.write_text("INFO a Fatal Python error: in the middle of a line\n")
    assert crash_in(str(log)) == ""
    assert crash_in(str(tmp_path / "none")) == crash_in("") == ""


def test_a_process_tells_where_it_is(tmp_path: Path) -> None:
    log = tmp_path / "rank.err"
    program = "from ray_hetero.executor.rank_processes import Place; print(Place.here().log)"
    with log.open("wb") as file:
        ran = subprocess.run(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=file, text=True
        )
    assert ran.stdout.strip() == str(log)
    assert Place.here().process.is_there
    assert oom_kills() >= 0


MAPPING = """
import sys
from multiprocessing.shared_memory import SharedMemory
own, given = SharedMemory(create=True, size=4096), SharedMemory(sys.argv[1])
print(own.name, flush=True)
sys.stdin.read()
"""


def test_names_that_only_a_rank_knows_are_removed() -> None:
    given = SharedMemory(create=True, size=4096)
    try:
        with subprocess.Popen(
            [sys.executable, "-c", MAPPING, given.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        ) as rank:
            assert rank.stdout is not None
            own = Path("/dev/shm") / rank.stdout.readline().strip()
            assert own.exists()
            known = rank_processes._shared_names(os.getpid())
            assert f"/dev/shm/{given.name}" in known
            place = Place(ProcessId.of(rank.pid), "", 0)
            rank_processes._remove_names_here({0: place}, known)
            assert not own.exists()
            assert (Path("/dev/shm") / given.name).exists()
            # A second time, and for a process that has ended, there is nothing to do.
            rank_processes._remove_names_here({0: place}, known)
            rank.kill()
        rank_processes._remove_names_here({0: place}, known)
    finally:
        given.close()
        given.unlink()

"""Sanitisers report deliberate faults, so that their silence about the native code has a meaning.

`make sanitize` runs these beside the native unit tests; elsewhere they are skipped.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LEVEL = ROOT / "csrc/kernels/levels/avx2.cpp"
PROGRAM = ROOT / "tests/native/threads.cpp"
HANDOVER = ROOT / "tests/native/handover_threads.cpp"
LIMIT_S = 1800.0
RACE_STATUS = 66
"""Exit status of a program that ThreadSanitizer has reported of."""
FAULTS = {
    "a channel's words behind their end": """
memory = libc.malloc(64)
handover.Sender(memory, 4).post(0, 1)
""",
    "outputs of a linear layer behind their end": """
x, y, w = (libc.malloc(size) for size in (2 * 64 * 64, 2 * 64 * 64 - 2, 2 * 64 * 64))
libc.memset(x, 0, 2 * 64 * 64), libc.memset(w, 0, 2 * 64 * 64)
native.linear(x=x, stride=64, w=w, encoding=native.Packed(64, 64), bias=0, y=y, m=64,
              level=native.level("avx2"))
""",
}
"""What the bindings, which take addresses, cannot know."""
PROGRAM_OF_FAULTS = """
import ctypes, os
from ray_hetero import _expert_handover as handover, _streaming_linear as native
folder = os.environ["RAY_HETERO_SANITIZED"]
assert handover.__file__.startswith(folder) and native.__file__.startswith(folder)
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
"""

pytestmark = pytest.mark.skipif(
    "RAY_HETERO_SANITIZED" not in os.environ, reason="needs make sanitize"
)


def compiled(folder: Path, sources: Sequence[Path], *options: str) -> None:
    """Make the program `threads` with ThreadSanitizer."""
    known = ["-std=c++17", "-O1", "-g1", "-fsanitize=thread", f"-I{ROOT / 'csrc'}", *options]
    for source in sources:
        subprocess.run(["g++", *known, "-c", source], cwd=folder, check=True)
    # Without -fopenmp: the program brings the part of OpenMP that the kernels call.
    objects = [f"{source.stem}.o" for source in sources]
    subprocess.run(["g++", "-fsanitize=thread", *objects, "-o", "threads"], cwd=folder, check=True)


def assert_no_races(folder: Path) -> None:
    """The program runs without a report; its control has one."""
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["./threads", *words], cwd=folder, env=environment, capture_output=True, text=True,
            check=False, timeout=LIMIT_S,
        )  # fmt: skip

    ran = run()
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.endswith("done\n")
    assert "WARNING: ThreadSanitizer" not in ran.stderr
    raced = run("race")
    assert raced.returncode == RACE_STATUS
    assert "WARNING: ThreadSanitizer: data race" in raced.stderr


def test_threads_of_decode_steps_do_not_race(tmp_path: Path) -> None:
    """Of one rank, and of two and three that add up, with a control."""
    compiled(tmp_path, (LEVEL, PROGRAM), "-fopenmp")
    assert_no_races(tmp_path)


def test_handovers_to_expert_ranks_do_not_race(tmp_path: Path) -> None:
    """Of two senders, each with a watch, to two expert ranks, each with a reporter."""
    compiled(tmp_path, (HANDOVER,))
    assert_no_races(tmp_path)


@pytest.mark.parametrize("name", FAULTS)
def test_a_deliberate_fault_is_reported(name: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM_OF_FAULTS + FAULTS[name]],
        # The report has to come here.
        env=os.environ | {"ASAN_OPTIONS": "detect_leaks=0"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode != 0
    assert "ERROR: AddressSanitizer: " in ran.stderr

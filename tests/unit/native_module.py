"""The native module of this machine, programs of its headers, and which tests can run here."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ray_hetero.kernels import streaming_linear

native: Any = streaming_linear._native
needs_native = pytest.mark.skipif(native is None, reason="needs the native module")
LEVELS: list[str] = [] if native is None else [level.name for level in native.levels()]
"""Sets of instructions that this processor has, by name; some are there for tests on any."""
LEVEL_SOURCES = Path(__file__).parents[2] / "csrc/kernels/levels"
COMPILER = shutil.which("c++") or shutil.which("g++")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")


def run_program(
    source: Path, folder: Path, *options: str, arguments: list[str], level: str | None = None
) -> str:
    """Build a program in a folder and run it; what it printed.

    Args:
        source: C++.
        folder: an empty one.
        options: of the compiler.
        arguments: of the program.
        level: whose kernels the program calls; None if it calls none.

    """
    sources = [source] if level is None else [source, LEVEL_SOURCES / f"{level}.cpp"]
    program = folder / source.stem
    made = subprocess.run(
        [str(COMPILER), "-std=c++17", "-fopenmp", *options, *map(str, sources), "-o", str(program)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    ran = subprocess.run([str(program), *arguments], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout

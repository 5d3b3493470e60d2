"""The linear kernel's way over AMX tiles, with the tiles in software: for machines without AMX."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from native_module import needs_bf16

PROGRAM = Path(__file__).parents[1] / "native" / "linear_with_tiles.cpp"
COMPILER = shutil.which("c++") or shutil.which("g++")


@needs_bf16
@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
def test_products_over_tiles_are_right(tmp_path: Path) -> None:
    program = tmp_path / "linear_with_tiles"
    options = ["-std=c++17", "-O2", "-fopenmp", "-w"]
    made = subprocess.run(
        [str(COMPILER), *options, str(PROGRAM), "-o", str(program)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    ran = subprocess.run([str(program)], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (0, "")

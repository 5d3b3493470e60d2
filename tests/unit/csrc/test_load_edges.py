"""Rows of a checkpoint that native code reads: none, parts without rows, and a file that ends."""

from __future__ import annotations

from pathlib import Path

from native_module import needs_compiler, run_program

PROGRAM = Path(__file__).parents[2] / "native" / "load_edges.cpp"


@needs_compiler
def test_no_rows_and_too_few(tmp_path: Path) -> None:
    assert run_program(PROGRAM, tmp_path, "-O1", arguments=[]) == "right\n"

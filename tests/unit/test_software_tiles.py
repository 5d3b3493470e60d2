"""The linear kernel's way over AMX tiles, with the tiles in software: for machines without AMX."""

from __future__ import annotations

from pathlib import Path

from native_module import needs_bf16, needs_compiler, run_program

PROGRAM = Path(__file__).parents[1] / "native" / "linear_with_tiles.cpp"


@needs_bf16
@needs_compiler
def test_products_over_tiles_are_right(tmp_path: Path) -> None:
    assert run_program(PROGRAM, tmp_path, "-O2", "-w", arguments=[]) == ""

"""What goes over AMX tiles, with the tiles in software: for machines without AMX."""

from __future__ import annotations

from pathlib import Path

import pytest
from native_module import needs_bf16, needs_compiler, run_program

PROGRAMS = Path(__file__).parents[1] / "native"


@needs_bf16
@needs_compiler
@pytest.mark.parametrize("program", ["linear_with_tiles", "decode_step_with_tiles"])
def test_products_over_tiles_are_right(program: str, tmp_path: Path) -> None:
    assert run_program(PROGRAMS / f"{program}.cpp", tmp_path, "-O2", "-w", arguments=[]) == ""

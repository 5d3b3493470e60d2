"""Emulated instructions are those of processors, and stay out of users' way."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from native_module import (
    EMULATED,
    EMULATED_FOLDER,
    LEVELS,
    native,
    needs_compiler,
    needs_native,
    run_program,
)

ROOT = Path(__file__).parents[3]
KERNELS = ROOT / "csrc/kernels"
PROGRAM = ROOT / "tests/native/compare_intrinsics.cpp"
OPTIONS = ["-O1", "-ftree-vectorize", "-ffp-contract=off", "-Wno-psabi",
           f"-I{KERNELS}", f"-I{ROOT / 'tests/native'}"]  # fmt: skip
INTRINSIC = re.compile(r"\b_mm(?:256|512)?_\w+(?=\()")
needs_emulation = pytest.mark.skipif(
    not EMULATED, reason="needs emulated levels: AVX2, and python setup.py build_ext --inplace"
)


def test_every_intrinsic_that_the_kernels_use_is_emulated_and_compared() -> None:
    used = set(INTRINSIC.findall((KERNELS / "vectors/avx512.h").read_text(encoding="utf-8")))
    assert len(used) > 40
    for name in ("avx512.h", "cases.h"):
        known = set(INTRINSIC.findall((EMULATED_FOLDER / name).read_text(encoding="utf-8")))
        assert sorted(used - known) == [], f"not in tests/native/emulated/{name}"


def test_no_other_file_of_the_kernels_has_intrinsics_of_512_bits() -> None:
    found = [
        str(path.relative_to(KERNELS))
        for path in KERNELS.rglob("*")
        if path.suffix in (".h", ".cpp") and "_mm512_" in path.read_text(encoding="utf-8")
    ]
    assert found == ["vectors/avx512.h"]


@needs_emulation
@needs_compiler
def test_they_do_what_this_processors_instructions_do(tmp_path: Path) -> None:
    lines = run_program(PROGRAM, tmp_path, *OPTIONS, arguments=[]).splitlines()
    assert lines[0] == "bf16 as the manual has it: right"
    compared = {line.split(":")[0] for line in lines[1:]}
    sets = {"avx2": "AVX2", "avx512": "AVX-512", "avx512_bf16": "AVX512-BF16", "amx": "AMX"}
    assert compared == {name for level, name in sets.items() if level in LEVELS}
    ended = subprocess.run(
        [tmp_path / PROGRAM.stem, "tiles"], capture_output=True, text=True, check=False
    )
    assert ended.returncode != 0
    assert "a tile is used by a thread that has not set up its tiles" in ended.stderr


@needs_native
def test_users_cannot_have_an_emulated_level() -> None:
    assert not any("emulated" in level.name for level in native.levels())
    for name in EMULATED:
        with pytest.raises(ValueError, match=r"expected a level that this processor has"):
            native.level(name)


@needs_emulation
def test_the_same_sets_are_emulated_as_kernels_are_made_for() -> None:
    sources = {path.stem for path in (KERNELS / "levels").glob("a*.cpp")} - {"avx2"}
    assert set(EMULATED) == {f"emulated_{name}" for name in sources}
    assert EMULATED["emulated_amx"].has_tiles

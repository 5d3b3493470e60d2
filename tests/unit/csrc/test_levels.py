"""Kernels of every level of this processor give what the portable ones do."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from native_module import EMULATED_FOLDER, TESTED, native, needs_native

PROGRAM = Path(__file__).parents[2] / "native" / "compare_levels.py"
NEWER = re.compile(r"%[yz]mm|%tmm|%k[1-7]|\bv[a-z0-9]+[ps][sd]\b")
"""Operands and names that only AVX and later instructions have."""
INSIDE = re.compile(r"ray_hetero::(avx2|avx512|avx512_bf16|amx|half_avx2|half_avx512)::")


@needs_native
def test_levels_agree() -> None:
    made = subprocess.run(
        [sys.executable, str(PROGRAM), native.__file__,
         *map(str, EMULATED_FOLDER.glob("_emulated_levels*.so"))],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert made.returncode == 0, made.stdout + made.stderr
    assert [line.split()[0] for line in made.stdout.splitlines()[:-1]] == TESTED


@needs_native
@pytest.mark.skipif(shutil.which("objdump") is None, reason="needs objdump")
def test_nothing_but_a_levels_kernels_uses_its_instructions() -> None:
    listing = subprocess.run(
        ["objdump", "--disassemble", "--demangle", "--no-show-raw-insn", native.__file__],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    functions = re.split(r"^[0-9a-f]+ <(.*)>:$", listing, flags=re.MULTILINE)[1:]
    named = list(zip(functions[::2], functions[1::2], strict=True))
    outside = [name for name, code in named if not INSIDE.search(name) and NEWER.search(code)]
    assert outside == []
    inside = {found[1] for name, _ in named if (found := INSIDE.search(name))}
    assert inside == {"avx2", "avx512", "avx512_bf16", "amx", "half_avx2", "half_avx512"}

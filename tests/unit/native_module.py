"""The native module of this machine, programs of its headers, and which tests can run here."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ray_hetero.kernels.linear import streaming_linear

native: Any = streaming_linear._native
needs_native = pytest.mark.skipif(native is None, reason="needs the native module")
LEVELS: list[str] = [] if native is None else [level.name for level in native.levels()]
"""Sets of instructions that this processor has, by name; some are there for tests on any."""
EMULATED_FOLDER = Path(__file__).parents[1] / "native/emulated"
BUILT_FOLDER = Path(os.environ.get("RAY_HETERO_SANITIZED", Path(__file__).parents[2]))
"""Folder of the modules that are tested; another one with `make sanitize`."""


def emulated_levels(function: str = "levels") -> dict[str, Any]:
    """Levels whose instructions are emulated, by name; none where their module is not built.

    Args:
        function: of the module, which gives them.

    """
    built = sorted((BUILT_FOLDER / "tests/native/emulated").glob("_emulated_levels*.so"))
    if native is None or not built:
        return {}
    spec = importlib.util.spec_from_file_location("_emulated_levels", built[0])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return {level.name: level for level in getattr(module, function)()}


EMULATED = emulated_levels()
EMULATED_HALF = emulated_levels("half_levels")
HALF_LEVELS: list[str] = [] if native is None else [one.name for one in native.half_levels()]
"""Those of this processor that compute in float16."""
TESTED_HALF = [*HALF_LEVELS, *(name for name in EMULATED_HALF
                               if name.removeprefix("emulated_") not in HALF_LEVELS)]  # fmt: skip
"""Of these and emulated ones, those that tests run."""
TESTED = [*LEVELS, *(name for name in EMULATED if name.removeprefix("emulated_") not in LEVELS)]
"""Levels that tests run, by name: those of this processor, and others emulated."""
BETWEEN_PRODUCTS = [name for name in TESTED if name != "emulated_avx512_bf16"]
"""The same for what lies between products, which has one code with AVX512-BF16 and with AMX."""


def level_of(name: str) -> Any:
    """The level of a name, which may be emulated or compute in float16."""
    for one in (*EMULATED_HALF.values(), *native.half_levels()):
        if one.name == name:
            return one
    return EMULATED[name] if name in EMULATED else native.level(name)


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

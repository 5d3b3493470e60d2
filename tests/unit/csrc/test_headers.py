"""Each header of the kernels includes what it uses, so that it compiles by itself."""

from __future__ import annotations

import datetime
import random
import shutil
import subprocess
from pathlib import Path

import pytest

KERNELS = Path(__file__).parents[3] / "csrc" / "kernels"
EVERY = sorted(
    str(file.relative_to(KERNELS))
    for pattern in ("*.h", "formats/*.h")
    for file in KERNELS.glob(pattern)
)
SAMPLE = 5
"""Headers of this date that are compiled by default, a second each."""

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def compiled(header: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    source = tmp_path / "header.cpp"
    source.write_text(f'#include "{header}"\n')
    words = ["g++", "-std=c++17", "-fsyntax-only", "-fopenmp", f"-I{KERNELS}", str(source)]
    return subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(
    "header", random.Random(datetime.date.today().isoformat()).sample(EVERY, SAMPLE)
)
def test_a_header_compiles_by_itself(header: str, tmp_path: Path) -> None:
    done = compiled(header, tmp_path)
    assert done.returncode == 0, done.stderr[:2000]


@pytest.mark.slow
@pytest.mark.parametrize("header", EVERY)
def test_every_header_compiles_by_itself(header: str, tmp_path: Path) -> None:
    done = compiled(header, tmp_path)
    assert done.returncode == 0, done.stderr[:2000]


def test_a_header_that_lacks_an_include_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "lacking.h").write_text("inline Task nothing();\n")
    assert "Task" in compiled(str(tmp_path / "lacking.h"), tmp_path).stderr

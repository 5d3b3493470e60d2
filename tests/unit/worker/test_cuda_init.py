"""A rank with a prompt GPU shows it to the driver of CUDA, and hides it from all others."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ray_hetero.worker.cuda_init import HIDING, VARIABLE

ASK = f"""
import os
from ray_hetero.worker import cuda_init
print(os.environ["{HIDING}"], cuda_init.PROBLEM, sep="|")
"""
DRIVER = f"""
#include <stdlib.h>
int cuInit(unsigned flags) {{ return getenv("{HIDING}") == NULL ? STATUS : 100; }}
"""


def ask(**environment: str) -> list[str]:
    """What another process sees: the variable afterwards, and the problem."""
    done = subprocess.run(
        [sys.executable, "-c", ASK],
        env={HIDING: "-1", **environment}, capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    return done.stdout.strip().split("|")


def driver(folder: Path, status: int) -> str:
    """A folder with a CUDA driver that answers with a status where nothing is hidden from it."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    (folder / "driver.c").write_text(DRIVER.replace("STATUS", str(status)))
    command = [compiler, "-shared", "-fPIC", "-o", folder / "libcuda.so.1", folder / "driver.c"]
    subprocess.run(command, check=True)
    return str(folder)


def test_the_driver_is_initialised_with_all_gpus_and_they_are_hidden_again(tmp_path: Path) -> None:
    assert ask(**{VARIABLE: "1"}, LD_LIBRARY_PATH=driver(tmp_path, 0)) == ["-1", ""]


def test_an_error_of_the_driver_is_told(tmp_path: Path) -> None:
    hidden, problem = ask(**{VARIABLE: "1"}, LD_LIBRARY_PATH=driver(tmp_path, 999))
    assert (hidden, problem) == ("-1", "CUDA's driver says error 999 (CUresult)")


def test_a_process_without_a_prompt_gpu_leaves_the_driver_alone(tmp_path: Path) -> None:
    hidden, problem = ask(LD_LIBRARY_PATH=driver(tmp_path, 999))
    assert (hidden, problem) == ("-1", "this process was started without GPUs")

"""The host that the GPU tests run on: its GPUs, what computes there, and how engines share it.

With RAY_HETERO_PRETEND_GPU=1 and RAY_OVERRIDE_RESOURCES='{"GPU": 2}' the tests run on a host
without a GPU: GPU ranks then compute on the CPU, and what only a real GPU shows is left out.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from placement.host.gpus import read_gpus

IS_PRETENDED = os.environ.get("RAY_HETERO_PRETEND_GPU") == "1"
CORES = sorted(os.sched_getaffinity(0))
SLICES = max(1, len(CORES) // 4)
"""Engines that the host has the cores for at the same time, four for each."""
LANES = min(4, SLICES)
SHARES = 2
"""CPU ranks that every engine splits its cores between; it may leave one of them to other work."""
HANDED_ON = ("RAY_HETERO_", "RAY_OVERRIDE_", "VLLM_", "NCCL_", "CUDA_", "NVIDIA_", "TRITON_")
"""Families of this process's environment that engines on such a host need."""

Checkpoint = Callable[[str, str], Path]
"""The fixture `checkpoint`: the folder of an architecture's demo model in a dtype."""


def gpus() -> int:
    """GPUs of this host, real or pretended."""
    if IS_PRETENDED:
        return int(json.loads(os.environ.get("RAY_OVERRIDE_RESOURCES", "{}")).get("GPU", 1))
    return len(read_gpus())


def needs_gpus(count: int) -> pytest.MarkDecorator:
    """Skip a module's tests where there are fewer GPUs."""
    there = gpus()
    reason = f"needs {count} NVIDIA GPU{'s' if count > 1 else ''}, this host has {there}"
    return pytest.mark.skipif(there < count, reason=reason)


@contextmanager
def confined(number: int, slices: int) -> Iterator[None]:
    """Let what this thread starts run on one of so many equal slices of the cores.

    Engines that start at the same time then plan with different cores; else one after the other
    would claim what the next has planned with, and each new plan costs half a minute.
    """
    size = len(CORES) // slices
    os.sched_setaffinity(0, CORES[number * size : (number + 1) * size])
    try:
        yield
    finally:
        os.sched_setaffinity(0, CORES)


def environment() -> dict[str, str]:
    """What of this process's environment goes to the engines."""
    return {name: value for name, value in os.environ.items() if name.startswith(HANDED_ON)}


@dataclass(frozen=True)
class GpuState:
    """What the driver says of all GPUs together."""

    processes: tuple[int, ...]
    used_mib: int


def gpu_state() -> GpuState:
    """Ask the driver who computes on the visible GPUs and how much of their memory is in use."""
    if IS_PRETENDED:
        return GpuState((), 0)
    processes = _query("--query-compute-apps=pid")
    return GpuState(tuple(sorted(processes)), sum(_query("--query-gpu=memory.used")))


def _query(what: str) -> list[int]:
    command = [shutil.which("nvidia-smi") or "nvidia-smi", what, "--format=csv,noheader,nounits"]
    # Two runs of the tests may have a GPU each.
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        command.append(f"--id={visible}")
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return [int(line) for line in answer.stdout.split() if line.isdecimal()]

"""Memory of this process and all that it has started, and of the GPU."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True)
class Used:
    """Bytes in use on the whole machine."""

    host: int
    gpu: int | None
    """Bytes of the first visible GPU; None where there is none."""


def used_bytes() -> Used:
    """Bytes of memory in use now."""
    memory = psutil.virtual_memory()
    return Used(memory.total - memory.available, _gpu_used_bytes())


def _gpu_used_bytes() -> int | None:
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    command += ["-i", first]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return int(done.stdout.split()[0]) << 20


def proportional_bytes(pid: int) -> dict[str, int]:
    """Resident bytes of a process by kind; a page that n processes share counts 1/n.

    Raises:
        OSError: the process has ended.

    """
    fields = {"Pss": "pss", "Pss_Anon": "anonymous", "Pss_Shmem": "shared", "Pss_File": "files"}
    found = dict.fromkeys(fields.values(), 0)
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, value = line.split(":")
        if name in fields:
            found[fields[name]] = int(value.split()[0]) << 10
    return found


def memory_since(before: Used) -> dict[str, object]:
    """Memory used on top of `before`, and the largest processes below this one.

    Pinned memory need not show in a process's own figures; it does in the machine's.
    """
    processes = []
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        try:
            processes.append({"name": process.name()} | proportional_bytes(process.pid))
        except (OSError, psutil.NoSuchProcess):
            # It has ended meanwhile.
            continue
    now = used_bytes()
    return {
        "host_bytes": now.host - before.host,
        "gpu_bytes": None if now.gpu is None or before.gpu is None else now.gpu - before.gpu,
        "processes_bytes": sum(int(found["pss"]) for found in processes),
        "largest_processes": sorted(processes, key=lambda found: -int(found["pss"]))[:4],
    }

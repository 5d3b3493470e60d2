"""How fast the devices of this host read: a socket's cores, the GPU, and the link between them.

python benchmarks/floor.py        # prints the GPU's figures as one line of JSON
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from placement.host import native
from placement.host.sockets import sockets_of
from placement.host.sysfs import read_host

GPU_BYTES = 4 << 30
LINK_BYTES = 1 << 30


Bandwidths = dict[str, float]
"""Bytes/s: `socket`, one CPU rank; `together`, two of them at once; `in turn`, two of them one
after the other; `gpu` and `link` of the first GPU."""


def sockets() -> int:
    """Sockets of this host."""
    return len(sockets_of(read_host(gpus=False)))


def compute_cpus(reserved: int, ranks: int) -> list[tuple[int, ...]]:
    """Logical CPUs that each of so many CPU ranks computes on.

    Args:
        reserved: cores of a socket that are kept back.
        ranks: CPU ranks of the engine; more ranks than sockets share them.

    """
    shares = -(-ranks // sockets())
    found = sockets_of(read_host(gpus=False), shares=shares)
    return [socket.cpus[reserved:] for socket in found[:ranks]]


def socket_bandwidths(ranks: Sequence[Sequence[int]]) -> Bandwidths:
    """Bytes/s that the cores of one CPU rank, or of two, read now."""
    alone = [_read(cpus) for cpus in ranks]
    if len(ranks) == 1:
        return {"socket": alone[0]}
    together = _read([cpu for cpus in ranks for cpu in cpus])
    return {"together": together, "in turn": statistics.harmonic_mean(alone)}


def _read(cpus: Sequence[int]) -> float:
    return native.read_bandwidth(sorted(cpus), nbytes_per_thread=256 << 20, seconds=1.0)


def cpu_ticks() -> dict[str, int]:
    """Ticks of all processors since they were started: all of them, and those that were stolen.

    A virtual machine's processors are stolen while its host lets others have them; the figure is
    the eighth of the first line of `/proc/stat` (proc_stat(5)).  Threads that wait for each other
    many times in a step lose far more than the share that is stolen.
    """
    fields = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0].split()[1:9]
    ticks = [int(field) for field in fields]
    return {"all": sum(ticks), "stolen": ticks[7]}


def stolen_share(before: Mapping[str, int], after: Mapping[str, int]) -> float:
    """Share of all processors' time that was stolen between two readings of `cpu_ticks`."""
    passed = after["all"] - before["all"]
    return round((after["stolen"] - before["stolen"]) / passed, 4) if passed else 0.0


def gpu_figures() -> dict[str, float | str] | None:
    """Figures of the first GPU, measured in a process of its own; None where there is none."""
    done = subprocess.run(
        [sys.executable, __file__], capture_output=True, text=True, timeout=120, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return json.loads(lines[-1]) if lines else None


def measure_gpu() -> dict[str, float | str]:
    """Bytes/s of a copy inside the GPU's memory (read and written), and from pinned host memory."""
    import torch

    source = torch.empty(GPU_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    pinned = torch.empty(LINK_BYTES, dtype=torch.uint8, pin_memory=True)

    def seconds(to: torch.Tensor, what: torch.Tensor) -> float:
        best = float("inf")
        for _ in range(6):
            torch.cuda.synchronize()
            start = time.perf_counter()
            to.copy_(what, non_blocking=True)
            torch.cuda.synchronize()
            best = min(best, time.perf_counter() - start)
        return best

    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "copy_bytes_per_s": 2 * GPU_BYTES / seconds(target, source),
        "link_bytes_per_s": LINK_BYTES / seconds(target[:LINK_BYTES], pinned),
    }


if __name__ == "__main__":
    import torch

    if torch.cuda.is_available():
        print(json.dumps(measure_gpu()))

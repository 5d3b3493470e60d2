"""The native bandwidth probe beside plain reads with numpy and torch, in one run.

    python benchmarks/bandwidth_probe.py [--cpus 0-7] [--mib 256] [--rounds 9] [--json FILE]

Every reader uses one thread per CPU, pinned, each on memory that it touched first and on huge pages
where the system has them.  Readers take turns for several rounds.  In each round the probe is set
against the best of the others, so that other jobs on the machine disturb both alike, and the median
round counts.  Exit code 1 if the probe reads less there.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from placement.host import native
from placement.host.cpulist import format_cpulist, parse_cpulist
from placement.host.sysfs import read_host

PROBE = "native probe"
ROW = 4096
"""Columns of the matrix of the matrix-vector product, which reads it once as a decode step does."""

Read = Callable[[], object]
Make = Callable[[np.ndarray], Read]


def main() -> int:
    """Measure, print a table, judge."""
    options = parse_options()
    rates = measure(options)
    others = zip(*(found for name, found in rates.items() if name != PROBE), strict=True)
    ratios = [rate / max(other) for rate, other in zip(rates[PROBE], others, strict=True)]
    ratio = statistics.median(ratios)
    print(f"{read_host(gpus=False).cpu_model}, CPUs {format_cpulist(options.cpus)}, "
          f"{options.mib} MiB each, {options.rounds} rounds of {options.seconds:g} s")  # fmt: skip
    print(f"{'GB/s':16}{'median':>8}{'best':>8}")
    for name, found in rates.items():
        print(f"{name:16}{statistics.median(found) / 1e9:8.1f}{max(found) / 1e9:8.1f}")
    print(f"native probe ÷ best other reader of each round = {ratio:.2f} (median)")
    if options.json:
        options.json.write_text(json.dumps(record(options, rates, ratio), indent=1) + "\n")
    return 0 if ratio >= 1 else 1


def parse_options() -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    everything = format_cpulist(os.sched_getaffinity(0))
    parser.add_argument("--cpus", type=parse_cpulist, default=parse_cpulist(everything))
    parser.add_argument("--mib", type=int, default=256, help="memory of each thread")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=0.5, help="length of one measurement")
    parser.add_argument("--json", type=Path, help="where to write every round's rates")
    return parser.parse_args()


def measure(options: argparse.Namespace) -> dict[str, list[float]]:
    """Bytes per second by reader, one for each round."""
    readers: dict[str, Callable[[], float]] = {
        PROBE: lambda: native.read_bandwidth(
            options.cpus, nbytes_per_thread=options.mib << 20, seconds=options.seconds
        )
    }
    for name, make in readers_of_arrays().items():
        readers[name] = lambda make=make: pinned_rate(make, options)
    rates: dict[str, list[float]] = {name: [] for name in readers}
    for _ in range(options.rounds):
        for name, read in readers.items():
            rates[name].append(read())
    return rates


def readers_of_arrays() -> dict[str, Make]:
    """By name: makes a function that reads an array of float32 once."""
    found: dict[str, Make] = {
        "numpy sum": lambda array: array.sum,
        "numpy max": lambda array: array.max,
    }
    try:
        import torch
    except ImportError:
        return found

    def torch_sum(array: np.ndarray) -> Read:
        torch.set_num_threads(1)
        return torch.from_numpy(array).sum

    def torch_product(array: np.ndarray) -> Read:
        torch.set_num_threads(1)
        matrix, vector = torch.from_numpy(array).view(-1, ROW), torch.ones(ROW)
        return lambda: matrix @ vector

    return found | {"torch sum": torch_sum, "torch matrix·v": torch_product}


def pinned_rate(make: Make, options: argparse.Namespace) -> float:
    """Bytes per second of one pinned thread on each CPU, together."""
    line = threading.Barrier(len(options.cpus))
    rates: list[float] = []

    def work(cpu: int) -> None:
        os.sched_setaffinity(0, {cpu})
        array = huge_array(options.mib << 20)
        read = make(array)
        read()
        line.wait()
        done, started = 0, time.perf_counter()
        while (passed := time.perf_counter() - started) < options.seconds:
            read()
            done += array.nbytes
        rates.append(done / passed)

    threads = [threading.Thread(target=work, args=[cpu]) for cpu in options.cpus]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(rates)


def huge_array(nbytes: int) -> np.ndarray:
    """Ones in memory of the calling thread, like the probe's own buffers."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(memory, dtype=np.float32)
    array.fill(1)
    return array


def record(
    options: argparse.Namespace, rates: dict[str, list[float]], ratio: float
) -> dict[str, object]:
    """Everything that was measured, to keep."""
    host = read_host(gpus=False)
    return {
        "processor": host.cpu_model,
        "cpus": format_cpulist(options.cpus),
        "mib_per_thread": options.mib,
        "seconds": options.seconds,
        "bytes_per_s": {name: [round(rate) for rate in found] for name, found in rates.items()},
        "median_ratio": round(ratio, 3),
    }


if __name__ == "__main__":
    sys.exit(main())

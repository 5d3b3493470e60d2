"""The native read-bandwidth probe beside STREAM-style reads by numpy and torch, on the same CPUs.

    python benchmarks/bandwidth_probe.py [--cpus 0-3] [--mib 256] [--rounds 5]

Every reader uses one thread per CPU, pinned, each on memory that it touched first.  Readers take
turns for several rounds and the best of each counts, so that another job on the machine disturbs
all of them alike.  Exit code 1 if the probe reads less than 95 % of the best other reader.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections.abc import Callable

import numpy as np

from placement import native
from placement.cpulist import format_cpulist, parse_cpulist

ENOUGH = 0.95


def main() -> int:
    """Measure, print a table, judge."""
    options = parse_options()
    readers: dict[str, Callable[[], float]] = {
        "native probe": lambda: native.read_bandwidth(
            options.cpus, nbytes_per_thread=options.mib << 20, seconds=options.seconds
        )
    }
    for name, make in readers_of_arrays().items():
        readers[name] = lambda make=make: pinned_rate(make, options)
    best = dict.fromkeys(readers, 0.0)
    for _ in range(options.rounds):
        for name, read in readers.items():
            best[name] = max(best[name], read())
    print(f"CPUs {format_cpulist(options.cpus)}, {options.mib} MiB each, best of {options.rounds}")
    for name, rate in best.items():
        print(f"{name:14} {rate / 1e9:8.1f} GB/s")
    ratio = best["native probe"] / max(r for name, r in best.items() if name != "native probe")
    print(f"native probe ÷ best other reader = {ratio:.2f}")
    return 0 if ratio >= ENOUGH else 1


def parse_options() -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    everything = format_cpulist(os.sched_getaffinity(0))
    parser.add_argument("--cpus", type=parse_cpulist, default=parse_cpulist(everything))
    parser.add_argument("--mib", type=int, default=256, help="memory of each thread")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.5, help="length of one measurement")
    return parser.parse_args()


def readers_of_arrays() -> dict[str, Callable[[int], tuple[Callable[[], object], int]]]:
    """By name: makes a function that reads an array of so many bytes once."""

    def numpy_sum(nbytes: int) -> tuple[Callable[[], object], int]:
        array = np.ones(nbytes // 8, dtype=np.float64)
        return array.sum, array.nbytes

    found = {"numpy sum": numpy_sum}
    try:
        import torch
    except ImportError:
        return found

    def torch_sum(nbytes: int) -> tuple[Callable[[], object], int]:
        torch.set_num_threads(1)
        tensor = torch.ones(nbytes // 4, dtype=torch.float32)
        return tensor.sum, tensor.nbytes

    return found | {"torch sum": torch_sum}


def pinned_rate(
    make: Callable[[int], tuple[Callable[[], object], int]], options: argparse.Namespace
) -> float:
    """Bytes per second of one pinned thread on each CPU, together."""
    line = threading.Barrier(len(options.cpus))
    rates: list[float] = []

    def work(cpu: int) -> None:
        os.sched_setaffinity(0, {cpu})
        read, nbytes = make(options.mib << 20)
        line.wait()
        done, started = 0, time.perf_counter()
        while (passed := time.perf_counter() - started) < options.seconds:
            read()
            done += nbytes
        rates.append(done / passed)

    threads = [threading.Thread(target=work, args=[cpu]) for cpu in options.cpus]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(rates)


if __name__ == "__main__":
    sys.exit(main())

"""Seconds of products of several rows with weights that no cache keeps, as a line of JSON.

`bytes` are those of the weights, which a product of one row reads whole.

    python -m ray_hetero.kernels.linear.row_timing LEVEL FORMAT

A program of its own, started with the environment of a CPU rank (`socket_rows`).
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

from placement.host.row_costs import ROWS
from ray_hetero.kernels.formats import FORMATS, SCALED_FORMATS
from ray_hetero.kernels.formats.base import HostWeight, pack
from ray_hetero.kernels.formats.scaled import Codes

OUTPUTS, INPUTS = 8192, 4096
LEAST_BYTES, MOST_BYTES = 400 << 20, 2 << 30
"""Bytes of all weights together, copies of one that are read in turn as those of layers are."""
TIMES_CACHE = 2
"""Size of the weights in units of the last cache's, where that is more than the least."""
CACHES = Path("/sys/devices/system/cpu")
LEAST_ROUNDS, MOST_ROUNDS = 3, 9
ENOUGH_S = 2.0
"""Seconds after which no further round begins."""


def last_cache_bytes(folder: Path = CACHES) -> int:
    """Size of the first CPU's largest cache; 0 where the kernel does not tell.

    Args:
        folder: where the kernel describes CPUs.

    """
    sizes = [0]
    for file in (folder / "cpu0" / "cache").glob("index*/size"):
        digits = file.read_text().strip().removesuffix("K")
        sizes.append(int(digits) << 10 if digits.isdecimal() else 0)
    return max(sizes)


def bytes_wanted(cache: int) -> int:
    """Bytes of all weights together, which a cache of that size does not keep."""
    return min(MOST_BYTES, max(LEAST_BYTES, TIMES_CACHE * cache))


def passes(level_name: str, format_name: str) -> tuple[dict[int, Callable[[], None]], int]:
    """Functions that multiply some number of rows with all weights, by that number, and the bytes
    of the weights.

    Args:
        level_name: set of instructions, which must be the best one of this processor.
        format_name: format of the weights.

    """
    import torch

    native = importlib.import_module("ray_hetero._streaming_linear")
    level = native.levels()[-1]
    if level.name != level_name:
        sys.exit(f"expected kernels for {level_name}, this processor has those for {level.name}")
    made = _weight(format_name, native)
    copies = -(-bytes_wanted(last_cache_bytes()) // made.data.nbytes)
    weights = [replace(made, data=made.data.clone()) for _ in range(copies)]

    def products(rows: int) -> Callable[[], None]:
        x = torch.randn(rows, INPUTS).bfloat16()
        y = torch.empty(rows, OUTPUTS, dtype=torch.bfloat16)

        def run() -> None:
            for weight in weights:
                native.linear(
                    x=x.data_ptr(), stride=INPUTS, w=weight.data.data_ptr(),
                    encoding=weight.encoding, bias=0, y=y.data_ptr(), m=rows, level=level,
                )  # fmt: skip

        return run

    return {rows: products(rows) for rows in ROWS}, copies * made.data.nbytes


def _weight(format_name: str, native: ModuleType) -> HostWeight:
    """A weight in a format of bf16, or in one of a quantised checkpoint."""
    import torch

    generator = torch.Generator().manual_seed(0)
    if format_name in FORMATS:
        drawn = torch.randn(OUTPUTS, INPUTS, generator=generator) / 64
        made = FORMATS[format_name].made(pack(drawn.bfloat16()), native)
        if made is None:
            sys.exit(f"expected a weight as {format_name}, its values do not suit")
        return made
    kind = SCALED_FORMATS[format_name]
    usual = torch.full((OUTPUTS, INPUTS // 32), 0.5).to(getattr(torch, kind.scale_types[0]))
    scales, group = {
        "int4": (torch.rand(OUTPUTS, INPUTS // 128, generator=generator).bfloat16(), 128),
        "int8": (torch.rand(OUTPUTS, 1, generator=generator), INPUTS),
        "fp8": (torch.rand(OUTPUTS // 32, INPUTS // 128, generator=generator), 128),
    }.get(format_name, (usual, 32))
    # In FP8, codes from 8 to 119 are neither denormal nor NaN.
    low, high = (8, 120) if kind.no_number else (0, 16)
    codes = torch.randint(low, high, (OUTPUTS, INPUTS), generator=generator).to(torch.uint8)
    return kind.stored(Codes(codes, scales, group), native)


def seconds_of(runs: dict[int, Callable[[], None]]) -> list[float]:
    """Shortest seconds of each, in turns: other work on the cores only makes a round longer."""
    times: dict[int, list[float]] = {rows: [] for rows in runs}
    begin = time.perf_counter()
    for number in range(MOST_ROUNDS):
        if number >= LEAST_ROUNDS and time.perf_counter() - begin > ENOUGH_S:
            break
        for rows, run in runs.items():
            start = time.perf_counter()
            run()
            times[rows].append(time.perf_counter() - start)
    return [min(found) for found in times.values()]


def main() -> None:
    """Measure and print."""
    runs, nbytes = passes(*sys.argv[1:3])
    # The first pass wakes the threads up.
    runs[1]()
    print(json.dumps({"bytes": nbytes, "seconds": seconds_of(runs)}), flush=True)


if __name__ == "__main__":
    main()

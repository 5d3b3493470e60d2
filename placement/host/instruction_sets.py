"""Instruction sets of a processor, and which of them the user lets this process use."""

from __future__ import annotations

import os
from collections.abc import Mapping, Set
from dataclasses import dataclass, field

from placement.errors import TopologyError

MAX_ISA = "RAY_HETERO_MAX_CPU_ISA"
"""The environment variable that names the best level to use; csrc/kernels/processor.h reads it too.

`ONEDNN_MAX_CPU_ISA` is the same for oneDNN."""


@dataclass(frozen=True)
class Level:
    """Instruction sets that one level of the kernels (csrc/kernels/levels/) is compiled for."""

    text: str
    """Name for people."""
    flags: tuple[str, ...]
    """Flags of /proc/cpuinfo; with the first one a processor has the level."""
    core_flops: float
    """bf16 FLOP per second and core at 2 GHz, of matrix products that lie in its caches."""
    is_wide: bool = False
    """Whether vectors have 512 bits, which expand compact weights as fast as memory is read."""
    expanded: Mapping[int, float] = field(default_factory=dict)
    """Weights a second and core in products of one row, by bits of a weight; none where no
    measurement was limited by them before the memory."""


LEVELS: dict[str, Level] = {
    "portable": Level("no AVX2", (), 32e9),
    "avx2": Level("AVX2", ("avx2",), 64e9),
    # Without products of bf16, 32 x 2 a cycle in float32.
    "avx512": Level("AVX-512", ("avx512f", "avx512_vnni"), 128e9, is_wide=True),
    # 40 % of it is what a Xeon's cores reached with 8 rows (benchmarks/results/gpu-host,
    # 2026-11-23-h100-codes); an EPYC's reached four times as much with 128
    # (cpu-host/2026-11-24-avx512-bf16-linear).
    "avx512_bf16": Level("AVX512-BF16", ("avx512_bf16",), 268e9, is_wide=True),
    # Tiles: 1024 a cycle.  Of 4 bits, 14 and 16 cores expand 11 to 15 x 10^9 weights a second each
    # (benchmarks/results/gpu-host: 2026-11-23-h100-codes, 2026-11-26-h200-decode-step,
    # 2026-11-26-h100-rows-formats, 2026-11-27-h100-decode-step, 2026-11-30-h200-one-flag); 8 and
    # 12 bits are those of weights that lie in a core's cache (2026-11-28-h200-reads, and
    # cpu-host/2026-11-30-expanded-weights).
    "amx": Level(
        "AMX-BF16",
        ("amx_bf16", "amx_int8", "amx_tile"),
        2048e9,
        is_wide=True,
        expanded={4: 14e9, 8: 17e9, 12: 12e9},
    ),
}
"""Levels of the kernels, ascending."""
INSTRUCTION_SETS = frozenset(flag for level in LEVELS.values() for flag in level.flags)
"""The flags of /proc/cpuinfo that matter here."""


def allowed(flags: Set[str], environment: Mapping[str, str] = os.environ) -> frozenset[str]:
    """The flags of a processor that this process may use.

    Args:
        flags: of /proc/cpuinfo; others than those of `INSTRUCTION_SETS` are left out.
        environment: where the best level may be named.

    Raises:
        TopologyError: the environment names a level that does not exist.

    """
    best = environment.get(MAX_ISA)
    if not best:
        return INSTRUCTION_SETS & flags
    if best not in LEVELS:
        names = ", ".join(LEVELS)
        raise TopologyError(f"{MAX_ISA}: expected one of {names}; got {best!r}")
    levels = list(LEVELS)
    used = levels[: levels.index(best) + 1]
    return frozenset(flag for level in used for flag in LEVELS[level].flags if flag in flags)


def level_of(flags: Set[str]) -> str | None:
    """The best level of a processor with these flags; None where there is none but plain C++."""
    known = ((name, level.flags[:1]) for name, level in reversed(LEVELS.items()))
    return next((name for name, first in known if first and first[0] in flags), None)


def best_level(flags: Set[str]) -> Level:
    """The figures of the best level of a processor with these flags."""
    return LEVELS[level_of(flags) or "portable"]

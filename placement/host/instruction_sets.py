"""Instruction sets of a processor, and which of them the user lets this process use."""

from __future__ import annotations

import os
from collections.abc import Mapping, Set

from placement.errors import TopologyError

MAX_ISA = "RAY_HETERO_MAX_CPU_ISA"
"""The environment variable that names the best level to use; csrc/kernels/processor.h reads it too.

`ONEDNN_MAX_CPU_ISA` is the same for oneDNN."""
FLAGS_OF_LEVELS: dict[str, frozenset[str]] = {
    "portable": frozenset(),
    "avx2": frozenset({"avx2"}),
    "avx512": frozenset({"avx512f", "avx512_vnni"}),
    "avx512_bf16": frozenset({"avx512_bf16"}),
    "amx": frozenset({"amx_bf16", "amx_int8", "amx_tile"}),
}
"""What each level needs beside the one before it, by the names of /proc/cpuinfo, ascending."""
INSTRUCTION_SETS = frozenset.union(*FLAGS_OF_LEVELS.values())
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
    if best not in FLAGS_OF_LEVELS:
        names = ", ".join(FLAGS_OF_LEVELS)
        raise TopologyError(f"{MAX_ISA}: expected one of {names}; got {best!r}")
    levels = list(FLAGS_OF_LEVELS)
    used = (FLAGS_OF_LEVELS[level] for level in levels[: levels.index(best) + 1])
    return frozenset.union(*used) & flags

"""Instruction sets of a processor, and which of them the user lets this process use."""

from __future__ import annotations

import os
from collections.abc import Mapping, Set

from placement.errors import TopologyError

MAX_ISA = "RAY_HETERO_MAX_CPU_ISA"
"""The environment variable that names the best level to use; csrc/kernels/processor.h reads it too.

`ONEDNN_MAX_CPU_ISA` is the same for oneDNN."""
FLAGS_OF_LEVELS: dict[str, tuple[str, ...]] = {
    "portable": (),
    "avx2": ("avx2",),
    "avx512": ("avx512f", "avx512_vnni"),
    "avx512_bf16": ("avx512_bf16",),
    "amx": ("amx_bf16", "amx_int8", "amx_tile"),
}
"""Flags that come with each level of kernels, by the names of /proc/cpuinfo, ascending; with the
first one a processor has the level."""
INSTRUCTION_SETS = frozenset(flag for flags in FLAGS_OF_LEVELS.values() for flag in flags)
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
    used = levels[: levels.index(best) + 1]
    return frozenset(flag for level in used for flag in FLAGS_OF_LEVELS[level] if flag in flags)


def level_of(flags: Set[str]) -> str | None:
    """The best level of a processor with these flags; None where there is none but plain C++."""
    known = reversed(FLAGS_OF_LEVELS.items())
    return next((level for level, own in known if own and own[0] in flags), None)

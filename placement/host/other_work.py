"""Whether other programs compute on this host, which a measurement of its memory then shares."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

STAT = Path("/proc/stat")
SAMPLE_SECONDS = 0.1
"""Time between two looks at the CPUs; the kernel counts in hundredths of a second."""
BUSY_SHARE, BUSY_CPUS = 0.05, 0.5
"""Share of the CPUs, and number of CPUs beside it, that may be busy on a quiet host."""


def is_beside_others(*, stat: Path = STAT, sleep: Callable[[float], None] = time.sleep) -> bool:
    """Whether more of this host's CPUs are busy than a quiet host's, this process asleep.

    Args:
        stat: the kernel's counters of CPU time (proc(5), `/proc/stat`).
        sleep: waits for some seconds.

    Returns:
        False where the kernel does not tell.

    """
    before = _ticks(stat)
    sleep(SAMPLE_SECONDS)
    after = _ticks(stat)
    if before is None or after is None or before[2] != after[2]:
        return False
    busy, total, cpus = (after[0] - before[0], after[1] - before[1], after[2])
    return total > 0 and busy / total * cpus > BUSY_SHARE * cpus + BUSY_CPUS


def _ticks(stat: Path) -> tuple[int, int, int] | None:
    """Busy ticks, all ticks and CPUs of the host."""
    try:
        lines = [line.split() for line in stat.read_text(encoding="ascii").splitlines()]
        cpus = sum(1 for line in lines if line and line[0].startswith("cpu") and line[0] != "cpu")
        # user, nice, system, idle, iowait, irq, softirq, steal; guests' are in user's.
        ticks = [int(one) for one in lines[0][1:9]]
    except (OSError, ValueError, IndexError):
        return None
    return (sum(ticks) - ticks[3] - ticks[4], sum(ticks), cpus) if len(ticks) >= 5 else None

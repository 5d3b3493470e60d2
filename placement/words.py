"""Numbers in sentences."""

from __future__ import annotations

from placement.units import GIB, MIB


def plural(count: int, noun: str) -> str:
    """A number and its noun, like "1 stage", "2 stages" and "1,024 tokens"."""
    return f"1 {noun}" if count == 1 else f"{count:,} {noun}s"


def duration(seconds: float) -> str:
    """A time with one decimal, like "1.6 s" and "10.7 ms"."""
    return f"{seconds:,.1f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def size(count: int) -> str:
    """Bytes with one decimal in the largest unit that they fill, like "4.5 GiB" and "12.0 KiB"."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB")):
        if count >= unit:
            return f"{count / unit:,.1f} {name}"
    return f"{count / 1024:,.1f} KiB"

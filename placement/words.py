"""Numbers in sentences."""

from __future__ import annotations


def plural(count: int, noun: str) -> str:
    """A number and its noun, like "1 stage", "2 stages" and "1,024 tokens"."""
    return f"1 {noun}" if count == 1 else f"{count:,} {noun}s"


def duration(seconds: float) -> str:
    """A time with one decimal, like "1.6 s" and "10.7 ms"."""
    return f"{seconds:,.1f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"

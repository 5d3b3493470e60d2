"""Bytes in the units that people read."""

from __future__ import annotations

GIB = 1024**3
MIB = 1024**2
GB = 1_000_000_000

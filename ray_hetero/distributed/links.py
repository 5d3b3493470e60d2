"""The links that there are, in the order in which they are tried."""

from __future__ import annotations

from collections.abc import Sequence

from ray_hetero.distributed.gloo_link import GlooLink
from ray_hetero.distributed.link import Link
from ray_hetero.distributed.shared_memory_link import SharedMemoryLink

LINKS: Sequence[Link] = (
    SharedMemoryLink(),
    GlooLink(),
)
"""The fastest first; the last one can be reached from everywhere."""

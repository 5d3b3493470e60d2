"""Arguments of `ray start` with which a node suits this backend."""

from __future__ import annotations

from dataclasses import dataclass

from placement.host.topology import Host
from placement.units import GIB

OBJECT_STORE_BYTES = GIB
"""Bytes of the object store: nothing large goes through it; Ray's default takes 30 % of memory."""
RANKS_SHARE = 0.95
"""Share of a host's memory for ranks and the object store; the rest is the system's."""
RAY_SETTINGS = {"RAY_memory_monitor_refresh_ms": "0", "RAY_worker_niceness": "0"}
"""The memory monitor kills the largest worker of a full node, and a node full of weights is how it
should be.  Ray makes its workers nice (15): the engine, which polls its queues, would then take
the cores from the ranks that it waits for."""


@dataclass(frozen=True)
class RayArguments:
    """Options and environment of `ray start` on one host."""

    options: tuple[str, ...]
    environment: dict[str, str]


def ray_arguments(host: Host) -> RayArguments:
    """Arguments that suit a host.

    `--num-cpus` is physical cores, which is what bundles are sized in; Ray would count logical
    ones.  `--memory` is what CPU ranks may reserve for their weights; Ray would count 70 %.
    """
    memory = sum(node.memory_bytes or 0 for node in host.numa_nodes)
    store = min(OBJECT_STORE_BYTES, memory // 20) if memory else OBJECT_STORE_BYTES
    options = [f"--num-cpus={len(host.cores)}", f"--object-store-memory={store}"]
    usable = min(memory, host.memory_limit_bytes or memory)
    if usable:
        options.append(f"--memory={int(usable * RANKS_SHARE) - store}")
    if host.gpus:
        options.append(f"--num-gpus={len(host.gpus)}")
    return RayArguments(tuple(options), dict(RAY_SETTINGS))

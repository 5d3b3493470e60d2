"""Kernels that a socket will have, as far as planning can tell."""

from __future__ import annotations

from placement.host import instruction_sets
from placement.host.topology import Host
from ray_hetero.config import READ_SHARES, CpuConfig


def level_of(host: Host) -> str | None:
    """The kernels that the host's processor has, as far as planning can tell."""
    return instruction_sets.level_of(host.instruction_sets)


def streams_weights(config: CpuConfig, host: Host) -> bool:
    """Whether linear layers of a socket stream their weights."""
    return config.streams(level_of(host))


def read_share(config: CpuConfig, host: Host, *, is_bf16: bool) -> float:
    """Share of the bytes of 16-bit matrices that a CPU rank reads."""
    streams = is_bf16 and streams_weights(config, host)
    name = config.weight_format(level_of(host)) if streams else "packed"
    return READ_SHARES[name]

"""Kernels that a socket will have, as far as planning can tell."""

from __future__ import annotations

from placement.host.topology import Host
from ray_hetero.config import CpuConfig
from ray_hetero.weight_formats import FORMATS

_LEVELS = (
    ("amx_bf16", "amx"), ("avx512_bf16", "avx512_bf16"), ("avx512f", "avx512"), ("avx2", "avx2"),
)  # fmt: skip
"""What the kernels for the best set of instructions of a processor are called."""


def level_of(host: Host) -> str | None:
    """The kernels that the host's processor has, as far as planning can tell."""
    return next((name for flag, name in _LEVELS if flag in host.instruction_sets), None)


def streams_weights(config: CpuConfig, host: Host) -> bool:
    """Whether linear layers of a socket stream their weights."""
    return config.streams(level_of(host))


def read_share(config: CpuConfig, host: Host, *, is_bf16: bool) -> float:
    """Of the bytes of 16-bit matrices, what a CPU rank reads."""
    streams = is_bf16 and streams_weights(config, host)
    name = config.weight_format(level_of(host)) if streams else "packed"
    return FORMATS[name].read_share

"""CPU sockets in planning: the kernels that each has, and ranks that share memory controllers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from placement.cluster.assignment import Seat
from placement.host import instruction_sets
from placement.host.topology import Host
from ray_hetero.config import READ_SHARES, CpuConfig

Threads = Mapping[int, Sequence[int]]


@dataclass(frozen=True)
class Readers:
    """The threads that read their memory at the same time through the same controllers."""

    node_id: str
    cpus: tuple[int, ...]
    threads: int
    """Threads that read; more than the CPUs where ranks share cores."""


def reading_together(seats: Sequence[Seat], threads: Threads) -> dict[int, Readers]:
    """Threads of all ranks that read when a CPU rank reads, its own included, by rank."""
    places: dict[tuple[object, ...], list[int]] = {}
    for seat in seats:
        if seat.socket is not None:
            places.setdefault(_place(seat), []).extend(threads[seat.rank])
    return {
        seat.rank: Readers(seat.node_id, tuple(sorted(set(cpus))), len(cpus))
        for seat in seats
        if seat.socket is not None
        for cpus in [places[_place(seat)]]
    }


def _place(seat: Seat) -> tuple[object, ...]:
    assert seat.socket is not None
    package = seat.socket.package
    alone = None if package is not None else seat.socket.id
    return (seat.stage, seat.node_id, package, alone)


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


def expanded(config: CpuConfig, host: Host, cores: int, *, is_bf16: bool) -> dict[int, float]:
    """Weights per second that a CPU rank's cores expand, by bits of a weight.

    Args:
        config: the user's.
        host: of the rank.
        cores: of the rank.
        is_bf16: whether what is not quantised is computed in bfloat16.

    """
    if not (is_bf16 and streams_weights(config, host)):
        return {}
    rates = instruction_sets.best_level(host.instruction_sets).expanded
    return {bits: cores * rate for bits, rate in rates.items()}

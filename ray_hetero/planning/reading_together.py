"""CPU ranks that read their weights at the same time through the same memory controllers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from placement.cluster.assignment import Seat

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

"""Offers of an expert rank to the stages beside its computing: its experts' memory to read, and
how long its cores take.

It is sent once over each connection that `expert_meeting` has made; to the rank that hands tokens
over, behind the word that the expert rank is ready.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ray_hetero.distributed.expert_meeting import MOST_BYTES, naming
from ray_hetero.distributed.expert_memory import RemoteLayer
from ray_hetero.errors import AgreementError
from ray_hetero.kernels.experts.expert_rates import CoreRates
from ray_hetero.offload.experts.linked_experts import LinkedSlice, received
from ray_hetero.runtime.shared_pages import SharedPages


@dataclass(frozen=True)
class Offer:
    """Offer of one expert rank to a stage."""

    rates: CoreRates | None
    """Rates of the rank's cores for one layer; None where it has measured nothing."""
    slices: Mapping[str, LinkedSlice]
    """Slices of the stage's layers, by vLLM's name, as far as they can be read."""


def give(
    connection: socket.socket,
    layers: Sequence[RemoteLayer],
    pages: Mapping[str, SharedPages],
    rates: CoreRates | None,
    limit_s: float,
) -> None:
    """Send the offer to a rank of a stage, in an expert rank.

    Args:
        connection: to that rank.
        layers: of the stage.
        pages: sealed memory of layers by vLLM's name; those of other stages are left out.
        rates: of this rank's cores.
        limit_s: longest wait for that rank, in seconds.

    Raises:
        StartupError: that rank has ended, or is late.

    """
    names = [layer.name for layer in layers if layer.name in pages]
    first = {"layers": len(names), "points": None if rates is None else rates.points}
    with naming("the rank of the stage", limit_s):
        connection.settimeout(limit_s)
        connection.send(json.dumps(first).encode())
        for name in names:
            said = {"layer": name, "data_bytes": len(pages[name].memory)}
            socket.send_fds(connection, [json.dumps(said).encode()], [pages[name].descriptor])
        connection.settimeout(None)


def taken(
    connections: Sequence[socket.socket], names: Sequence[str], limit_s: float
) -> tuple[Offer, ...]:
    """Receive the offers of all expert ranks, in a stage.

    Args:
        connections: by number of the expert rank.
        names: what people call them.
        limit_s: longest wait for all, in seconds.

    Raises:
        StartupError: one is late, or has ended.
        AgreementError: its memory cannot be read, or it tells something else than was expected.

    """
    deadline = time.monotonic() + limit_s
    offers = []
    for connection, name in zip(connections, names, strict=True):
        with naming(name, limit_s):
            connection.settimeout(max(0.01, deadline - time.monotonic()))
            first = json.loads(_some(connection.recv(MOST_BYTES)))
            slices = dict(_slice(connection, name) for _ in range(first["layers"]))
            connection.settimeout(None)
            points = first["points"]
            rates = None if points is None else CoreRates(tuple((at, took) for at, took in points))
        offers.append(Offer(rates, slices))
    return tuple(offers)


def _some(message: bytes) -> bytes:
    if not message:
        raise ConnectionResetError("end")
    return message


def _slice(connection: socket.socket, name: str) -> tuple[str, LinkedSlice]:
    message, descriptors, _, _ = socket.recv_fds(connection, MOST_BYTES, 1)
    try:
        said = json.loads(_some(message))
        return said["layer"], received(descriptors[0], said["data_bytes"])
    except RuntimeError as error:
        raise AgreementError(f"memory of experts on {name}: {error}") from None
    finally:
        for descriptor in descriptors:
            os.close(descriptor)

"""Preparation of a rank's process before it computes, whatever the rank is."""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Mapping

from placement.cluster.claims import Claim, claim_socket
from ray_hetero.preflight.platform import check_platform
from ray_hetero.runtime.core_binding import drop_niceness, take_cores
from ray_hetero.runtime.process_state import STACKS_SIGNAL
from ray_hetero.worker import resting_collector
from ray_hetero.world import RankSpec


def settle(rank: RankSpec, secrets: Mapping[str, str]) -> None:
    """Take a rank's secrets, priority and cores, before this process starts threads of its own.

    A GPU rank loads and compiles on all cores of the engine on its node, and keeps to its own ones
    when the engine serves (`Action.FINISH`): on the two that are kept back compiling takes several
    times as long.

    Args:
        rank: whose process this is.
        secrets: variables that must not be in the actor's runtime environment, by name.  The hub's
            library looks for its token each time that it needs it.

    """
    os.environ.update(secrets)
    resting_collector.keep_what_is_there()
    drop_niceness()
    take_cores(rank.threads or rank.own, rank.spare if rank.threads else rank.own)


def secure(rank: RankSpec) -> Claim | None:
    """Check that this process can be a rank's, and claim the rank's socket.

    Args:
        rank: whose process this is; from here on it writes its stacks when asked to.

    Returns:
        The claim, which is to be held until this process is gone, however it ends; None for a rank
        without a socket.

    Raises:
        UnsupportedError: see `check_platform`.
        ClaimError: another process holds the socket.

    """
    faulthandler.register(STACKS_SIGNAL, all_threads=True)
    # An expert rank computes without vLLM's platform.
    if not rank.seat.serves_experts:
        check_platform(rank)
    socket = rank.seat.socket
    return None if socket is None else claim_socket(socket, owner=rank.shared.instance_id)

"""Names that others know this backend and its actors by.

Actors are named as `ray list actors` and the dashboard show them.
"""

from __future__ import annotations

from placement.cluster.assignment import Seat

BACKEND = "ray_hetero"
"""Value of --distributed-executor-backend."""
EXECUTOR_PATH = "ray_hetero.executor.HeteroExecutor"
"""Dotted path of the executor class, which vLLM takes for the same option."""
INSTEAD_OF = "RAY_HETERO_INSTEAD_OF"
"""Variable that names a backend of vLLM's for which this one stands in, where a launcher chooses it
by itself."""
OF_A_PATCH = "VLLM_HETEROGENEOUS_PLATFORM"
"""Variable that turned on a patched vLLM with GPU and CPU ranks; nothing here reads it."""
PREFIX = "ray_hetero-"
BOARD = "-status"


def actor_name(instance_id: str, seat: Seat) -> str:
    """Name of a rank's actor: its engine, place in the world, kind and device."""
    device = f"socket{seat.socket.id}" if seat.socket else f"gpu{seat.local_rank}"
    if seat.serves_experts:
        return f"{PREFIX}{instance_id}-rank{seat.rank}-experts{seat.tensor_rank}-{device}"
    return (
        f"{PREFIX}{instance_id}-rank{seat.rank}-stage{seat.stage}"
        f"-tp{seat.tensor_rank}-{seat.kind}-{device}"
    )


def board_name(instance_id: str) -> str:
    """Name of the actor that knows how an engine's ranks are."""
    return f"{PREFIX}{instance_id}{BOARD}"


def is_board(name: str) -> bool:
    """Whether an actor of this name knows how an engine's ranks are."""
    return name.startswith(PREFIX) and name.endswith(BOARD)

"""Start one Ray actor a rank, and wait for their answers with a limit and a name for the late."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from placement.assignment import Seat
from placement.errors import PlacementError
from ray_hetero.errors import RayHeteroError, StartupError
from ray_hetero.lockstep import describe
from ray_hetero.node_software import NodeSoftware
from ray_hetero.rank_environment import (
    cpu_rank_environment,
    gpu_rank_environment,
    propagated,
)
from ray_hetero.world import RankLaunch, World

POLL_SECONDS = 1.0


@dataclass
class RankHandle:
    """A rank's actor; the fields that vLLM's executor reads carry its names."""

    actor: Any
    rank: int
    run_ref: Any = field(default=None)


def actor_name(instance_id: str, seat: Seat) -> str:
    """Telling name of a rank's actor, for `ray list actors` and the dashboard."""
    device = f"socket{seat.socket.id}" if seat.socket else f"gpu{seat.local_rank}"
    return (
        f"ray_hetero-{instance_id}-rank{seat.rank}-stage{seat.stage}"
        f"-tp{seat.tensor_rank}-{seat.kind}-{device}"
    )


def environment_of(rank: RankLaunch, software: NodeSoftware) -> dict[str, str]:
    """The environment that a rank's process starts with on its node."""
    config = rank.launch.config
    environment = propagated(os.environ)
    if rank.seat.kind == "cpu":
        environment |= cpu_rank_environment(
            rank.threads,
            software.libraries,
            openmp=config.cpu.openmp,
            cpu_site=software.cpu_site,
            python_path=os.environ.get("PYTHONPATH", ""),
        )
        environment |= config.cpu.env
    else:
        environment |= gpu_rank_environment() | config.gpu.env
    interface = config.exchange.interface
    if interface == "auto":
        # Gloo would take what the host's name resolves to, which may be the loopback.
        interface = software.interfaces.get(rank.seat.address, "")
    return environment | ({"GLOO_SOCKET_IFNAME": interface} if interface else {})


def spawn(rank: RankLaunch, group: PlacementGroup, environment: Mapping[str, str]) -> RankHandle:
    """Create one rank's actor in its bundle, which has the rank's number; returns at once."""
    from ray_hetero.rank_process import RankProcess

    seat = rank.seat
    actor = ray.remote(RankProcess).options(
        name=actor_name(rank.shared.instance_id, seat),
        num_cpus=seat.bundle_cpus,
        num_gpus=1 if seat.kind == "gpu" else 0,
        scheduling_strategy=PlacementGroupSchedulingStrategy(
            placement_group=group, placement_group_bundle_index=seat.rank
        ),
        runtime_env={"env_vars": dict(environment)},
        max_restarts=0,
    )
    return RankHandle(actor.remote(rank), seat.rank)


def gather(
    world: World, refs: Sequence[Any], *, what: str, timeout_s: float, key: str
) -> list[Any]:
    """Wait for one answer a rank.

    Args:
        world: for naming ranks.
        refs: one object reference a rank, by rank.
        what: what is being waited for, for messages.
        timeout_s: longest wait for all.
        key: name of the setting that holds the limit.

    Raises:
        StartupError: an actor died, answered with an error, or is late; names the rank.
        RayHeteroError, PlacementError: what the rank itself raised for the user.

    """
    deadline = time.monotonic() + timeout_s
    pending = {ref: rank for rank, ref in enumerate(refs)}
    answers: dict[int, Any] = {}
    while pending:
        done, _ = ray.wait(list(pending), num_returns=1, timeout=POLL_SECONDS)
        for ref in done:
            rank = pending.pop(ref)
            answers[rank] = _answer(world, rank, ref, what)
        if pending and time.monotonic() > deadline:
            late = "; ".join(describe(world, rank) for rank in sorted(pending.values()))
            raise StartupError(
                f"{what}: no answer in {timeout_s:g} s ({key}) from {late}. "
                "Look at that rank's log, or raise the limit."
            )
    return [answers[rank] for rank in sorted(answers)]


def _answer(world: World, rank: int, ref: Any, what: str) -> Any:
    try:
        return ray.get(ref)
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, RayHeteroError | PlacementError):
            raise type(cause)(f"{describe(world, rank)}: {cause}") from None
        raise StartupError(f"{what}: {describe(world, rank)} failed: {cause!r}") from error
    except RayActorError as error:
        raise StartupError(f"{what}: {describe(world, rank)} died: {error}") from None
    except RayError as error:
        raise StartupError(f"{what}: {describe(world, rank)}: {error}") from error

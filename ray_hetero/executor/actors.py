"""Start one Ray actor a rank, and wait for their answers with a limit and a name for the late."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from placement.cluster.ray_cluster import Reservation
from ray_hetero.errors import StartupError
from ray_hetero.executor.endings import SETTLE_SECONDS, Ending, Severity, causes, ending_of
from ray_hetero.executor.lockstep import describe
from ray_hetero.executor.rank_processes import RankProcesses
from ray_hetero.names import INSTEAD_OF, actor_name
from ray_hetero.preflight.node_software import NodeSoftware
from ray_hetero.worker import cuda_init
from ray_hetero.worker.rank_environment import (
    cpu_rank_environment,
    gpu_rank_environment,
    propagated,
)
from ray_hetero.world import RankSpec, World

POLL_SECONDS = 1.0


@dataclass
class RankHandle:
    """A rank's actor; the fields that vLLM's executor reads carry its names."""

    actor: Any
    rank: int
    run_ref: Any = field(default=None)


def environment_of(rank: RankSpec, software: NodeSoftware) -> dict[str, str]:
    """The environment that a rank's process starts with on its node."""
    config = rank.engine.config
    environment = propagated(os.environ)
    if INSTEAD_OF in environment:
        # A rank's own configuration names one of vLLM's backends and means it.
        environment[INSTEAD_OF] = ""
    if rank.seat.kind == "cpu":
        environment |= cpu_rank_environment(
            rank.threads,
            software.libraries,
            openmp=config.cpu.openmp,
            cpu_site=software.cpu_site,
            python_path=os.environ.get("PYTHONPATH", ""),
        )
        if config.cpu.prefill_on_gpu and rank.world.has_gpu_on(rank.seat.node_id):
            environment[cuda_init.VARIABLE] = "1"
        environment |= config.cpu.env
    else:
        environment |= gpu_rank_environment() | config.gpu.env
    interface = config.exchange.interface
    if interface == "auto":
        # Gloo would take what the host's name resolves to, which may be the loopback.
        interface = software.interfaces.get(rank.seat.address, "")
    return environment | ({"GLOO_SOCKET_IFNAME": interface} if interface else {})


def spawn(rank: RankSpec, reservation: Reservation, environment: Mapping[str, str]) -> RankHandle:
    """Create one rank's actor in its bundle; returns at once."""
    from ray_hetero.worker.rank_actor import RankActor

    seat = rank.seat
    actor = ray.remote(RankActor).options(
        name=actor_name(rank.shared.instance_id, seat),
        # Of a bundle that is not ours, somebody else's actor may have the CPUs.
        num_cpus=seat.bundle_cpus if reservation.is_own else 0,
        num_gpus=1 if seat.kind == "gpu" else 0,
        scheduling_strategy=PlacementGroupSchedulingStrategy(
            placement_group=reservation.group,
            placement_group_bundle_index=reservation.bundles[seat.rank],
        ),
        runtime_env={"env_vars": dict(environment)},
        max_restarts=0,
    )
    return RankHandle(actor.remote(rank), seat.rank)


def gather(
    world: World,
    refs: Sequence[Any],
    *,
    what: str,
    timeout_s: float,
    key: str,
    processes: RankProcesses | None = None,
) -> list[Any]:
    """Wait for one answer a rank.

    Args:
        world: for naming ranks.
        refs: one object reference a rank, by rank.
        what: what is being waited for, for messages.
        timeout_s: longest wait for all.
        key: name of the setting that holds the limit.
        processes: the ranks' processes, once they are known.

    Raises:
        StartupError: an actor died, answered with an error, or is late; names the rank.
        RayHeteroError, PlacementError: what the rank itself raised for the user.

    """
    deadline = time.monotonic() + timeout_s
    pending = {ref: rank for rank, ref in enumerate(refs)}
    while pending:
        done, _ = ray.wait(list(pending), num_returns=1, timeout=POLL_SECONDS)
        if any(ending_of(pending[ref], ref) for ref in done):
            # The first to be heard of need not be the first that failed.
            done, _ = ray.wait(list(pending), num_returns=len(pending), timeout=SETTLE_SECONDS)
            endings = [ending_of(pending[ref], ref) for ref in done]
            found = causes([ending for ending in endings if ending])
            raise _error(world, found, what, processes)
        for ref in done:
            del pending[ref]
        if pending and time.monotonic() > deadline:
            late = "; ".join(describe(world, rank) for rank in sorted(pending.values()))
            doing = f" {processes.look()}." if processes else ""
            raise StartupError(
                f"{what}: no answer in {timeout_s:g} s ({key}) from {late}.{doing} "
                "Look at that rank's log, or raise the limit."
            )
    return [ray.get(ref) for ref in refs]


def _error(
    world: World, endings: Sequence[Ending], what: str, processes: RankProcesses | None
) -> Exception:
    first = endings[0]
    if first.error is not None:
        return type(first.error)(f"{describe(world, first.rank)}: {first.error}")
    told = "; ".join(f"{describe(world, ending.rank)} {ending.text}" for ending in endings)
    if processes and first.severity is Severity.DIED:
        told = f"{told}; {processes.traces(first.rank)}"
    return StartupError(f"{what}: {told}")

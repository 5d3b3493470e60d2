"""The Ray actors of the ranks: started one a rank, asked with a limit and a name for the late."""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from placement.cluster import ray_cluster
from placement.cluster.ray_cluster import Reservation
from placement.errors import PlacementError
from ray_hetero.config import StartupConfig
from ray_hetero.errors import RayHeteroError, StartupError
from ray_hetero.executor.failure import (
    POLL_SECONDS,
    SETTLE_SECONDS,
    Ending,
    Severity,
    causes,
    ending_of,
    report_of,
)
from ray_hetero.executor.rank_processes import RankProcesses
from ray_hetero.log import logger
from ray_hetero.names import INSTEAD_OF, actor_name
from ray_hetero.preflight.node_software import NodeSoftware
from ray_hetero.runtime.credentials import is_secret, needed_by_ranks
from ray_hetero.worker import cuda_init
from ray_hetero.worker.rank_config import Fingerprint
from ray_hetero.worker.rank_environment import (
    PROPAGATED_PREFIXES,
    cpu_rank_environment,
    gpu_rank_environment,
    propagated,
)
from ray_hetero.world import RankSpec, World


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
        has_prompts = config.cpu.prefill_on_gpu and not rank.seat.serves_experts
        if has_prompts and rank.world.has_gpu_on(rank.seat.node_id):
            environment[cuda_init.VARIABLE] = "1"
        environment |= config.cpu.env
    else:
        environment |= gpu_rank_environment() | config.gpu.env
    interface = config.exchange.interface
    if interface == "auto":
        # Gloo would take what the host's name resolves to, which may be the loopback.
        interface = software.interfaces.get(rank.seat.address, "")
    return environment | ({"GLOO_SOCKET_IFNAME": interface} if interface else {})


NODES_SECONDS = 5.0
"""Interval at which a wait for ranks looks whether their nodes are there, in seconds."""
WATCH_STOP_SECONDS = 10.0
"""Longest wait for the watch to stop, in seconds."""


class RankActors:
    """The actors of one generation of ranks, by rank.

    Args:
        world: seats of the ranks.
        actors: Ray's handles, by rank.
        limits: longest waits on the way up.

    """

    def __init__(self, world: World, actors: Sequence[Any], limits: StartupConfig) -> None:
        self._world = world
        self._actors = tuple(actors)
        self._limits = limits
        self._runs: dict[Any, int] = {}
        self.processes: RankProcesses | None = None
        """The actors' processes; None before `prepare` has been answered."""
        self.fingerprints: Sequence[Fingerprint] = ()
        """Fingerprint of what each rank runs with; empty before `prepare` has been answered."""
        self.seconds: Sequence[Mapping[str, float]] = ()
        """Seconds that each serving rank has taken for the parts of `start`; empty before."""

    @classmethod
    def create(
        cls,
        specs: Sequence[RankSpec],
        reservation: Reservation,
        software: Mapping[str, NodeSoftware],
    ) -> RankActors:
        """Create every rank's actor in its bundle; returns at once.

        Args:
            specs: by rank.
            reservation: bundles of the seats.
            software: of each node, by its id.

        """
        _warn_of_passwords(os.environ)
        actors = [
            _create(rank, reservation, environment_of(rank, software[rank.seat.node_id]))
            for rank in specs
        ]
        return cls(specs[0].world, actors, specs[0].engine.config.startup)

    def prepare(self) -> Sequence[Fingerprint]:
        """Wait until every rank has its configuration.

        Raises:
            StartupError, RayHeteroError, PlacementError: as `gather`.

        """
        refs = [actor.prepare.remote() for actor in self._actors]
        self.fingerprints = self._gather(refs, "starting actors", "actor_timeout_s")
        self.processes = RankProcesses(self._world, [found.place for found in self.fingerprints])
        return self.fingerprints

    def start(self, requests: Any) -> list[Any]:
        """Make the ranks join their groups and load their weights; returns handles of their queues.

        Args:
            requests: handle of the queue that every rank reads.

        Raises:
            StartupError, RayHeteroError, PlacementError: as `gather`.

        """
        first = self._actors[0].create_dist_init_method.remote()
        (rendezvous,) = self._gather([first], "opening the rendezvous", "actor_timeout_s")
        gpus = self._gpus_by_node()
        refs = [
            actor.start.remote(
                *(() if seat.serves_experts else (rendezvous, requests, gpus[seat.node_id]))
            )
            for actor, seat in zip(self._actors, self._world.members, strict=True)
        ]
        what = "joining groups and loading weights"
        try:
            answers = self._gather(refs, what, "load_timeout_s")
        except (RayHeteroError, PlacementError):
            assert self.processes is not None
            self.processes.remove_shared_names()
            raise
        answers = answers[: len(self._world.seats)]
        self.seconds = [answer["seconds"] for answer in answers]
        return [answer["handle"] for answer in answers]

    def _gpus_by_node(self) -> dict[str, tuple[int, ...]]:
        """GPUs of all GPU ranks of each node, by number there, in ascending order."""
        gpus: dict[str, list[int]] = {}
        for seat, answer in zip(self._world.members, self.fingerprints, strict=True):
            gpus.setdefault(seat.node_id, []).extend(answer.physical_gpus)
        return {node: tuple(sorted(found)) for node, found in gpus.items()}

    def run(self) -> None:
        """Start the ranks' loops of steps; returns at once."""
        self._runs = {actor.run.remote(): rank for rank, actor in enumerate(self._actors)}

    def ended(self, at_least: int, timeout_s: float) -> Sequence[Ending] | None:
        """Wait for so many ranks to end; those that have ended when the time is over.

        None where nobody can tell any more, as this process has left Ray.
        """
        if not ray.is_initialized():
            return None
        done, _ = ray.wait(list(self._runs), num_returns=at_least, timeout=timeout_s)
        # To ask for an answer would start another Ray.
        if not ray.is_initialized():
            return None
        return [
            ending_of(self._runs[ref], ref)
            or Ending(self._runs[ref], Severity.FAILED, "ended by itself")
            for ref in done
        ]

    def report(self, endings: Sequence[Ending]) -> str:
        """Say in one line what ended and why; for ranks that serve."""
        assert self.processes is not None
        return report_of(endings, self.processes)

    def end(self) -> None:
        """End the processes of all ranks, whatever they are waiting for; safe to call twice."""
        if not ray.is_initialized():
            return
        for actor in self._actors:
            ray.kill(actor)
        if self.processes is not None:
            self.processes.end()

    def _gather(self, refs: Sequence[Any], what: str, limit: str) -> list[Any]:
        timeout_s, key = getattr(self._limits, limit), f"startup.{limit}"
        return gather(
            self._world, refs, what=what, timeout_s=timeout_s, key=key, processes=self.processes
        )


class RankWatch:
    """A thread that waits for the first of the ranks to end.

    Args:
        ranks: ranks that serve.
        size: number of ranks.
        on_end: called once, with one line about what ended and why.

    """

    def __init__(self, ranks: RankActors, size: int, on_end: Callable[[str], object]) -> None:
        self._ranks = ranks
        self._size = size
        self._on_end = on_end
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="RankWatch")
        self._thread.start()

    def stop(self) -> None:
        """Report nothing from now on."""
        self._stop.set()

    def join(self) -> None:
        """Wait until the thread is out of Ray, but no longer than `WATCH_STOP_SECONDS`."""
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=WATCH_STOP_SECONDS)

    def _watch(self) -> None:
        report: str | None = "a rank has ended"
        try:
            ended: Sequence[Ending] | None = ()
            while not ended:
                if ended is None or self._stop.is_set():
                    report = None
                    return
                ended = self._ranks.ended(1, POLL_SECONDS)
            # The first to be heard of need not be the first that died.
            report = self._ranks.report(self._ranks.ended(self._size, SETTLE_SECONDS) or ended)
        finally:
            # Whatever keeps the cause from being found, the engine must not go on.
            if report is not None and not self._stop.is_set():
                self._on_end(report)


def _warn_of_passwords(environment: Mapping[str, str]) -> None:
    """Name the variables that ranks would get but for a password in their value."""
    for name, value in environment.items():
        if name.startswith(PROPAGATED_PREFIXES) and is_secret("", value):
            logger.warning(
                "%s holds a password and is not passed on to the ranks: Ray would write it into "
                "its logs. On a cluster, set it where `ray start` runs",
                name,
            )


def _models_of(engine_args: Any) -> set[str]:
    """Names that a rank may read from the hub or from an object store."""
    speculative = engine_args.speculative_config
    names = {engine_args.model, engine_args.tokenizer, engine_args.hf_config_path}
    if isinstance(speculative, dict):
        names.add(speculative.get("model"))
    if engine_args.enable_lora:
        # Adapters are named by requests.
        names.add("an adapter")
    return {str(name) for name in names if name}


def _create(rank: RankSpec, reservation: Reservation, environment: Mapping[str, str]) -> Any:
    from ray_hetero.worker.expert_actor import ExpertActor
    from ray_hetero.worker.rank_actor import RankActor

    seat = rank.seat
    # The runtime environment is written into Ray's logs; the arguments of an actor are not.
    secrets = needed_by_ranks(_models_of(rank.engine.engine_args), os.environ)
    secrets |= {name: value for name, value in environment.items() if is_secret(name, value)}
    public = {name: value for name, value in environment.items() if name not in secrets}
    actor = ray.remote(ExpertActor if seat.serves_experts else RankActor).options(
        name=actor_name(rank.shared.instance_id, seat),
        # Of a bundle that is not ours, somebody else's actor may have the CPUs.
        num_cpus=seat.bundle_cpus if reservation.is_own else 0,
        num_gpus=1 if seat.kind == "gpu" else 0,
        scheduling_strategy=PlacementGroupSchedulingStrategy(
            placement_group=reservation.group,
            placement_group_bundle_index=reservation.bundles[seat.rank],
        ),
        runtime_env={"env_vars": public},
        max_restarts=0,
    )
    if not seat.serves_experts:
        return actor.remote(rank, secrets)
    engine_args = pickle.dumps(rank.engine.engine_args)
    engine = replace(rank.engine, engine_args=None)
    return actor.remote(replace(rank, engine=engine), secrets, engine_args)


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
        timeout_s: longest wait for all, in seconds.
        key: name of the setting that holds the limit.
        processes: the ranks' processes, once they are known.

    Raises:
        StartupError: an actor died, answered with an error, or is late, or its node is gone; names
            the rank.
        RayHeteroError, PlacementError: what the rank itself raised for the user.

    """
    deadline = time.monotonic() + timeout_s
    look = time.monotonic() + NODES_SECONDS
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
        if pending and time.monotonic() > look:
            look = time.monotonic() + NODES_SECONDS
            refuse_dead_nodes(world, what)
        if pending and time.monotonic() > deadline:
            late = "; ".join(world.describe(rank) for rank in sorted(pending.values()))
            doing = f" {processes.look()}." if processes else ""
            raise StartupError(
                f"{what}: no answer in {timeout_s:g} s ({key}) from {late}.{doing} "
                "Look at that rank's log, or raise the limit."
            )
    return [ray.get(ref) for ref in refs]


def refuse_dead_nodes(world: World, what: str = "") -> None:
    """Refuse to wait for ranks in vain.

    Args:
        world: seats of the ranks.
        what: is waited for; empty where the message is part of one that says so.

    Raises:
        StartupError: Ray takes the node of a rank for dead.

    """
    dead = ray_cluster.gone(world.node_ids)
    lost = "; ".join(
        world.describe(rank) for rank, seat in enumerate(world.members) if seat.node_id in dead
    )
    if lost:
        told = f"Ray has lost the node of {lost}. Look at Ray's logs there."
        raise StartupError(f"{what}: {told}" if what else told)


def _error(
    world: World, endings: Sequence[Ending], what: str, processes: RankProcesses | None
) -> Exception:
    first = endings[0]
    if first.error is not None:
        return type(first.error)(f"{world.describe(first.rank)}: {first.error}")
    told = "; ".join(f"{world.describe(ending.rank)} {ending.text}" for ending in endings)
    if processes and first.severity is Severity.DIED:
        told = f"{told}; {processes.traces(first.rank)}"
    return StartupError(f"{what}: {told}")

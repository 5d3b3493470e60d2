"""vLLM's executor over GPU and CPU ranks.  Start-up reads like a table of contents:

discover → plan → reserve → spawn → connect → warm up.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import psutil
import vllm.envs as envs
from vllm.config import CompilationMode

from placement.cluster import ray_cluster
from placement.cluster.assignment import Node, Turn
from placement.cluster.external_group import nodes_within
from placement.errors import ClaimError, PlacementError
from placement.words import plural
from ray_hetero.compat.engine import engine_core
from ray_hetero.compat.engine.engine_args import spec_of
from ray_hetero.compat.worker import layer_partition
from ray_hetero.compat.worker.parallel_config import set_parallel_sizes
from ray_hetero.errors import RayHeteroError
from ray_hetero.executor import kv_room
from ray_hetero.executor.actors import RankActors, refuse_dead_nodes
from ray_hetero.executor.engine_plan import EnginePlan, EnginePlanner
from ray_hetero.executor.kv_shares import KvShares
from ray_hetero.executor.lockstep import warm_up
from ray_hetero.executor.rank_queues import AnswerQueue, RequestQueue
from ray_hetero.executor.rank_set import RankSet
from ray_hetero.executor.recovery import RankRecovery
from ray_hetero.executor.rpc import GuardedExecutor
from ray_hetero.log import adopt, logger
from ray_hetero.observability.progress import StartupProgress
from ray_hetero.observability.status_board import EngineBoard
from ray_hetero.observability.world_table import as_text
from ray_hetero.preflight.cluster_software import software_of
from ray_hetero.runtime import exit_reason
from ray_hetero.runtime.core_binding import move_process
from ray_hetero.runtime.held_signals import sigterm_held
from ray_hetero.runtime.parent_watch import end_with_parent
from ray_hetero.runtime.ray_connection import RayConnection
from ray_hetero.worker.rank_config import check_agreement
from ray_hetero.worker.warmup_schedule import Phase, WarmupSizes
from ray_hetero.world import World

PLANNING_TRIES = 3
"""Most plans that an engine makes when others claim first what it has planned with."""


class HeteroExecutor(GuardedExecutor):
    """One vLLM engine over GPUs and CPU sockets, a Ray actor a rank."""

    is_ray_hetero = True
    """Recognised by the plugin, which must not import this class to compare it."""

    def _init_executor(self) -> None:
        self._begin()
        end_with_parent(self._stop_ranks)
        with self._nothing_left_on_failure():
            self._connect(self._claim_devices())
        if self._plan.reads_over_link:
            engine_core.gather_arrivals(self.vllm_config)

    def _begin(self) -> None:
        """Prepare the start-up: what was asked for, and nothing yet of what its steps make."""
        adopt("placement")
        # Before Ray's own exit handler, which was there earlier; a finalizer would come after it.
        self._at_exit = partial(_shut_down_late, weakref.ref(self))
        atexit.register(self._at_exit)
        self.shutting_down = False
        self.shutdown_lock = threading.Lock()
        self._spec = spec_of(self.vllm_config)
        self._config = self._spec.config
        self._turn = self._take_turn()
        self._given_partition = layer_partition.given_partition()
        self._progress = StartupProgress(
            in_notebook=self._spec.in_notebook, earlier_s=_seconds_for_this_engine()
        )
        self._board = EngineBoard()
        self._connection: RayConnection | None = None
        self._external: ray_cluster.ExternalGroup | None = None
        self._planned: EnginePlan | None = None
        self._reservation: ray_cluster.Reservation | None = None
        self._guard(self._config.max_restarts)
        if self._config.max_restarts:
            engine_core.ask_when_a_step_fails(self.vllm_config, RankRecovery)
        set_parallel_sizes(self)

    @property
    def _plan(self) -> EnginePlan:
        assert self._planned is not None, "the step `plan` comes before"
        return self._planned

    @property
    def world(self) -> World:
        """All ranks of this engine."""
        return self._plan.world

    def _claim_devices(self) -> RankSet:
        """Discover, plan and claim sockets; start over if another engine was faster."""
        # Of engines that start together one gets what it wants each time.
        tries = PLANNING_TRIES + self._turn.engines - 1
        for left in reversed(range(tries)):
            nodes = self._discover()
            self._planned = self._make_plan(nodes)
            # vLLM counts stages times ranks of one; stages may differ in size.
            self.world_size = self.world.layout.world_size
            self.output_rank = self._get_output_rank()
            self._reservation = self._reserve()
            try:
                return self._spawn()
            except ClaimError as error:
                if not left:
                    raise
                logger.warning("planning again: %s", error)
                self._give_back()
        raise AssertionError("the last try returns or raises")

    @contextmanager
    def _nothing_left_on_failure(self) -> Iterator[None]:
        is_done = False
        try:
            yield
            is_done = True
        except (RayHeteroError, PlacementError) as error:
            logger.error("ray_hetero cannot start: %s", error)
            exit_reason.leave(str(error))
            raise
        finally:
            if not is_done:
                self.shutdown()

    def _take_turn(self) -> Turn:
        """This engine's place among the engines of a data-parallel server.

        They get one configuration and with it one name, by which their claims and actors could not
        be told apart.
        """
        index = self.parallel_config.data_parallel_index
        if self._spec.engine_args.data_parallel_size > 1:
            self.vllm_config.instance_id += f"-dp{index}"
        return Turn(index % self._spec.engines, self._spec.engines)

    # --- discover -----------------------------------------------------------------------------

    def _discover(self) -> tuple[Node, ...]:
        with self._progress.step("discover") as step:
            if self._connection is None:
                self._connection = RayConnection(self._spec.ray_address)
                self._connection.watch(self._on_ray_gone)
            nodes = ray_cluster.discover(
                unit=self._config.cpu.unit,
                shares=self._config.cpu.ranks_per_socket,
                timeout_s=self._config.placement.timeout_s,
                is_own=self._connection.is_local,
            )
            nodes = self._within_group(nodes)
            gpus = sum(node.gpus for node in nodes)
            sockets = sum(len(node.sockets) for node in nodes)
            step.outcome = (
                f"{plural(len(nodes), 'node')}, {plural(gpus, 'GPU')}, "
                f"{plural(sockets, 'CPU socket')}"
            )
        return nodes

    def _within_group(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        """The cluster, or the part of it that the placement group around this engine reserves."""
        group = self.parallel_config.placement_group or self._spec.placement_group
        if group is None:
            return nodes
        self._external = ray_cluster.external_group(
            group, nodes, self._config.placement.timeout_s, envs.VLLM_RAY_BUNDLE_INDICES
        )
        return nodes_within(nodes, self._external.offers)

    # --- plan ---------------------------------------------------------------------------------

    def _make_plan(self, nodes: Sequence[Node]) -> EnginePlan:
        with self._progress.step("plan") as step:
            plan = EnginePlanner(
                self.vllm_config, self._spec, self._turn, self._given_partition, self._external
            ).plan(nodes)
            step.outcome = str(plan.world.layout)
        plan.log()
        return plan

    # --- reserve ------------------------------------------------------------------------------

    def _reserve(self) -> ray_cluster.Reservation:
        with self._progress.step("reserve"):
            seats = self.world.members
            if self._external is not None:
                return self._external.reservation(seats)
            return ray_cluster.reserve(
                seats,
                accelerator_type=self._config.gpu.accelerator_type,
                timeout_s=self._config.placement.timeout_s,
                name=f"ray_hetero-{self.vllm_config.instance_id}",
                memory_bytes=ray_cluster.reservable_memory(
                    self._plan.memory_bytes, seats, engines=self._turn.engines
                ),
            )

    # --- spawn --------------------------------------------------------------------------------

    def _spawn(self) -> RankSet:
        with self._progress.step("spawn"):
            assert self._reservation is not None
            software = software_of(self.world, self._config, self.model_config.model)
            actors = RankActors.create(self._plan.specs, self._reservation, software)
            # From now on whoever ends this engine ends them.
            ranks = RankSet(self.world, actors, self._on_failure, self._on_stopped)
            self._ranks = ranks
            fingerprints = actors.prepare()
            assert actors.processes is not None
            for seat in self.world.members:
                logger.info("started %s", actors.processes.describe(seat.rank))
            check_agreement(fingerprints)
        return ranks

    def _keep_off_compute_cores(self) -> None:
        """Move this process, and a Ray that it started, to the cores that were kept back.

        When the engine serves: until then the compute cores have time.  Only in vLLM's own engine
        process; a notebook's process is the user's.
        """
        # A driver inside a cluster may be held to other cores than the node's Ray.
        spare = os.sched_getaffinity(0).intersection(self._plan.spare_here)
        if spare and multiprocessing.parent_process() is not None:
            move_process(os.getpid(), spare)
            assert self._connection is not None
            assert self._set.actors.processes is not None
            self._connection.keep_off(spare, besides=self._set.actors.processes.pids)

    # --- connect ------------------------------------------------------------------------------

    def _connect(self, ranks: RankSet) -> None:
        with self._progress.step("connect"):
            self._board.starting(self._plan.info)
            limit_s = self._config.warmup.step_timeout_s
            self._tells_tokens = self._plan.schedules_ahead
            requests = RequestQueue.open(self.world, ranks.failure, limit_s)
            handles = ranks.actors.start(requests.export_handle())
            assert self._connection is not None
            # A Ray that this engine has started is of its session.
            shares_cores = (
                not self._connection.is_local
                and not self._plan.spare_here
                and any(seat.is_driver_node and seat.kind == "cpu" for seat in self.world.members)
            )
            answers = [
                AnswerQueue.open(handle, ranks.failure, shares_cores=shares_cores)
                for handle in handles
            ]
            limit_s = self._config.startup.actor_timeout_s
            ranks.connect(requests, answers, limit_s, "startup.actor_timeout_s")
            for rank, seconds in enumerate(ranks.actors.seconds):
                for part, taken in seconds.items():
                    self._progress.times.add_of_rank("connect", part, rank, taken)

    def _get_output_rank(self) -> int:
        return self.world.layout.first_rank(len(self.world.layout.stages) - 1)

    # --- warm up: vLLM calls these after _init_executor -------------------------------------

    def get_kv_cache_specs(self) -> list[dict[str, Any]]:
        """KV cache specifications of each rank's layers, as if all stages had one size."""
        specs: list[dict[str, Any]] = super().get_kv_cache_specs()
        self._kv_shares = KvShares(specs, self.world.layout, self.model_config)
        return self._kv_shares.common

    def initialize_from_config(self, kv_cache_configs: list[Any]) -> None:
        """Hand each rank its KV cache, with the heads that it really keeps."""
        own = self._kv_shares.own(kv_cache_configs, self.vllm_config)
        super().initialize_from_config(own)

    def get_supported_kv_cache_layouts(self) -> list[list[str]]:
        """The layouts that every rank supports, the same list for each, as vLLM insists on."""
        offered: list[list[str]] = super().get_supported_kv_cache_layouts()
        common = [name for name in offered[0] if all(name in names for names in offered)]
        if not common:
            raise self._set.fail(f"no KV cache layout suits all ranks: {offered}")
        return [common] * len(offered)

    def determine_available_memory(self) -> list[int]:
        """First half of the warm-up schedule; KV cache bytes of each rank."""
        with self._nothing_left_on_failure():
            values = self._warm_up(Phase.MEMORY)
        available = [
            next(value for value in values[seat.rank].values() if value is not None)
            for seat in self.world.seats
        ]
        specs, layers = self._kv_shares.specs, self._plan.layers
        for line in kv_room.shortages(available, specs, layers, self.vllm_config):
            logger.error(line)
        return self._kv_shares.common_bytes(available)

    def compile_or_warm_up_model(self) -> None:
        """Second half of the warm-up schedule."""
        with self._nothing_left_on_failure():
            values = self._warm_up(Phase.WARM_UP)
        self._is_set_up = True
        times = [
            value for answers in values.values() for value in answers.values() if value is not None
        ]
        compilation = self.vllm_config.compilation_config
        compilation.compilation_time = max((language for language, _ in times), default=0.0)
        compilation.encoder_compilation_time = max((encoder for _, encoder in times), default=0.0)
        logger.info("duration of each start-up step\n%s", as_text(self._progress.times.table()))
        self._board.serving()
        self._begin_heartbeat()

    def _warm_up(self, phase: Phase) -> dict[int, dict[int, Any]]:
        if not self._is_set_up:
            self._setup.append(partial(self._warm_up, phase))
        sizes = WarmupSizes(
            max_num_batched_tokens=self.scheduler_config.max_num_batched_tokens,
            max_num_seqs=self.scheduler_config.max_num_seqs,
            cpu_compiles=self.vllm_config.compilation_config.mode != CompilationMode.NONE,
            captured=self._plan.specs[0].shared.graph_tokens,
        )
        limit_s = self._config.warmup.step_timeout_s
        answers = warm_up(self._set, self.world, sizes, phase, self._progress, limit_s)
        if phase is Phase.WARM_UP:
            self._keep_off_compute_cores()
        return answers

    @property
    def _set(self) -> RankSet:
        assert self._ranks is not None, "the step `spawn` comes before"
        return self._ranks

    # --- restart and shutdown -----------------------------------------------------------------

    def restart(self) -> None:
        """Start all ranks again in their bundles, and bring them to where they were.

        Raises:
            RayHeteroError, PlacementError: they do not come up; none of them is left.
            RuntimeError, OSError, RayError: the same, as a rank, the system or Ray says.

        """
        assert self._connection is not None
        self.restarts_left -= 1
        self._close_ranks()
        with ExitStack() as on_failure:
            on_failure.callback(self._close_ranks)
            if ray_cluster.gone(self.world.node_ids):
                self.restarts_left = 0  # nodes do not come back
                refuse_dead_nodes(self.world)
            # Processes inherit their cores from the Ray that starts them.
            self._connection.keep_off(range(os.cpu_count() or 1))
            self._connect(self._spawn())
            self._set_up_again()
            on_failure.pop_all()
        self._board.serving()

    def shutdown(self) -> None:
        """Stop the actors, give the bundles back, leave or stop Ray.  Safe to call twice."""
        with self.shutdown_lock:
            if self.shutting_down:
                return
            self.shutting_down = True
        self._end_heartbeat()
        atexit.unregister(self._at_exit)
        with sigterm_held():
            self._give_back()
            self._board.take_down()
            if self._connection is not None:
                self._connection.close()
        layer_partition.restore_partition(self._given_partition)

    def _give_back(self) -> None:
        """Stop the actors and release their bundles."""
        self._close_ranks()
        if self._reservation is not None and self._reservation.is_own:
            ray_cluster.release(self._reservation.group)
        self._reservation = None


def _seconds_for_this_engine() -> float | None:
    """How long vLLM's engine process has run; None in a process of the user's."""
    if multiprocessing.parent_process() is None:
        return None
    return time.time() - psutil.Process().create_time()


def _shut_down_late(reference: weakref.ref[HeteroExecutor]) -> None:
    """Shut an engine down at exit, where neither vLLM's client nor its process has ended it."""
    executor = reference()
    if executor is not None:
        executor.shutdown()

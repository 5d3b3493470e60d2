"""vLLM's executor over GPU and CPU ranks.  Start-up reads like a table of contents:

discover → plan → reserve → spawn → connect → warm up.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import ray
import vllm.envs as envs
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

from placement.cluster import ray_cluster
from placement.cluster.assignment import Node, Turn
from placement.cluster.external_group import describe_group, nodes_within
from placement.errors import ClaimError, LayoutError, PlacementError
from ray_hetero.compat import engine_args, engine_core, message_queues, shared_batches
from ray_hetero.compat.engine_args import spec_of
from ray_hetero.errors import RankError, RayHeteroError
from ray_hetero.executor import actors
from ray_hetero.executor.failure import Failure
from ray_hetero.executor.lockstep import run_schedule
from ray_hetero.executor.rank_processes import RankProcesses
from ray_hetero.executor.rank_queues import AnswerQueue, RankQueues, RequestQueue, wait_until_ready
from ray_hetero.executor.recovery import RankRecovery
from ray_hetero.executor.rpc import GuardedExecutor
from ray_hetero.executor.watch import RankWatch
from ray_hetero.log import logger
from ray_hetero.observability.engine_info import EngineInfo, info_of
from ray_hetero.observability.progress import StartupProgress
from ray_hetero.observability.status_board import EngineBoard
from ray_hetero.observability.world_table import as_text, placement_table
from ray_hetero.planning import layer_plan, world_plan
from ray_hetero.planning.engine_facts import EngineFacts, facts_of
from ray_hetero.planning.layer_plan import LayerPlan
from ray_hetero.planning.socket_bandwidth import bandwidth_probe
from ray_hetero.preflight.cluster_software import software_of
from ray_hetero.preflight.refusals import (
    refuse_checkpoint,
    refuse_drafting,
    refuse_shared_experts,
)
from ray_hetero.preflight.unsupported_drafters import Drafting
from ray_hetero.runtime import exit_reason
from ray_hetero.runtime.core_binding import move_process
from ray_hetero.runtime.held_signals import sigterm_held
from ray_hetero.runtime.parent_watch import end_with_parent
from ray_hetero.runtime.ray_connection import RayConnection
from ray_hetero.worker import mixed_groups, warmup
from ray_hetero.worker.rank_config import check_agreement, shared_settings
from ray_hetero.worker.warmup import Phase, WarmupSizes
from ray_hetero.world import RankSpec, World

PLANNING_TRIES = 3
"""How often an engine plans when others claim first what it has planned with."""


class HeteroExecutor(GuardedExecutor):
    """One vLLM engine over GPUs and CPU sockets, a Ray actor a rank."""

    is_ray_hetero = True
    """Recognised by the plugin, which must not import this class to compare it."""

    def _init_executor(self) -> None:
        self._set_up_state()
        end_with_parent(self._kill_ranks)
        with self._nothing_left_on_failure():
            self._claim_devices()
            self._connect()

    def _claim_devices(self) -> None:
        """From discovery to claimed sockets; again from the start if another engine was faster."""
        # Of engines that start together one gets what it wants each time.
        tries = PLANNING_TRIES + self._turn.engines - 1
        for left in reversed(range(tries)):
            nodes = self._discover()
            self._plan(nodes)
            self._reserve()
            try:
                self._spawn()
            except ClaimError as error:
                if not left:
                    raise
                logger.warning("planning again: %s", error)
                self._give_back()
            else:
                break
        self._keep_off_compute_cores()

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

    def _set_up_state(self) -> None:
        self._finalizer = weakref.finalize(self, _shut_down_late, weakref.ref(self))
        self.shutting_down = False
        self.shutdown_lock = threading.Lock()
        self.response_mqs: list[AnswerQueue] = []
        self.rpc_broadcast_mq: RequestQueue | None = None
        self._connection: RayConnection | None = None
        self._external: ray_cluster.ExternalGroup | None = None
        self._reservation: ray_cluster.Reservation | None = None
        self._info: EngineInfo
        self._board = EngineBoard()
        self._watch: RankWatch | None = None
        self._given_partition = envs.VLLM_PP_LAYER_PARTITION
        self.world: World
        self._spec = spec_of(self.vllm_config)
        self._progress = StartupProgress(in_notebook=self._spec.in_notebook)
        self._config = self._spec.config
        self._guard(self._config.max_restarts)
        if self._config.max_restarts:
            engine_core.ask_when_a_step_fails(self.vllm_config, RankRecovery)
        self._turn = self._take_turn()
        self._get_parallel_sizes()

    def _take_turn(self) -> Turn:
        """This engine's place among the engines of a data-parallel server.

        They get one configuration and with it one name, by which their claims and actors could not
        be told apart.
        """
        index = self.parallel_config.data_parallel_index
        if self._spec.engine_args.data_parallel_size > 1:
            self.vllm_config.instance_id += f"-dp{index}"
        return Turn(index % self._spec.engines, self._spec.engines)

    def _discover(self) -> tuple[Node, ...]:
        with self._progress.step("discover") as step:
            if self._connection is None:
                self._connection = RayConnection(self._spec.ray_address)
            nodes = ray_cluster.discover(
                unit=self._config.cpu.unit,
                shares=self._config.cpu.ranks_per_socket,
                timeout_s=self._config.placement.timeout_s,
                is_own=self._connection.is_local,
            )
            nodes = self._within_group(nodes)
            gpus = sum(node.gpus for node in nodes)
            sockets = sum(len(node.sockets) for node in nodes)
            step.outcome = f"{len(nodes)} nodes, {gpus} GPUs, {sockets} CPU sockets"
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

    def _plan(self, nodes: Sequence[Node]) -> None:
        with self._progress.step("plan") as step:
            facts = facts_of(self.vllm_config)
            plan = self._layer_plan(nodes, facts)
            self.world = plan.world
            if self.world.has_cpu:
                refuse_checkpoint(self.model_config)
                refuse_shared_experts(self.parallel_config)
                self._check_drafting()
            self._memory = plan.memory_bytes()
            self._ranks = self._rank_specs(plan, nodes)
            engine_args.limit_batches_in_flight(
                self.vllm_config, self._batches_in_flight(self.world)
            )
            self._share_batches()
            step.outcome = str(self.world.layout)
        for warning in filter(None, (plan.warning, world_plan.sharing_warning(self.world.seats))):
            logger.warning(warning)
        threads = {rank.seat.rank: rank.threads for rank in self._ranks}
        self._info = info_of(
            self.vllm_config.instance_id,
            self.model_config.model,
            plan,
            facts.shape,
            threads,
            self._spec.metrics_path,
        )
        logger.info("\n%s", as_text(placement_table(self.world, threads)))
        for line in layer_plan.describe_split(plan):
            logger.info("plan: %s", line)

    def _check_drafting(self) -> None:
        speculative, stages = self.vllm_config.speculative_config, self.world.layout.stages
        if speculative is None:
            return
        refuse_drafting(Drafting(self.vllm_config, self._config, len(stages)))
        if speculative.uses_draft_kv_cache() and "cpu" in stages[-1]:
            refuse_checkpoint(speculative.draft_model_config)

    def _layer_plan(self, nodes: Sequence[Node], facts: EngineFacts) -> LayerPlan:
        try:
            return layer_plan.plan_layers(
                self._config,
                nodes,
                facts,
                pipeline_parallel_size=self.parallel_config.pipeline_parallel_size,
                tensor_parallel_size=self.parallel_config.tensor_parallel_size,
                partition=self._given_partition,
                measure=bandwidth_probe(nodes, self._config.placement.timeout_s),
                turn=self._turn,
            )
        except LayoutError as error:
            if self._external is None:
                raise
            inside = describe_group(self._external.bundles, nodes)
            raise LayoutError(f"{error} {inside}") from None

    def _rank_specs(self, plan: LayerPlan, nodes: Sequence[Node]) -> list[RankSpec]:
        world = plan.world
        shared = shared_settings(
            self.vllm_config,
            has_cpu=world.has_cpu,
            graph_tokens=mixed_groups.graph_tokens(
                self._spec.engine_args,
                self._config.gpu.in_mixed_groups,
                max_num_seqs=self.scheduler_config.max_num_seqs,
                max_num_batched_tokens=self.scheduler_config.max_num_batched_tokens,
            ),
        )
        partition = ",".join(map(str, world.layers))
        # The driver's own copy of the configuration answers questions about layers too.
        os.environ["VLLM_PP_LAYER_PARTITION"] = partition
        threads = {
            seat.rank: world_plan.compute_threads(seat, self._config.cpu)
            for seat in world.seats
            if seat.kind == "cpu"
        }
        spare, near_gpus = {}, {}
        for node in nodes:
            seats = [s for s in world.seats if s.rank in threads and s.node_id == node.node_id]
            computing = [threads[seat.rank] for seat in seats]
            spare[node.node_id] = world_plan.spare_cpus(seats, computing)
            near_gpus[node.node_id] = world_plan.cpus_near_gpus(
                node.host, computing, self._config.cpu, is_driver_node=node.is_driver
            )
        self._spare_here = spare.get(self._node_id, ())
        hosts = {node.node_id: node.host for node in nodes}
        return [
            RankSpec(
                world=world,
                seat=seat,
                engine=self._spec,
                shared=shared,
                threads=threads.get(seat.rank, ()),
                spare=spare[seat.node_id],
                layer_partition=partition,
                forecast=plan.forecast(seat.rank),
                gpus_beside=world_plan.gpus_beside(seat, hosts[seat.node_id]),
                near_gpus=near_gpus[seat.node_id],
            )
            for seat in world.seats
        ]

    def _keep_off_compute_cores(self) -> None:
        """Move this process, and a Ray that it started, to the cores that were kept back.

        Only in vLLM's own engine process; a notebook's process is the user's.
        """
        # A driver inside a cluster may be held to other cores than the node's Ray.
        spare = os.sched_getaffinity(0).intersection(self._spare_here)
        if spare and multiprocessing.parent_process() is not None:
            move_process(os.getpid(), spare)
            assert self._connection is not None
            assert self._processes is not None
            self._connection.keep_off(spare, besides=self._processes.pids)

    def _batches_in_flight(self, world: World) -> int:
        asked = self._config.pipeline.batches_in_flight
        if asked != "auto":
            return asked
        if world.has_cpu and self.vllm_config.speculative_config is not None:
            # With more, vLLM's scheduler would take a batch's drafts for tokens before the batch
            # has told which token comes before them.
            return 1
        if world.has_cpu and not world.is_cpu_only and self._config.objective == "latency":
            return 1
        return int(self.vllm_config.max_concurrent_batches)

    def _share_batches(self) -> None:
        """Divide the requests, where somebody wants more than one batch and not another scheduler.

        A draft model's tokens would be counted as requests.
        """
        config, vllm_config = self._config, self.vllm_config
        is_wanted = config.pipeline.batches_in_flight != "auto" or config.objective == "throughput"
        if (
            is_wanted
            and vllm_config.max_concurrent_batches > 1
            and self.scheduler_config.scheduler_cls is None
            and vllm_config.speculative_config is None
        ):
            self.scheduler_config.scheduler_cls = shared_batches.CLASS

    @property
    def _node_id(self) -> str:
        return str(ray.get_runtime_context().get_node_id())

    def _reserve(self) -> None:
        with self._progress.step("reserve"):
            if self._external is not None:
                self._reservation = self._external.reservation(self.world.seats)
                return
            self._reservation = ray_cluster.reserve(
                self.world.seats,
                accelerator_type=self._config.gpu.accelerator_type,
                timeout_s=self._config.placement.timeout_s,
                name=f"ray_hetero-{self.vllm_config.instance_id}",
                memory_bytes=ray_cluster.reservable_memory(
                    self._memory, self.world.seats, engines=self._turn.engines
                ),
            )

    def _spawn(self) -> None:
        with self._progress.step("spawn"):
            assert self._reservation is not None
            software = software_of(self.world, self._config, self.model_config.model)
            self.ray_worker_handles = [
                actors.spawn(
                    rank,
                    self._reservation,
                    actors.environment_of(rank, software[rank.seat.node_id]),
                )
                for rank in self._ranks
            ]
            fingerprints = self._ask(
                "prepare", what="starting actors", limit="startup.actor_timeout_s"
            )
            self._processes = RankProcesses(self.world, [found.place for found in fingerprints])
            for seat in self.world.seats:
                logger.info("started %s", self._processes.describe(seat.rank))
            check_agreement(fingerprints)
            self._physical_gpus = {
                node: tuple(
                    sorted(
                        gpu
                        for seat, answer in zip(self.world.seats, fingerprints, strict=True)
                        if seat.node_id == node
                        for gpu in answer.physical_gpus
                    )
                )
                for node in {seat.node_id for seat in self.world.seats}
            }

    def _connect(self) -> None:
        with self._progress.step("connect"):
            self._board.starting(self._info)
            local = [seat.rank for seat in self.world.seats if seat.is_driver_node]
            self.rpc_broadcast_mq = RequestQueue(
                self.world_size,
                len(local),
                local_reader_ranks=local,
                max_chunk_bytes=envs.VLLM_MQ_MAX_CHUNK_BYTES_MB << 20,
                connect_ip=ray.util.get_node_ip_address(),
            )
            self.rpc_broadcast_mq.failure = self._failure
            self.rpc_broadcast_mq.limit_s = self._config.warmup.step_timeout_s
            handle = self.rpc_broadcast_mq.export_handle()
            (init_method,) = actors.gather(
                self.world,
                [self.ray_worker_handles[0].actor.create_dist_init_method.remote()],
                what="opening the rendezvous",
                timeout_s=self._config.startup.actor_timeout_s,
                key="startup.actor_timeout_s",
                processes=self._processes,
            )
            answers = self._ask(
                "start",
                init_method,
                handle,
                what="joining groups and loading weights",
                limit="startup.load_timeout_s",
                by_node=self._physical_gpus,
            )
            self.response_mqs = [
                AnswerQueue(MessageQueue.create_from_handle(answer["handle"], 0), self._failure)
                for answer in answers
            ]
            # The ranks subscribe inside run(), so it must be under way before the wait.
            for rank in self.ray_worker_handles:
                rank.run_ref = rank.actor.run.remote()
            assert self._processes is not None
            self._watch = RankWatch(self._processes, self.ray_worker_handles, self._fail)
            wait_until_ready(
                [self.rpc_broadcast_mq, *self.response_mqs],
                self._failure,
                self._config.startup.actor_timeout_s,
                "startup.actor_timeout_s",
            )
            message_queues.unlink_once_attached(self.rpc_broadcast_mq)
            self.output_rank = self._get_output_rank()

    def _ask(
        self,
        method: str,
        *args: Any,
        what: str,
        limit: str,
        by_node: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Call one method on all actors; `by_node` adds an argument that differs per node."""
        section, name = limit.split(".")
        refs = []
        for handle, seat in zip(self.ray_worker_handles, self.world.seats, strict=True):
            extra = () if by_node is None else (by_node[seat.node_id],)
            refs.append(getattr(handle.actor, method).remote(*args, *extra))
        timeout_s = getattr(getattr(self._config, section), name)
        return actors.gather(
            self.world,
            refs,
            what=what,
            timeout_s=timeout_s,
            key=limit,
            processes=self._processes,
        )

    # --- warm up: vLLM calls these after _init_executor -------------------------------------

    def get_supported_kv_cache_layouts(self) -> list[list[str]]:
        """The layouts that every rank supports, the same list for each, as vLLM insists on."""
        offered: list[list[str]] = super().get_supported_kv_cache_layouts()
        common = [name for name in offered[0] if all(name in names for names in offered)]
        if not common:
            raise self._fail(f"no KV cache layout suits all ranks: {offered}")
        return [common] * len(offered)

    def determine_available_memory(self) -> list[int]:
        """First half of the warm-up schedule; KV cache bytes of each rank."""
        with self._nothing_left_on_failure():
            values = self._warm_up(Phase.MEMORY)
        return [
            next(value for value in values[seat.rank].values() if value is not None)
            for seat in self.world.seats
        ]

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
        self._board.serving()

    def _warm_up(self, phase: Phase) -> dict[int, dict[int, Any]]:
        if not self._is_set_up:
            self._setup.append(partial(self._warm_up, phase))
        sizes = WarmupSizes(
            max_num_batched_tokens=self.scheduler_config.max_num_batched_tokens,
            max_num_seqs=self.scheduler_config.max_num_seqs,
            cpu_compiles=not self.model_config.enforce_eager,
            captured=self._ranks[0].shared.graph_tokens,
        )
        steps = warmup.schedule(
            self.world.layout, sizes, phase, has_boundary=self.world.has_boundary
        )
        total = len(steps[0]) * self.world_size
        with self._progress.step("warm up", total=total) as bar:
            bar.outcome = phase.value
            try:
                answers = run_schedule(
                    self._rank_queues(),
                    self.world,
                    steps,
                    step_timeout_s=self._config.warmup.step_timeout_s,
                    on_step=lambda rank, step: bar.advance(),
                    look=self._look,
                )
            except RankError as error:
                raise self._fail(str(error)) from None
        message_queues.unlink_sockets(self.rpc_broadcast_mq)
        return answers

    def _rank_queues(self) -> RankQueues:
        assert self.rpc_broadcast_mq is not None
        return RankQueues(self.world, self.rpc_broadcast_mq, self.response_mqs, self._failure)

    # --- restart and shutdown ---------------------------------------------------------------

    def restart(self) -> None:
        """Start all ranks again in their bundles, and bring them to where they were.

        Raises:
            RayHeteroError, PlacementError: they do not come up; none of them is left.

        """
        assert self._connection is not None
        self.restarts_left -= 1
        self._disconnect()
        self._failure = Failure()
        try:
            # Processes inherit their cores from the Ray that starts them.
            self._connection.keep_off(range(os.cpu_count() or 1))
            self._spawn()
            self._keep_off_compute_cores()
            self._connect()
            self._set_up_again()
        except (RayHeteroError, PlacementError):
            self._disconnect()
            raise
        self._board.serving()

    def _disconnect(self) -> None:
        """Stop the ranks, and whatever of this process belongs to them."""
        if self._watch is not None:
            self._watch.stop()
        self._watch = None
        self._kill_ranks()
        self.ray_worker_handles = []
        self._processes = None
        if self.rpc_broadcast_mq is not None:
            message_queues.unlink_sockets(self.rpc_broadcast_mq)
            self.rpc_broadcast_mq.shutdown()
        for queue in self.response_mqs:
            queue.shutdown()
        self.rpc_broadcast_mq = None
        self.response_mqs = []
        self.futures_queue.clear()

    def shutdown(self) -> None:
        """Stop the actors, give the bundles back, leave or stop Ray.  Safe to call twice."""
        with self.shutdown_lock:
            if self.shutting_down:
                return
            self.shutting_down = True
        with sigterm_held():
            self._give_back()
            self._board.take_down()
            if self._connection is not None:
                self._connection.close()
        _restore("VLLM_PP_LAYER_PARTITION", self._given_partition)

    def _give_back(self) -> None:
        """Stop the actors and release their bundles."""
        self._disconnect()
        if self._reservation is not None and self._reservation.is_own:
            ray_cluster.release(self._reservation.group)
        self._reservation = None


def _restore(variable: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(variable, None)
    else:
        os.environ[variable] = value


def _shut_down_late(reference: weakref.ref[HeteroExecutor]) -> None:
    """At the interpreter's exit; before it, vLLM's client ends an engine that was dropped."""
    executor = reference()
    if executor is not None:
        executor.shutdown()

"""vLLM's executor over GPU and CPU ranks.  Start-up reads like a table of contents:

discover → plan → reserve → spawn → connect → warm up.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ray
import vllm.envs as envs
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
from vllm.v1.executor.multiproc_executor import FutureWrapper
from vllm.v1.executor.ray_executor_v2 import RayExecutorV2

from placement import cluster
from placement.assignment import Node
from placement.errors import ClaimError, PlacementError
from ray_hetero import actors, last_words, layer_plan, planning, vllm_private, warmup
from ray_hetero.engine_facts import facts_of
from ray_hetero.errors import CpuSiteError, RankError, RayHeteroError
from ray_hetero.layer_plan import LayerPlan
from ray_hetero.local_ray import RayConnection
from ray_hetero.lockstep import run_schedule
from ray_hetero.node_software import NodeSoftware, read_node_software
from ray_hetero.progress import StartupProgress, logger
from ray_hetero.rank_config import check_agreement, shared_settings
from ray_hetero.rank_queues import RankQueues
from ray_hetero.socket_bandwidth import bandwidth_probe
from ray_hetero.vllm_private import launch_of
from ray_hetero.warmup import Phase, WarmupSizes
from ray_hetero.watch import RankWatch
from ray_hetero.world import RankLaunch, World
from ray_hetero.world_table import as_text, placement_table


class HeteroExecutor(RayExecutorV2):  # type: ignore[misc]
    """One vLLM engine over GPUs and CPU sockets, a Ray actor a rank."""

    is_ray_hetero = True
    """Recognised by the plugin, which must not import this class to compare it."""

    def _init_executor(self) -> None:
        self._set_up_state()
        with self._nothing_left_on_failure():
            self._claim_devices()
            self._connect()

    def _claim_devices(self) -> None:
        """From discovery to claimed sockets; again from the start if another engine was faster."""
        for is_last in (False, False, True):
            nodes = self._discover()
            self._plan(nodes)
            self._reserve()
            try:
                self._spawn()
            except ClaimError as error:
                if is_last:
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
            last_words.leave(str(error))
            raise
        finally:
            if not is_done:
                self.shutdown()

    def _set_up_state(self) -> None:
        self._finalizer = weakref.finalize(self, _shut_down_late, weakref.ref(self))
        self.is_failed = False
        self.failure_callback: Callable[[], None] | None = None
        self.shutting_down = False
        self.shutdown_lock = threading.Lock()
        self.ray_worker_handles: list[actors.RankHandle] = []
        self.response_mqs: list[MessageQueue] = []
        self.rpc_broadcast_mq: MessageQueue | None = None
        self.futures_queue: deque[FutureWrapper] = deque()
        self._connection: RayConnection | None = None
        self._placement_group: Any = None
        self._watch: RankWatch | None = None
        self._given_partition = envs.VLLM_PP_LAYER_PARTITION
        self.world: World
        self._progress = StartupProgress()
        self._launch = launch_of(self.vllm_config)
        self._config = self._launch.config
        self._get_parallel_sizes()

    def _discover(self) -> tuple[Node, ...]:
        with self._progress.step("discover") as step:
            if self._connection is None:
                self._connection = RayConnection(self._launch.ray_address)
            nodes = cluster.discover(
                unit=self._config.cpu.unit,
                shares=self._config.cpu.ranks_per_socket,
                timeout_s=self._config.placement.timeout_s,
            )
            gpus = sum(node.gpus for node in nodes)
            sockets = sum(len(node.sockets) for node in nodes)
            step.outcome = f"{len(nodes)} nodes, {gpus} GPUs, {sockets} CPU sockets"
        return nodes

    def _plan(self, nodes: Sequence[Node]) -> None:
        with self._progress.step("plan") as step:
            plan = layer_plan.plan_layers(
                self._config,
                nodes,
                facts_of(self.vllm_config),
                pipeline_parallel_size=self.parallel_config.pipeline_parallel_size,
                tensor_parallel_size=self.parallel_config.tensor_parallel_size,
                partition=self._given_partition,
                measure=bandwidth_probe(nodes, self._config.placement.timeout_s),
            )
            self.world = plan.world
            self._ranks = self._rank_launches(plan)
            vllm_private.limit_batches_in_flight(
                self.vllm_config, self._batches_in_flight(self.world)
            )
            step.outcome = str(self.world.layout)
        for warning in filter(None, (plan.warning, planning.sharing_warning(self.world.seats))):
            logger.warning(warning)
        threads = {rank.seat.rank: rank.threads for rank in self._ranks}
        logger.info("\n%s", as_text(placement_table(self.world, threads)))
        for line in layer_plan.describe_split(plan):
            logger.info("plan: %s", line)

    def _rank_launches(self, plan: LayerPlan) -> list[RankLaunch]:
        world = plan.world
        shared = shared_settings(self.vllm_config, has_cpu=world.has_cpu)
        partition = ",".join(map(str, world.layers))
        # The driver's own copy of the configuration answers questions about layers too.
        os.environ["VLLM_PP_LAYER_PARTITION"] = partition
        threads = {
            seat.rank: planning.compute_threads(seat, self._config.cpu)
            for seat in world.seats
            if seat.kind == "cpu"
        }
        spare = {node: self._spare_cpus(world, threads, node) for node in world.node_ids}
        self._spare_here = spare.get(self._node_id, ())
        return [
            RankLaunch(
                world=world,
                seat=seat,
                launch=self._launch,
                shared=shared,
                threads=threads.get(seat.rank, spare[seat.node_id]),
                layer_partition=partition,
                forecast=plan.forecast(seat.rank),
            )
            for seat in world.seats
        ]

    def _keep_off_compute_cores(self) -> None:
        """Move this process, and a Ray that it started, to the cores that were kept back.

        Only in vLLM's own engine process; a notebook's process is the user's.
        """
        if self._spare_here and multiprocessing.parent_process() is not None:
            os.sched_setaffinity(0, self._spare_here)
            assert self._connection is not None
            self._connection.keep_off(self._spare_here)

    def _batches_in_flight(self, world: World) -> int:
        asked = self._config.pipeline.batches_in_flight
        if asked != "auto":
            return asked
        if world.has_cpu and not world.is_cpu_only and self._config.objective == "latency":
            return 1
        return int(self.vllm_config.max_concurrent_batches)

    @property
    def _node_id(self) -> str:
        return str(ray.get_runtime_context().get_node_id())

    @staticmethod
    def _spare_cpus(
        world: World, threads: dict[int, tuple[int, ...]], node_id: str
    ) -> tuple[int, ...]:
        seats = [seat for seat in world.seats if seat.kind == "cpu" and seat.node_id == node_id]
        return planning.spare_cpus(seats, [threads[seat.rank] for seat in seats])

    def _reserve(self) -> None:
        with self._progress.step("reserve"):
            self._placement_group = cluster.reserve(
                self.world.seats,
                accelerator_type=self._config.gpu.accelerator_type,
                timeout_s=self._config.placement.timeout_s,
                name=f"ray_hetero-{self.vllm_config.instance_id}",
            )

    def _spawn(self) -> None:
        with self._progress.step("spawn"):
            software = self._node_software()
            self.ray_worker_handles = [
                actors.spawn(
                    rank,
                    self._placement_group,
                    actors.environment_of(rank, software[rank.seat.node_id]),
                )
                for rank in self._ranks
            ]
            fingerprints = self._ask(
                "prepare", what="starting actors", limit="startup.actor_timeout_s"
            )
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

    def _node_software(self) -> dict[str, NodeSoftware]:
        software = cluster.on_nodes(
            read_node_software, self.world.node_ids, self._config.placement.timeout_s
        )
        problems = sorted(
            {
                f"node {seat.node_name}: {found.problem if found else 'no answer'}"
                for seat in self.world.seats
                if seat.kind == "cpu"
                and ((found := software.get(seat.node_id)) is None or found.problem)
            }
        )
        if problems:
            raise CpuSiteError("; ".join(problems))
        return software

    def _connect(self) -> None:
        with self._progress.step("connect"):
            local = [seat.rank for seat in self.world.seats if seat.is_driver_node]
            self.rpc_broadcast_mq = MessageQueue(
                self.world_size,
                len(local),
                local_reader_ranks=local,
                max_chunk_bytes=envs.VLLM_MQ_MAX_CHUNK_BYTES_MB << 20,
                connect_ip=ray.util.get_node_ip_address(),
            )
            handle = self.rpc_broadcast_mq.export_handle()
            init_method = ray.get(
                self.ray_worker_handles[0].actor.create_dist_init_method.remote(),
                timeout=self._config.startup.actor_timeout_s,
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
                MessageQueue.create_from_handle(answer["handle"], 0) for answer in answers
            ]
            # The ranks subscribe inside run(), so it must be under way before the wait.
            for rank in self.ray_worker_handles:
                rank.run_ref = rank.actor.run.remote()
            self._watch = RankWatch(self.world, self.ray_worker_handles, self._on_rank_death)
            self.rpc_broadcast_mq.wait_until_ready()
            for queue in self.response_mqs:
                queue.wait_until_ready()
            vllm_private.unlink_once_attached(self.rpc_broadcast_mq)
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
        return actors.gather(self.world, refs, what=what, timeout_s=timeout_s, key=limit)

    # --- warm up: vLLM calls these after _init_executor -------------------------------------

    def get_supported_kv_cache_layouts(self) -> list[list[str]]:
        """The layouts that every rank supports, the same list for each, as vLLM insists on."""
        offered: list[list[str]] = super().get_supported_kv_cache_layouts()
        common = [name for name in offered[0] if all(name in names for names in offered)]
        if not common:
            raise RankError(f"no KV cache layout suits all ranks: {offered}")
        return [common] * len(offered)

    def determine_available_memory(self) -> list[int]:
        """First half of the warm-up schedule; KV cache bytes of each rank."""
        values = self._warm_up(Phase.MEMORY)
        return [
            next(value for value in values[seat.rank].values() if value is not None)
            for seat in self.world.seats
        ]

    def compile_or_warm_up_model(self) -> None:
        """Second half of the warm-up schedule."""
        values = self._warm_up(Phase.WARM_UP)
        times = [
            value for answers in values.values() for value in answers.values() if value is not None
        ]
        compilation = self.vllm_config.compilation_config
        compilation.compilation_time = max((language for language, _ in times), default=0.0)
        compilation.encoder_compilation_time = max((encoder for _, encoder in times), default=0.0)

    def _warm_up(self, phase: Phase) -> dict[int, dict[int, Any]]:
        sizes = WarmupSizes(
            max_num_batched_tokens=self.scheduler_config.max_num_batched_tokens,
            max_num_seqs=self.scheduler_config.max_num_seqs,
            cpu_compiles=not self.model_config.enforce_eager,
        )
        steps = warmup.schedule(
            self.world.layout, sizes, phase, has_boundary=self.world.has_boundary
        )
        total = len(steps[0]) * self.world_size
        with self._progress.step("warm up", total=total) as bar:
            bar.outcome = phase.value
            return run_schedule(
                self._rank_queues(),
                self.world,
                steps,
                step_timeout_s=self._config.warmup.step_timeout_s,
                on_step=lambda rank, step: bar.advance(),
            )

    def _rank_queues(self) -> RankQueues:
        assert self.rpc_broadcast_mq is not None
        return RankQueues(
            self.world, self.rpc_broadcast_mq, self.response_mqs, lambda: self.is_failed
        )

    # --- failure and shutdown ---------------------------------------------------------------

    def _on_rank_death(self, report: str) -> None:
        """Runs in the watching thread: end the engine, the report last in its log."""
        self.is_failed = True
        logger.error("ray_hetero: %s; stopping the engine", report)
        last_words.leave(report)
        callback, self.failure_callback = self.failure_callback, None
        self.shutdown()
        if callback is not None:
            callback()

    def shutdown(self) -> None:
        """Stop the actors, give the bundles back, leave or stop Ray.  Safe to call twice."""
        with self.shutdown_lock:
            if self.shutting_down:
                return
            self.shutting_down = True
        if self._watch is not None:
            self._watch.stop()
        self._give_back()
        for queue in (self.rpc_broadcast_mq, *self.response_mqs):
            if queue is not None:
                queue.shutdown()
        self.rpc_broadcast_mq = None
        self.response_mqs = []
        if self._connection is not None:
            self._connection.close()
        _restore("VLLM_PP_LAYER_PARTITION", self._given_partition)

    def _give_back(self) -> None:
        """Stop the actors and release their bundles."""
        if ray.is_initialized():
            for handle in self.ray_worker_handles:
                ray.kill(handle.actor)
        self.ray_worker_handles = []
        if self._placement_group is not None:
            cluster.release(self._placement_group)
            self._placement_group = None


def _restore(variable: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(variable, None)
    else:
        os.environ[variable] = value


def _shut_down_late(reference: weakref.ref[HeteroExecutor]) -> None:
    executor = reference()
    if executor is not None:
        executor.shutdown()

"""The process of one rank: a Ray actor around vLLM's worker process.

Life: created in its bundle with its environment → `prepare` builds its configuration →
`start` joins the groups and loads the weights → `run` serves until it is killed.
"""

from __future__ import annotations

from ray_hetero.worker import resting_collector  # before all that it would look through

# isort: split
from ray_hetero.worker import cuda_init  # before torch and vLLM, which look for GPUs

# isort: split
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import psutil
import torch
from vllm.config import CompilationMode, VllmConfig
from vllm.distributed.parallel_state import get_tp_group
from vllm.platforms import current_platform
from vllm.v1.executor.multiproc_executor import WorkerProc
from vllm.v1.executor.ray_executor_v2 import RayWorkerProc

from placement.units import GIB
from ray_hetero.compat import stage_layers
from ray_hetero.compat.models import (
    expert_router,
    latent_attention,
    pipeline_models,
)
from ray_hetero.compat.worker import (
    late_tokens,
    layer_partition,
    message_queues,
    model_runner,
    parallel_state,
    v2_kernels,
    v2_runner,
)
from ray_hetero.distributed.groups import HeteroGroup, set_world
from ray_hetero.distributed.stage_experts import RemoteExperts
from ray_hetero.errors import UnsupportedError
from ray_hetero.kernels.experts.routing import route
from ray_hetero.log import logger
from ray_hetero.observability.metrics import RayMetrics, labels_of
from ray_hetero.observability.status_board import RankReport, RankReporter
from ray_hetero.preflight.platform import is_pretending
from ray_hetero.runtime.core_binding import move_process
from ray_hetero.worker import last_layer, missing_operators
from ray_hetero.worker.cpu_rank import CpuRank
from ray_hetero.worker.driver_calls import TELL_TOKENS, DriverCalls
from ray_hetero.worker.process_setup import secure, settle
from ray_hetero.worker.rank_config import Fingerprint, build_rank_config, fingerprint
from ray_hetero.worker.rank_worker import RankWorker
from ray_hetero.worker.speculation import Speculation
from ray_hetero.worker.warmup_actions import RankContext, run_ahead
from ray_hetero.worker.warmup_schedule import runs_ahead
from ray_hetero.world import RankSpec

resting_collector.wake()


def prepare_platform_of_cpus(vllm_config: VllmConfig) -> None:
    """Let vLLM's operators for CPUs compute what this package expects of them.

    Raises:
        UnsupportedError: as of `missing_operators.stand_in`.

    """
    missing_operators.stand_in(vllm_config)
    expert_router.use_routing(route)
    latent_attention.turn_all_heads()
    model_runner.count_without_compiler()
    if vllm_config.use_v2_model_runner:
        v2_kernels.put_in_place()
        v2_runner.take_tokens_from_driver()
    if vllm_config.compilation_config.mode == CompilationMode.NONE:
        # vLLM has functions of its own compiled nevertheless, by a compiler that a node without
        # compiled models does not need to have.
        torch.compiler.set_stance("force_eager")


class RankActor(RayWorkerProc):  # type: ignore[misc]
    """Ray actor class of a rank; scheduled into the bundle that stands for its device."""

    worker: Any

    def __init__(self, rank: RankSpec, secrets: Mapping[str, str]) -> None:
        # vLLM's own initialisation waits for `start`: it needs a configuration of this platform.
        self._rank = rank
        self._is_driver_node = rank.seat.is_driver_node
        self._remote_experts: RemoteExperts | None = None
        self._serving_cpus: tuple[int, ...] = ()
        self._own_cpus = rank.own
        settle(rank, secrets)

    def prepare(self) -> Fingerprint:
        """Build this rank's configuration and answer what it would run with."""
        self._claim = secure(self._rank)
        self._vllm_config = build_rank_config(self._rank)
        self._parallel_config = self._vllm_config.parallel_config
        gpus: list[int] = []
        if current_platform.is_cuda():
            _, gpus = self.get_node_and_physical_gpu_ids()
        return fingerprint(self._rank.seat.rank, self._vllm_config, gpus)

    def start(
        self, init_method: str, input_handle: Any, physical_gpus: tuple[int, ...]
    ) -> dict[str, Any]:
        """Join the groups, load the weights, open the message queues.

        Args:
            init_method: rendezvous of the world, made by rank 0.
            input_handle: handle of the driver's broadcast queue.
            physical_gpus: GPUs of all GPU ranks on this node, by local rank.

        """
        began = time.perf_counter()
        seat, world = self._rank.seat, self._rank.world
        device_backend = current_platform.dist_backend
        if not world.is_stock:
            device_backend = parallel_state.use_gloo_world()
        set_world(world, device_backend)
        parallel_state.use_groups(HeteroGroup)
        if not world.layout.is_even:
            parallel_state.use_stages(
                [list(world.layout.ranks(stage)) for stage in range(len(world.layout.stages))],
                # A rank's own pipeline comes last, which is the one that its group keeps.
                [list(ranks) for ranks in reversed(world.layout.pipelines())],
            )
            layer_partition.use_stage(seat.stage)
        if physical_gpus:
            self._parallel_config.assigned_physical_gpu_ids = list(physical_gpus)
            if seat.kind == "gpu":
                self._serving_cpus = self._stay_near_gpu(physical_gpus[seat.local_rank])
        cpu_rank = None
        if current_platform.is_cpu():
            prepare_platform_of_cpus(self._vllm_config)
        if seat.kind == "cpu":
            cpu_rank = CpuRank(self._rank, self._vllm_config, self._prompt_gpu(physical_gpus))
        layer_partition.set_partition(world.layers)
        pipeline_models.prepare_loading(has_cpu=world.has_cpu)
        speculation = Speculation.of(self._vllm_config, world, seat)
        if speculation is not None:
            speculation.before_loading()
        if world.experts:
            model = self._vllm_config.model_config
            self._remote_experts = RemoteExperts(
                self._rank, model.get_total_num_hidden_layers(), model.dtype
            )
        WorkerProc.__init__(
            self,
            vllm_config=self._vllm_config,
            local_rank=seat.local_rank,
            rank=seat.rank,
            distributed_init_method=init_method,
            input_shm_handle=input_handle,
            shared_worker_lock=None,
            is_driver_worker=seat.tensor_rank == 0,
        )
        loaded = time.perf_counter()
        pipeline_models.read_per_layer_inputs()
        if len(world.layers) > 1:
            self._check_layers(world.layers, seat.stage)
        if speculation is not None:
            speculation.loaded(self.worker.model_runner)
        if self._remote_experts is not None:
            self._remote_experts.connect()
        if cpu_rank is not None:
            cpu_rank.loaded(self.worker.model_runner)
        last = last_layer.install(self.worker.model_runner, self._vllm_config, world, seat)
        if self.worker.model_runner.device.type == "cpu" and not self._has_v2_runner:
            model_runner.draw_for_kept_tokens_only(self.worker.model_runner)
        if world.layout.is_mixed(seat.stage):
            model_runner.share_samples(self.worker.model_runner)
            model_runner.leave_graphs_out_of_profile(self.worker.model_runner)
        ahead = runs_ahead(
            world.layout, seat.stage,
            compiles=self._vllm_config.compilation_config.mode != CompilationMode.NONE,
            has_others=bool(world.experts) or self._parallel_config.data_parallel_size > 1,
        )  # fmt: skip
        output = None if cpu_rank is None else cpu_rank.output
        context = replace(self._context(), has_run_ahead=ahead, output=output)
        self.worker = RankWorker(
            self.worker, context, seat.stage, self._rank.forecast,
            experts=self._remote_experts, cpu_rank=cpu_rank, last_layer=last,
        )  # fmt: skip
        seconds = {
            "joining groups and loading weights": loaded - began,
            "making weights ready for the kernels": time.perf_counter() - loaded,
        }
        if ahead:
            began = time.perf_counter()
            run_ahead(self.worker.worker, self._serving_cpus, self._own_cpus)
            seconds["dummy forward pass while other ranks load"] = time.perf_counter() - began
        return {**self.wait_for_init(), "seconds": seconds}

    def _check_layers(self, layers: Sequence[int], stage: int) -> None:
        """See that the loaded model has the layers of its stage."""
        first = sum(layers[:stage])
        own = range(first, first + layers[stage])
        stage_layers.check_layers_of_stage(self.worker.model_runner.get_model(), own, sum(layers))

    def _prompt_gpu(self, physical_gpus: tuple[int, ...]) -> torch.device | None:
        """The GPU that may compute this CPU rank's prompts: near its socket, else of its node.

        Raises:
            UnsupportedError: one was asked for, and CUDA shows none.

        """
        if is_pretending() and self._rank.world.has_gpu:
            return torch.device("cpu")
        asked = self._rank.engine.config.cpu.prefill_on_gpu
        if not physical_gpus or not asked:
            return None
        if cuda_init.PROBLEM:
            problem = f"no GPU computes this rank's prompts: {cuda_init.PROBLEM}"
            if asked is True:
                raise UnsupportedError(f"{problem}. Set cpu.prefill_on_gpu to false.")
            logger.warning("%s (cpu.prefill_on_gpu)", problem)
            return None
        near = [gpu for gpu in physical_gpus if gpu in self._rank.gpus_beside]
        gpus = near or physical_gpus
        return torch.device("cuda", gpus[self._rank.seat.local_rank % len(gpus)])

    def _stay_near_gpu(self, gpu: int) -> tuple[int, ...]:
        """Load and compile near the GPU; answers the logical CPUs to serve on."""
        cpus = self._rank.near_gpus.get(gpu, ())
        if cpus:
            near = self._rank.own_near_gpus.get(gpu, cpus)
            move_process(os.getpid(), near)
            self._own_cpus = near or self._own_cpus
            rank = self._rank.seat.rank
            logger.info("gpu rank %d serves on CPUs %s, near GPU %d", rank, cpus, gpu)
        return cpus or self._rank.spare

    def run(self) -> None:
        """Serve until killed; the driver has mapped the answer queue when this goes on."""
        self.rpc_broadcast_mq.wait_until_ready()
        self.worker_response_mq.wait_until_ready()
        message_queues.unlink_once_attached(self.worker_response_mq)
        # No tidy end: to leave its groups a rank would wait for peers that may be gone.
        engine, seat = self._rank.shared.instance_id, self._rank.seat
        labels = labels_of(engine, seat.rank, seat.stage, seat.kind, seat.node_name)
        with RankReporter(engine, self._report, RayMetrics(labels)):
            self.worker_busy_loop()

    def worker_busy_loop(self) -> None:
        """Serve calls until a step fails; its error is this rank's end, which the driver watches.

        vLLM's own goes on, and tells of errors only where the rank that gives the answers fails:
        behind a stage that has failed, all others would wait.
        """
        message_queues.answer_untraced(self)
        if self._remote_experts is not None:
            message_queues.answer_if_well(self, self._problem)
        calls = DriverCalls(self.rpc_broadcast_mq)
        self._take_late_tokens(calls)
        first = calls.next()
        # The driver sends once all ranks serve, and these have connected to their groups' queues.
        for queue in (self.worker_response_mq, get_tp_group().mq_broadcaster):
            if queue is not None:
                message_queues.unlink_sockets(queue)
        message_queues.answer(self, first)
        while self.worker.failure is None:
            message_queues.answer(self, calls.next())
        raise self.worker.failure

    @property
    def _has_v2_runner(self) -> bool:
        """Whether this CPU rank has vLLM's V2 model runner."""
        return self._rank.seat.kind == "cpu" and bool(self._vllm_config.use_v2_model_runner)

    def _take_late_tokens(self, calls: DriverCalls) -> None:
        """Let steps begin without their tokens, where the driver schedules ahead of these."""
        stage, stages = self._rank.seat.stage, self._rank.world.layout.stages
        if self._has_v2_runner and stage < len(stages) - 1:
            runner = self.worker.worker.model_runner
            runner.pp_handler.attach(runner)
            self.worker.driver_tokens = runner.pp_handler
        if not self._rank.shared.schedules_ahead or stage == len(stages) - 1:
            return

        def wait() -> late_tokens.Sampled:
            _, (sampled,), _, _ = calls.next_of(TELL_TOKENS)
            return sampled  # type: ignore[no-any-return]

        runner = self.worker.worker.model_runner
        self.worker.late_tokens = late_tokens.LateTokens(runner, None if stage else wait)

    def _problem(self) -> Exception | None:
        """Error of an expert rank that invalidates steps already returned."""
        assert self._remote_experts is not None
        if (problem := self._remote_experts.problem) is not None:
            self.worker.failure = problem
        return problem

    def _report(self) -> RankReport:
        return RankReport(
            rank=self._rank.seat.rank,
            pid=os.getpid(),
            resident_bytes=psutil.Process().memory_info().rss,
            gpu_bytes=torch.cuda.memory_reserved() if current_platform.is_cuda() else 0,
            totals=replace(self.worker.clock.totals),
            in_step_s=self.worker.clock.in_step_s,
        )

    def __repr__(self) -> str:
        # Ray puts this before each line of the rank's output that it shows to the driver.
        seat = self._rank.seat
        return f"rank {seat.rank} {seat.kind} {seat.node_name}"

    def _context(self) -> RankContext:
        seat, config = self._rank.seat, self._rank.engine.config
        asked = config.cpu.kv_cache_gib
        beside = [
            other
            for other in self._rank.world.seats
            if other.kind == "cpu" and other.node_id == seat.node_id
        ]
        return RankContext(
            rank=seat.rank,
            kind=seat.kind,
            kv_cache_bytes=None if asked == "auto" else int(asked * GIB),
            # A rank that only pretends to be on a GPU has its cache in this memory too.
            ranks_on_memory=max(1, len(beside)),
            kv_tokens=self._rank.forecast.kv_tokens if self._rank.forecast else None,
            numa_nodes=seat.socket.numa_nodes if seat.socket else (),
            threads=self._rank.threads,
            serving_cpus=self._serving_cpus,
            max_remote_memory_fraction=config.cpu.max_remote_memory_fraction,
        )

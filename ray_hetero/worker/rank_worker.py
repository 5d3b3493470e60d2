"""vLLM's worker as the process of a rank calls it, step by step."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from typing import Any

from vllm.distributed.parallel_state import get_pp_group, get_tp_group

from ray_hetero.compat.worker import late_tokens, v2_runner
from ray_hetero.distributed.groups import HostCommunicator
from ray_hetero.distributed.stage_experts import RemoteExperts
from ray_hetero.kernels.layers import layer_tokens
from ray_hetero.kernels.step_route import StepLimits, StepRoute
from ray_hetero.log import logger
from ray_hetero.observability.step_clock import PredictedStep, StepClock
from ray_hetero.worker.cpu_rank import CpuRank
from ray_hetero.worker.last_layer import LastLayer
from ray_hetero.worker.speculation import rows_to_verified
from ray_hetero.worker.warmup_actions import Acknowledged, RankContext, perform
from ray_hetero.worker.warmup_schedule import Step
from ray_hetero.world import Forecast


class RankWorker:
    """vLLM's worker, told the size of each step before it runs it."""

    def __init__(
        self,
        worker: Any,
        context: RankContext,
        stage: int,
        forecast: Forecast | None,
        experts: RemoteExperts | None = None,
        cpu_rank: CpuRank | None = None,
        last_layer: LastLayer | None = None,
    ) -> None:
        self._worker = worker
        self._cpu_rank = cpu_rank
        self._last_layer = last_layer
        self._experts = experts
        self._stage = stage
        self._context = context
        self._boundary: Any = None
        self._over_host: HostCommunicator | None = None
        self.late_tokens: late_tokens.LateTokens | None = None
        self.driver_tokens: v2_runner.DriverTokens | None = None
        self.failure: Exception | None = None
        """Error of a step that failed: the ranks are out of step, this one must not go on."""
        self.clock = StepClock(
            lambda line: logger.info("%s rank %d: %s", context.kind, context.rank, line),
            predicted=None
            if forecast is None
            else PredictedStep(1000 * forecast.step_s, forecast.batch, forecast.context),
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker, name)

    @contextmanager
    def _step(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.failure = error
            raise

    def _begin_step(self, scheduler_output: Any, route: StepRoute) -> None:
        """Tell all that takes part in a step, before it is ordered."""
        tokens = scheduler_output.total_num_scheduled_tokens
        if self._boundary is not None and tokens:
            self._boundary.begin_step(route)
        if self._over_host is not None and tokens:
            self._over_host.begin_step(tokens)
        if self._experts is not None and tokens:
            self._experts.begin_step(tokens, rows_to_verified(scheduler_output))
            self.clock.totals.slot_copied = self._experts.copied
        if self._last_layer is not None:
            self._last_layer.begin_step(scheduler_output)
        if self.late_tokens is not None:
            self.late_tokens.begin_step(scheduler_output)
        if self.driver_tokens is not None:
            self.driver_tokens.begin_step(scheduler_output)

    def execute_model(self, scheduler_output: Any) -> Any:
        """Run one step; what exchanges tensors learns its tokens first."""
        tokens = scheduler_output.total_num_scheduled_tokens
        counts, cpu_rank = scheduler_output.num_scheduled_tokens.values(), self._cpu_rank
        route = StepRoute.of(counts, StepLimits()) if cpu_rank is None else cpu_rank.route(counts)
        late = self.late_tokens
        with self._step():
            self._begin_step(scheduler_output, route)
        layer_tokens.take()
        start = self.clock.begin()
        with (
            self._step(),
            nullcontext() if cpu_rank is None else cpu_rank.step(scheduler_output, route),
        ):
            output = self._worker.execute_model(scheduler_output)
            if self._boundary is not None:
                self._boundary.end_step()
        computed = layer_tokens.take()
        self.clock.totals.count(computed)
        reason = None if cpu_rank is None else cpu_rank.reason(route, computed)
        if reason is not None:
            self.clock.totals.count_route(reason)
        self.clock.add(
            time.perf_counter() - start,
            tokens,
            self._boundary,
            waited_s=late.take_waited() if late is not None else 0.0,
            is_verifying=bool(scheduler_output.scheduled_spec_decode_tokens),
        )
        return output

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Sample; on a GPU this is where its kernels are waited for."""
        start = self.clock.begin()
        with self._step():
            output = self._worker.sample_tokens(grammar_output)
        self.clock.add(time.perf_counter() - start, 0, self._boundary)
        return output

    def take_sampled_tokens(self, sampled: late_tokens.Sampled) -> None:
        """Learn the tokens of a step, for the next one."""
        if self.late_tokens is not None:
            self.late_tokens.take(sampled)

    def step_totals(self) -> dict[str, float]:
        """Totals of the rank's step clock; for `collective_rpc("step_totals")`."""
        return asdict(self.clock.totals)

    def perform_step(self, by_stage: Sequence[Step]) -> Acknowledged:
        """Carry out this rank's stage's step of the warm-up schedule."""
        step = by_stage[self._stage]
        with self._step():
            acknowledged = perform(self._worker.worker, self._context, step)
        self._boundary = getattr(get_pp_group(), "boundary", None)
        self._over_host = get_tp_group().over_host
        return acknowledged

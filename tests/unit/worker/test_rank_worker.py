"""A rank's worker makes one route a step, keeps it for the layers, and counts its reason."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from native_module import native, needs_native
from vllm.v1.core.sched.output import SchedulerOutput

from ray_hetero.errors import AgreementError
from ray_hetero.kernels.layers import layer_tokens
from ray_hetero.kernels.linear.streaming_linear import StreamingLinear
from ray_hetero.kernels.step_route import Place, Reason, StepLimits, StepRoute
from ray_hetero.worker.cpu_rank import CpuRank
from ray_hetero.worker.rank_worker import RankWorker
from ray_hetero.worker.warmup_actions import RankContext

pytestmark = needs_native
LIMITS = StepLimits(native_tokens=128, gpu_from=96, gpu_room=512, has_products=True)


class Prefetched:
    """In place of the prefetcher: notes the routes that it is told."""

    def __init__(self) -> None:
        self.routes: list[StepRoute] = []

    def begin_step(self, scheduler_output: Any, route: StepRoute) -> None:
        self.routes.append(route)


def worker_with(
    kernel: StreamingLinear | None, compute: Callable[[], object], experts: Any = None
) -> tuple[RankWorker, Prefetched]:
    """A rank's worker whose layers do this in each step."""
    rank, prefetched = CpuRank.__new__(CpuRank), Prefetched()
    layers: Any = SimpleNamespace(kernel=kernel, prefetcher=prefetched)
    rank._layers = layers
    vllms = SimpleNamespace(execute_model=lambda scheduler_output: compute())
    context = RankContext(0, "cpu", kv_cache_bytes=None, ranks_on_memory=1)
    return RankWorker(vllms, context, 0, None, experts, cpu_rank=rank), prefetched


def step(*counts: int) -> SchedulerOutput:
    made = SchedulerOutput.make_empty()
    made.num_scheduled_tokens = {str(at): count for at, count in enumerate(counts)}
    made.total_num_scheduled_tokens = sum(counts)
    return made


def test_the_route_of_a_step_reaches_the_layers_and_is_counted_by_its_reason() -> None:
    kernel = StreamingLinear(native)
    kernel.limits = LIMITS
    seen: list[Any] = []
    worker, prefetched = worker_with(kernel, lambda: seen.append(kernel.route))
    for counts in ((1, 1), (200,), (1,) * 129, (17,), ()):
        worker.execute_model(step(*counts))
    places = [Place.NATIVE, Place.GPU, Place.PRODUCTS, Place.CORES, Place.NATIVE]
    assert [route.place for route in seen] == places
    assert prefetched.routes == seen
    assert kernel.route is None
    # A step without tokens is none.
    assert worker.clock.totals.by_reason == {
        Reason.DECODING: 1, Reason.PROMPTS: 1, Reason.MANY_REQUESTS: 1, Reason.FEW_TOKENS: 1
    }  # fmt: skip


def test_layers_that_were_computed_elsewhere_say_why() -> None:
    kernel = StreamingLinear(native)
    kernel.limits = LIMITS
    worker, _ = worker_with(kernel, lambda: layer_tokens.count_instead(Reason.ADAPTERS))
    layer_tokens.count_instead(Reason.NO_ROOM)  # of a dummy run, which is no step
    worker.execute_model(step(200))
    assert worker.clock.totals.by_reason == {Reason.ADAPTERS: 1}


def test_a_step_that_fails_leaves_no_route_behind() -> None:
    def fail() -> None:
        raise RuntimeError("no step")

    kernel = StreamingLinear(native)
    worker, _ = worker_with(kernel, fail)
    with pytest.raises(RuntimeError, match="no step"):
        worker.execute_model(step(1))
    assert kernel.route is None
    assert isinstance(worker.failure, RuntimeError)


def test_an_error_before_the_first_layer_ends_the_rank_too() -> None:
    """Other ranks would wait for one that has begun no step: its slots, for instance, are wrong."""

    def wrong(tokens: int, every: int) -> None:
        raise AgreementError("an expert rank wants expert 9 of layer 0 in slot 7")

    experts = SimpleNamespace(begin_step=wrong, copied=0)
    worker, _ = worker_with(StreamingLinear(native), lambda: pytest.fail("no step"), experts)
    with pytest.raises(AgreementError, match="slot 7"):
        worker.execute_model(step(1))
    assert isinstance(worker.failure, AgreementError)


def test_steps_of_vllms_own_kernels_have_no_reason() -> None:
    worker, prefetched = worker_with(None, lambda: None)
    worker.execute_model(step(1))
    assert [route.reason for route in prefetched.routes] == [Reason.NO_GPU]
    assert worker.clock.totals.by_reason == {}

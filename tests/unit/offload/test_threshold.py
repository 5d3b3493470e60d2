"""How large a decode step stays on the cores is measured where a GPU computes large steps."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from native_module import native, needs_native  # noqa: E402

from ray_hetero.kernels.formats import PackedWeight  # noqa: E402
from ray_hetero.kernels.formats.base import pack  # noqa: E402
from ray_hetero.kernels.linear.streaming_linear import StreamingLinear  # noqa: E402
from ray_hetero.kernels.step_route import StepLimits  # noqa: E402
from ray_hetero.offload.prefill.threshold import settle  # noqa: E402

pytestmark = needs_native
FROM_TOKENS = 96


class Gpu:
    """One that takes so long for a product."""

    def __init__(self, seconds: float, tokens: int = 8192) -> None:
        self._seconds = seconds
        self.tokens = tokens
        self.asked: list[tuple[int, ...]] = []

    def suits(self, data: Any, tokens: int) -> bool:
        return tokens <= self.tokens

    def linear(self, x: Any, data: Any, bias: Any) -> None:
        self.asked.append(tuple(x.shape))
        time.sleep(self._seconds)


def layers(count: int) -> list[list[Any]]:
    torch.manual_seed(0)
    made = [PackedWeight.made(pack(torch.randn(64, 32).bfloat16()), native) for _ in range(2)]
    return [[SimpleNamespace(weight=weight, bias=None) for weight in made]] * count


def kernel_with(gpu: Gpu, from_tokens: int = FROM_TOKENS) -> StreamingLinear:
    kernel = StreamingLinear(native)
    kernel.limits = replace(kernel.limits, gpu_from=from_tokens, gpu_room=gpu.tokens)
    return kernel


def settled(gpu: Gpu, from_tokens: int = FROM_TOKENS, count: int = 6) -> int:
    kernel = kernel_with(gpu, from_tokens)
    settle(kernel, gpu, layers(count))  # type: ignore[arg-type]
    return kernel.limits.native_tokens


def test_the_faster_of_both_computes_the_largest_steps() -> None:
    assert settled(Gpu(0.2)) == native.STEP_TOKENS
    # A product of the cores takes some microseconds; two threads that wait for each other more.
    gpu: Any = Gpu(0.0)
    slow = kernel_with(gpu)
    slow.on_cores = lambda *given: time.sleep(0.05)  # type: ignore[method-assign, assignment, misc]
    settle(slow, gpu, layers(1))
    assert slow.limits == StepLimits(FROM_TOKENS - 1, FROM_TOKENS, gpu.tokens)


def test_few_tokens_stay_on_the_cores_in_any_case() -> None:
    gpu: Any = Gpu(0.0)
    slow = kernel_with(gpu, 8)
    slow.on_cores = lambda *given: time.sleep(0.05)  # type: ignore[method-assign, assignment, misc]
    settle(slow, gpu, layers(1))
    assert slow.limits == StepLimits(native.FEW_TOKENS, 8, gpu.tokens)


def test_some_layers_are_measured_with_the_largest_step() -> None:
    gpu = Gpu(0.0)
    settled(gpu)
    assert set(gpu.asked) == {(native.STEP_TOKENS, 32)}
    assert len(gpu.asked) == 3 * 4 * 2


@pytest.mark.parametrize(
    ("gpu", "from_tokens", "count"),
    [(Gpu(0.0, tokens=64), FROM_TOKENS, 1), (Gpu(0.0), 129, 1), (Gpu(0.0), FROM_TOKENS, 0)],
    ids=["too few tokens", "the GPU begins behind it", "no layers"],
)
def test_nothing_is_measured_where_there_is_no_choice(
    gpu: Gpu, from_tokens: int, count: int
) -> None:
    assert settled(gpu, from_tokens, count) == native.STEP_TOKENS
    assert gpu.asked == []

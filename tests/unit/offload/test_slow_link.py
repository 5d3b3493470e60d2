"""Prompts stay on the cores as far as the link to the GPU is slower than these.

The GPU is the CPU here, and what is slow sleeps.
"""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from native_module import native, needs_native  # noqa: E402
from paged_steps import Steps  # noqa: E402
from slow_links import PRODUCT_S, slow_cores, slow_link  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402

from ray_hetero.kernels.layers import layer_tokens  # noqa: E402
from ray_hetero.kernels.layers.layer_tokens import LayerTokens  # noqa: E402
from ray_hetero.offload.group.group_layers import linears_of  # noqa: E402
from ray_hetero.offload.prefill import (  # noqa: E402
    offload_gpu,
    threshold,
)
from ray_hetero.offload.prefill.offload_gpu import OffloadGpu  # noqa: E402
from ray_hetero.offload.weights.piece_reader import PieceReader  # noqa: E402
from ray_hetero.planning import prefill_memory  # noqa: E402

current_platform.import_kernels()
pytestmark = [needs_native, pytest.mark.usefixtures("one_thread")]
LAYERS, FROM_TOKENS, MOST = 2, 96, 1024
CORES_S = 4 * LAYERS * PRODUCT_S
SLOW = 2.5
"""Time of a slow link in those of the cores: it pays from 320 tokens on, or from a few more, since
products take some time in truth."""


@pytest.fixture(autouse=True)
def _small_weights_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_memory, "PIECE_BYTES", 128 << 10)
    monkeypatch.setattr(offload_gpu, "LEAST_BYTES", 1)
    layer_tokens.take()


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Level and text of what is logged."""
    found: list[tuple[str, str]] = []
    for level in ("info", "warning"):
        monkeypatch.setattr(
            threshold.logger, level,
            lambda text, *given, level=level: found.append((level, text % given)),
        )  # fmt: skip
    return found


@pytest.fixture
def asked_gpu(monkeypatch: pytest.MonkeyPatch) -> list[OffloadGpu]:
    """The GPU, for each time that it begins with products."""
    found: list[OffloadGpu] = []
    begin = OffloadGpu.begin

    def begin_and_note(self: OffloadGpu, tokens: int, **given: Any) -> None:
        found.append(self)
        begin(self, tokens, **given)

    monkeypatch.setattr(OffloadGpu, "begin", begin_and_note)
    return found


def settled(
    monkeypatch: pytest.MonkeyPatch, link: float, *, is_auto: bool = True,
    has_steps: bool = True, slow_rounds: float = math.inf, most: int = MOST,
) -> Steps:  # fmt: skip
    """Layers after the start.

    Args:
        monkeypatch: makes cores and link slow until then.
        link: its time in those of the cores.
        is_auto: whether no number of tokens was given.
        has_steps: as of `threshold.settle`.
        slow_rounds: of the measurement, after which the link is fast.
        most: tokens of a step.

    """
    steps = Steps(monkeypatch, least=FROM_TOKENS, most=most, layers=LAYERS)
    for cache in steps.caches:
        cache.zero_()  # vLLM's attention multiplies what was never written by nought
    kernel, gpu = steps.kernel, steps.kernel.gpu
    layers = [linears_of(layer) for layer in steps.known]
    left = slow_rounds * sum(map(len, gpu.pieces))

    def is_slow() -> bool:
        nonlocal left
        left -= 1
        return left >= 0

    with monkeypatch.context() as patch:
        slow_cores(patch, kernel)
        slow_link(patch, [one for layer in layers for one in layer], link * CORES_S, is_slow)
        threshold.settle(kernel, gpu, layers, is_auto=is_auto, has_steps=has_steps)
    return steps


def from_tokens(steps: Steps) -> int:
    assert steps.kernel.limits.gpu_from is not None
    return steps.kernel.limits.gpu_from


def levels(said: list[tuple[str, str]]) -> list[str]:
    return [level for level, _ in said]


@pytest.mark.parametrize("has_steps", [True, False])
def test_prompts_below_the_crossing_stay_on_the_cores(
    has_steps: bool, monkeypatch: pytest.MonkeyPatch, said: list[tuple[str, str]],
    asked_gpu: list[OffloadGpu], on_gpu: list[int],
) -> None:  # fmt: skip
    steps = settled(monkeypatch, SLOW, has_steps=has_steps)
    least = from_tokens(steps)
    assert least % threshold.MULTIPLE == 0
    assert 128 * SLOW - threshold.MULTIPLE < least < MOST
    assert steps.kernel.limits.native_tokens == native.STEP_TOKENS
    assert levels(said) == ["warning"] + ["info"] * has_steps
    (warning,) = (text for level, text in said if level == "warning")
    figures = re.search(
        r"products of 128 tokens take ([\d.]+) ms on the cores, and ([\d.]+) ms on the GPU over "
        rf"its link, so that prompts of fewer than {least} tokens stay on the cores\. ",
        warning,
    )
    assert figures is not None
    cores, link = map(float, figures.groups())
    assert cores >= 1e3 * CORES_S
    # Of what a round uses, one piece more may have come at the end of the round before.
    pieces = sum(map(len, steps.kernel.gpu.pieces))
    assert link >= 1e3 * CORES_S * SLOW * (1 - 1 / pieces)
    assert least - threshold.MULTIPLE - 1 < 128 * link / cores < least + 1  # they are rounded
    assert "nvidia-smi -q, lspci -vv" in warning
    one, other, third = (steps.request(tokens) for tokens in (least + 4, least, 30))
    asked_gpu.clear()
    layer_tokens.take()
    steps.check((one, 0, least - 1))
    steps.check((third, 0, 30), (one, least - 1, least + 4))
    assert (asked_gpu, on_gpu) == ([], [])
    assert layer_tokens.take() == LayerTokens(by_operators=LAYERS * (least - 1 + 35))
    steps.check((other, 0, least))
    assert on_gpu == [least]
    assert layer_tokens.take() == LayerTokens(on_gpu=LAYERS * least)


def test_no_step_goes_over_a_link_that_never_pays(
    monkeypatch: pytest.MonkeyPatch, said: list[tuple[str, str]], asked_gpu: list[OffloadGpu]
) -> None:
    steps = settled(monkeypatch, SLOW, most=256)
    assert from_tokens(steps) > 256
    assert levels(said) == ["warning", "info"]
    assert (
        f"so that all prompts stay on the cores: the GPU would be faster from {from_tokens(steps)} "
        f"tokens on, and a step has 256 at most. If"
    ) in said[0][1]
    request = steps.request(256)
    asked_gpu.clear()
    layer_tokens.take()
    steps.check((request, 0, 256))
    assert asked_gpu == []
    assert layer_tokens.take() == LayerTokens(by_operators=LAYERS * 256)


@pytest.mark.parametrize(
    ("link", "given"),
    [
        (0.0, {}),
        (0.5, {}),
        (SLOW, {"is_auto": False}),
        (SLOW, {"slow_rounds": threshold.ROUNDS}),
        (0.0, {"has_steps": False}),
    ],
    ids=["fast", "twice as fast as the cores", "a number was given", "busy for a moment", "shared"],
)
def test_a_link_that_is_not_slow_changes_nothing(
    link: float, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch,
    said: list[tuple[str, str]], on_gpu: list[int],
) -> None:  # fmt: skip
    steps = settled(monkeypatch, link, **given)
    assert from_tokens(steps) == FROM_TOKENS
    assert levels(said) == ["info"] * given.get("has_steps", True)
    assert all(text.startswith("decode steps of up to ") for _, text in said)
    one, other = steps.request(FROM_TOKENS), steps.request(FROM_TOKENS)
    steps.check((one, 0, FROM_TOKENS - 1))
    steps.check((other, 0, FROM_TOKENS))
    assert on_gpu == [FROM_TOKENS]


@pytest.mark.parametrize("is_auto", [True, False])
def test_a_link_that_fails_is_an_error(
    is_auto: bool, monkeypatch: pytest.MonkeyPatch, said: list[tuple[str, str]]
) -> None:
    def fail(*given: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(PieceReader, "copies", fail)
    steps = Steps(monkeypatch, least=FROM_TOKENS, most=MOST, layers=LAYERS)
    layers = [linears_of(layer) for layer in steps.known]
    with pytest.raises(RuntimeError, match="illegal memory access"):
        threshold.settle(steps.kernel, steps.kernel.gpu, layers, is_auto=is_auto)
    assert (from_tokens(steps), steps.kernel.limits.native_tokens) == (
        FROM_TOKENS,
        native.STEP_TOKENS,
    )
    assert said == []

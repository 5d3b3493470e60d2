"""Decode steps that cores and a GPU share give what whole sequences give.

The GPU is the CPU here, with the same copies and the same order; on a GPU it is
tests/gpu/test_prefill_layers.py.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from native_module import native, needs_native  # noqa: E402
from paged_steps import GPU_FAMILIES, Steps  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402

from ray_hetero.kernels import decode_step, gpu_prefill, layer_tokens, shared_decode  # noqa: E402
from ray_hetero.kernels.gpu_prefill import GpuPrefill  # noqa: E402
from ray_hetero.kernels.layer_tokens import LayerTokens  # noqa: E402
from ray_hetero.kernels.shared_decode import SharedDecode, Shares, best_shares  # noqa: E402
from ray_hetero.planning import prefill_memory  # noqa: E402

current_platform.import_kernels()
pytestmark = needs_native
LAYERS = 5


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is logged; vLLM's logger hands nothing on to pytest's."""
    found: list[str] = []
    for level in ("info", "warning"):
        for module in (shared_decode, decode_step):
            monkeypatch.setattr(
                module.logger, level, lambda text, *given: found.append(text % given)
            )
    return found


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_memory, "PIECE_BYTES", 128 << 10)
    monkeypatch.setattr(gpu_prefill, "LEAST_BYTES", 1)
    layer_tokens.take()


@pytest.mark.parametrize("family", GPU_FAMILIES)
@pytest.mark.parametrize("count", [1, 2, 5])
def test_steps_of_several_requests(
    count: int, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps(monkeypatch, layers=LAYERS, share=count / LAYERS, family=family)
    one, other, third = (steps.request(tokens) for tokens in (70, 33, 12))
    steps.check((one, 0, 66), (other, 0, 30), (third, 0, 9))
    layer_tokens.take()
    for at in range(3):
        steps.check(*((request, end + at, end + at + 1)
                      for request, end in ((one, 66), (other, 30), (third, 9))))  # fmt: skip
    assert layer_tokens.take() == LayerTokens(native=9 * (LAYERS - count), on_gpu=9 * count)


@pytest.mark.parametrize(("isa", "is_compact"), [("vec", True), ("amx", False)])
def test_prompts_and_drafts_come_in_between(
    isa: str, is_compact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps(monkeypatch, layers=LAYERS, share=0.6, isa=isa, is_compact=is_compact)
    one, other, prompt = (steps.request(tokens) for tokens in (60, 92, 150))
    steps.check((one, 0, 55), (other, 0, 84))
    steps.check((one, 55, 56), (other, 84, 85))
    # While a GPU computes a prompt the cores decode alone; its pieces are expected anew then.
    steps.check((one, 56, 57), (prompt, 0, 70), (other, 85, 86))
    steps.check((one, 57, 58), (other, 86, 89))
    steps.check((prompt, 70, 150))
    steps.check((one, 58, 60), (other, 89, 92))


def test_a_residual_is_added_first(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch, layers=LAYERS, share=0.4)
    request = steps.request(3)
    positions, hidden = steps.begin([(request, 0, 3)])
    first = steps.made(positions, hidden, None)
    half = hidden / 2
    again = steps.made(positions, half, half)
    for one, other in zip(first, again, strict=True):
        torch.testing.assert_close(one, other, rtol=2**-6, atol=2**-6)


def test_results_are_not_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch, layers=LAYERS, share=1.0)
    request = steps.request(8)
    positions, hidden = steps.begin([(request, 0, 4)])
    found = steps.made(positions, hidden, None)
    kept = [one.clone() for one in found]
    positions, hidden = steps.begin([(request, 4, 8)])
    steps.made(positions, hidden, None)
    assert all(torch.equal(one, other) for one, other in zip(found, kept, strict=True))


def test_more_tokens_than_a_shared_step_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_decode, "SHARED_TOKENS", 2)
    steps = Steps(monkeypatch, layers=LAYERS, share=0.4)
    request = steps.request(5)
    steps.check((request, 0, 3))
    assert layer_tokens.take() == LayerTokens(native=3 * LAYERS)
    steps.check((request, 3, 5))
    assert layer_tokens.take() == LayerTokens(native=2 * 3, on_gpu=2 * 2)


def test_calls_are_even_and_end_where_layers_are_given_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = Steps(monkeypatch, layers=LAYERS, share=1.0)
    assert steps.shared is not None
    for count, expected in {
        1: [(0, 3, True), (3, 5, False)],
        2: [(0, 2, True), (2, 4, True), (4, 5, False)],
        3: [(0, 1, True), (1, 3, True), (3, 5, True)],
        5: [(at, at + 1, True) for at in range(5)],
    }.items():
        found = steps.shared._divided(count)
        assert [(one.begin, one.end, one.is_given) for one in found] == expected


def test_weights_are_dropped_at_the_end_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch, layers=LAYERS, share=0.4)
    request = steps.request(2)
    steps.check((request, 0, 1))
    assert steps.made.gpu is not None
    assert not steps.made.gpu._whole


def test_without_memory_of_the_gpu_the_cores_compute_the_step(
    monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    steps = Steps(monkeypatch, layers=LAYERS, share=0.6)
    behind, calls = GpuPrefill.behind_from, []

    def fails_in_the_second_layer(self: GpuPrefill, *given: Any) -> Any:
        calls.append(given)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 MiB")
        return behind(self, *given)

    monkeypatch.setattr(GpuPrefill, "behind_from", fails_in_the_second_layer)
    request = steps.request(6)
    steps.check((request, 0, 4))
    (line,) = said
    assert "run out of memory (CUDA out of memory. Tried to allocate 2 MiB)" in line
    steps.check((request, 4, 6))
    assert len(calls) == 2


def test_what_fails_while_weights_are_ordered_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch, layers=LAYERS, share=0.6)
    threads = []

    def fails(self: GpuPrefill, linears: Any) -> None:
        threads.append(threading.current_thread())
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(GpuPrefill, "expand", fails)
    request = steps.request(2)
    positions, hidden = steps.begin([(request, 0, 2)])
    with pytest.raises(RuntimeError, match="illegal memory access"):
        steps.made(positions, hidden, None)
    assert threads[0] is not threading.main_thread()


def test_steps_of_these_layers_are_measured(
    monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    monkeypatch.setattr(shared_decode, "MEASURED_TOKENS", (1, 5))
    steps = Steps(monkeypatch, layers=LAYERS, share=1.0)
    made = steps.shared
    assert made is not None
    found = shared_decode.measured(made._layers, made._kernel, made._gpu, made._memory)
    assert [tokens for tokens, _ in found.measured] == [1, 5]
    (line,) = said
    assert line.startswith(f"decode steps of {LAYERS} layers take least time if the GPU computes")
    # Nothing of it is left in a cache.
    assert all(bool(cache.isnan().all()) for cache in steps.caches)


def test_the_share_that_takes_least_is_chosen(said: list[str]) -> None:
    asked = []

    def seconds(tokens: int, count: int) -> float:
        asked.append((tokens, count))
        # Layers of the cores, and the link beside them.
        return max((8 - count) * tokens * 1.0, count * 20.0) + 0.5 * count

    found = best_shares(seconds, 8, (1, 8, 32, 64))
    # 1 token: 8 s alone.  8: 64 s alone, 49 s with two.  32: 256 s alone, 102.5 s with five.
    assert found == Shares(((1, 0.0), (8, 2 / 8), (32, 5 / 8), (64, 6 / 8)))
    assert "8: 2 (64000.0 to 49000.0 ms)" in said[0]
    # It ends where more takes longer, and begins with what fewer tokens give away.
    assert max(count for tokens, count in asked if tokens == 8) == 4
    assert min(count for tokens, count in asked if tokens == 64 and count) == 5
    assert [found.of(tokens) for tokens in (0, 1, 7, 8, 40, 128)] == [0, 0, 0, 0.25, 0.625, 0.75]


def test_a_gain_that_noise_may_be_is_none() -> None:
    assert best_shares(lambda tokens, count: 1 - 0.01 * (count == 1), 4, (8,)).is_empty


@pytest.mark.parametrize("share", [0.25, 1.0])
def test_no_room_for_whole_weights(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch, layers=LAYERS, share=share)
    made = steps.shared
    assert made is not None
    assert shared_decode.suits(made._layers, made._kernel, made._gpu)
    without = GpuPrefill(torch.device("cpu"), 512)
    assert not shared_decode.suits(made._layers, made._kernel, without)


def test_steps_of_no_more_tokens_than_the_native_module_takes() -> None:
    assert max(shared_decode.MEASURED_TOKENS) == prefill_memory.SHARED_TOKENS == native.STEP_TOKENS
    assert SharedDecode.count.__doc__

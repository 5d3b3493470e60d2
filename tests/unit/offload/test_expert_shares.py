"""Shares of experts between a GPU's link and sockets follow from what was measured."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from hypothesis import given
from hypothesis import strategies as st

from placement.plan.expert_split import (
    SPLIT_GAIN,
    SPLIT_SECONDS,
    SPLIT_STEPS,
    ExpertTimes,
    best_split,
    splits,
)
from ray_hetero.kernels.experts.expert_rates import STEP_TOKENS, CoreRates
from ray_hetero.offload.experts.expert_shares import ExpertShares

SECONDS = st.floats(1e-6, 1.0)
MOST = 2048
NEARLY = 1 + 1e-9


def no_handover(tokens: int) -> float:
    return 0.0


@st.composite
def measured(draw: st.DrawFn) -> CoreRates:
    """Points whose seconds ascend as their tokens do."""
    first, more = draw(SECONDS), draw(st.floats(0.0, 1.0))
    most = draw(st.sampled_from([64, 1024]))
    return CoreRates(((most // 4, first), (most, first + more)))


@given(measured(), SECONDS, st.floats(0, 1e-3), st.floats(0, 1e-5), st.integers(1, 300))
def test_shares_grow_and_are_never_slower_than_the_better_alone(
    cores: CoreRates, link_s: float, latency_s: float, each_s: float, count: int
) -> None:
    def handover(tokens: int) -> float:
        return latency_s + each_s * tokens

    shares = ExpertShares.found(cores, handover, link_s, count=count, most=MOST)
    before = 0
    for tokens in range(STEP_TOKENS, MOST + 1, STEP_TOKENS):
        experts = 0 if shares is None else shares.experts(tokens, count)
        assert before <= experts <= count
        before = experts
        times = ExpertTimes(cores.seconds(tokens), handover(tokens), link_s)
        assert times.seconds(experts / count) <= min(times.seconds(0), times.seconds(1)) * NEARLY
    assert shares is None or len(shares.points) <= 2 * SPLIT_STEPS


@given(SECONDS, st.floats(0, 0.1), SECONDS, st.integers(1, 300))
def test_a_split_saves_what_it_must_and_no_finer_one_saves_much_more(
    cores: float, handover: float, link: float, count: int
) -> None:
    times = ExpertTimes(cores, handover, link)
    allowed = splits(count)
    assert (allowed[0], allowed[-1]) == (0, count)
    experts = best_split(times, allowed, count)
    found, alone = times.seconds(experts / count), min(times.seconds(0), times.seconds(1))
    if 0 < experts < count:
        assert found / (1 - SPLIT_GAIN) + SPLIT_SECONDS <= alone * NEARLY
    best = min(times.seconds(one / count) for one in range(count + 1))
    step = max(1, count // SPLIT_STEPS) / count
    limit = max(best + step * max(cores, link), SPLIT_SECONDS) / (1 - SPLIT_GAIN) + SPLIT_SECONDS
    assert found <= limit * NEARLY


def test_sockets_and_link_end_together() -> None:
    """The cores of an H200's host, and a link that takes 16 ms a layer."""
    cores = CoreRates(((256, 0.0085), (1024, 0.0247)))
    shares = ExpertShares.found(cores, lambda tokens: tokens * 5.2e-7, 0.016, count=128, most=8192)
    assert shares is not None
    assert shares.has_splits
    for tokens, experts in [(8, 0), (256, 48), (1024, 80), (4096, 112), (7168, 120), (8192, 128)]:
        assert shares.experts(tokens, 128) == pytest.approx(experts, abs=4), tokens
        times = ExpertTimes(cores.seconds(tokens), tokens * 5.2e-7, 0.016)
        share = shares.experts(tokens, 128) / 128
        assert times.seconds(share) <= min(times.seconds(0), times.seconds(1))
    # A layer of half as many experts has half as many read.
    assert shares.experts(1024, 64) == shares.experts(1024, 128) // 2
    assert "of 128 experts of a layer " in shares.described([1024])


def test_sockets_that_are_always_faster_keep_all() -> None:
    cores = CoreRates(((64, 1e-6),))
    assert ExpertShares.found(cores, no_handover, 1.0, count=8, most=64) is None


def test_what_was_measured_out_of_order_is_noise() -> None:
    cores = CoreRates(((256, 0.020), (1024, 0.010)))
    shares = ExpertShares.found(cores, no_handover, 0.016, count=64, most=1024)
    assert shares is not None
    assert shares.experts(1024, 64) >= shares.experts(256, 64)


def test_what_is_asked_for_is_taken_from_where_it_is_faster() -> None:
    cores = CoreRates(((256, 0.010), (1024, 0.040)))
    common = {"count": 64, "most": 1024}
    half = ExpertShares.found(cores, no_handover, 0.010, asked=32, **common)
    whole = ExpertShares.found(cores, no_handover, 0.010, asked=64, **common)
    assert half is not None
    assert whole is not None
    assert [experts for _, experts in half.points] == [32]
    # 5 ms and what a split must save, and 10 ms.
    assert half.tokens == pytest.approx(145, abs=8)
    assert whole.points == ((256, 64),)
    assert not whole.has_splits

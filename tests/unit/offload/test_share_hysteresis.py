"""Which share of a decode step a GPU computes, from one step to the next."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from ray_hetero.offload.decode.share_choice import Share, Shares
from ray_hetero.offload.decode.shared_decode import STEPS, ShareHysteresis

FEW, MANY = Share(8, columns=12), Share(32, columns=14)


def taken(*wanted: Share) -> list[Share]:
    """Shares of steps that want these."""
    steady = ShareHysteresis()
    found = []
    for one in wanted:
        following = steady.following(one)
        assert steady.following(one) == following
        found.append(steady.take(one))
        assert found[-1] == following
    return found


def test_steps_that_go_back_and_forth_keep_their_share() -> None:
    assert taken(*[FEW, MANY] * 9) == [FEW] * 18
    assert taken(MANY, *[FEW, FEW, MANY] * 9) == [MANY] * 28


def test_a_share_that_is_wanted_for_some_steps_is_taken() -> None:
    assert taken(FEW, *[MANY] * 6, FEW) == [FEW] * STEPS + [MANY] * (7 - STEPS) + [MANY]


def test_behind_a_prompt_the_share_of_the_step_is_taken() -> None:
    steady = ShareHysteresis()
    for one in (FEW, MANY, MANY):
        assert steady.take(one) == FEW
    steady.interrupt()
    assert steady.following(MANY) == MANY
    assert [steady.take(one) for one in (MANY, FEW, FEW)] == [MANY] * 3


def test_nothing_comes_anew_with_the_same_columns() -> None:
    same = Share(32, columns=12, gain_s=1.0)
    assert [one.tokens for one in taken(FEW, same, FEW)] == [8, 32, 8]


def test_the_cores_alone_are_taken_at_once() -> None:
    none = Share(1)
    assert taken(FEW, none, MANY, none) == [FEW, none, MANY, none]


def test_a_step_takes_the_share_of_the_nearest_size() -> None:
    shares = Shares(tuple(Share(tokens, columns=tokens) for tokens in (2, 8, 32, 64)))
    found = {tokens: shares.of(tokens).columns for tokens in (1, 2, 4, 5, 16, 17, 45, 46, 900)}
    assert found == {1: 0, 2: 2, 4: 2, 5: 8, 16: 8, 17: 32, 45: 32, 46: 64, 900: 64}
    assert Shares(()).of(5) == Share(0)

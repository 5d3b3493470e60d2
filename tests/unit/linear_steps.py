"""Comparison of native steps of layers with a linear state with those of vLLM's modules."""

from __future__ import annotations

from typing import Any

import torch

TAPS, STATES = 4, 9
"""Taps of convolutions, and states of a cache."""
CLOSE = {"rtol": 2**-5, "atol": 2**-5}
"""Allowed differences of states, which are roundings to bf16."""


def expect_rows(given: Any, expected: Any, rows: Any) -> None:
    """Fail if results of the rows that have a request are further apart than roundings take them.

    Args:
        given: [M, N].
        expected: the same.
        rows: [M], bool.

    """
    one, other = given[rows].float(), expected[rows].float()
    torch.testing.assert_close(one, other, rtol=2**-4, atol=2**-4)
    assert float((one - other).norm() / other.norm()) < 2**-7


def expect_states(states: Any, theirs: Any, before: Any, numbers: Any) -> None:
    """Fail if a step has left other states than vLLM's module does, or written those of others.

    Args:
        states: inputs and heads behind the step.
        theirs: the same behind vLLM's.
        before: the same before the step.
        numbers: [requests], of the states that the step has.

    """
    own = torch.zeros(STATES, dtype=torch.bool)
    own[numbers] = True
    for one, other, old in zip(states, theirs, before, strict=True):
        torch.testing.assert_close(one[own].float(), other[own].float(), **CLOSE)
        assert not torch.equal(one[own], old[own])
        assert torch.equal(one[~own], old[~own])
    # All but the newest inputs are moved as they are.
    assert torch.equal(states[0][own][:, :-1], before[0][own][:, 1:])

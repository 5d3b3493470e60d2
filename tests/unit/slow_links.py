"""Cores and a link that take a given time for the products that are measured at the start."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from ray_hetero.kernels.layers.layer_parts import Linear
from ray_hetero.kernels.linear.streaming_linear import StreamingLinear
from ray_hetero.offload.weights.piece_reader import PieceReader
from ray_hetero.offload.weights.weight_pieces import Piece

PRODUCT_S = 0.02
"""Time of the cores for a product, beyond what they take in truth."""


def slow_cores(
    monkeypatch: pytest.MonkeyPatch, kernel: StreamingLinear, product_s: float = PRODUCT_S
) -> None:
    """Have the cores take longer for each product."""
    on_cores = kernel.on_cores

    def wait_and_multiply(*given: Any) -> Any:
        time.sleep(product_s)
        return on_cores(*given)

    monkeypatch.setattr(kernel, "on_cores", wait_and_multiply)


def slow_link(
    monkeypatch: pytest.MonkeyPatch, linears: Sequence[Linear], seconds: float,
    is_slow: Callable[[], bool] = lambda: True,
) -> None:  # fmt: skip
    """Have each byte of these weights take its share of so many seconds to come.

    Args:
        monkeypatch: undoes it.
        linears: all that are read; in a group the parts of one rank.
        seconds: for all of them.
        is_slow: whether the link still is.

    """
    copies = PieceReader.copies
    each = seconds / sum(linear.weight.data.nbytes for linear in linears)

    def wait_and_copy(self: PieceReader, piece: Piece) -> Iterator[Any]:
        if is_slow():
            time.sleep(each * piece.weight.nbytes)
        return copies(self, piece)

    monkeypatch.setattr(PieceReader, "copies", wait_and_copy)

"""Pieces of weights cross the link in the order of each kind of step, whatever came before.

The GPU is the CPU here, with the same copies in the same order.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from copied_pieces import CopiedPieces, small_pieces  # noqa: E402
from native_module import needs_native  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402

from ray_hetero.kernels.layers.layer_parts import Linear  # noqa: E402
from ray_hetero.offload.weights import piece_reader  # noqa: E402
from ray_hetero.offload.weights.read_sequence import ReadSequence  # noqa: E402
from ray_hetero.offload.weights.weight_pieces import Piece  # noqa: E402
from ray_hetero.planning.prefill_memory import EXPANDED, SLOTS  # noqa: E402

current_platform.import_kernels()
pytestmark = needs_native
EXPANDED_AHEAD = EXPANDED - 1
"""Pieces that a prompt leaves expanded for the next one."""


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    small_pieces(monkeypatch)


class Copies(CopiedPieces):
    """Steps of one request, and the numbers of the pieces that a step copies.

    Args:
        monkeypatch: notes copies.
        given: of `Steps`: which layers of decode steps the GPU computes.

    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **given: Any) -> None:
        monkeypatch.setattr(piece_reader, "slots_within", lambda *sizes: SLOTS)
        super().__init__(monkeypatch, 1000, **{"most": 2048} | given)
        layers = self.steps.known
        self.pieces = self._pieces(
            [one for layer in layers for one in (layer.input.qkv, *layer.parts.linears)]
        )
        self._number = {piece: number for number, piece in enumerate(self.pieces)}
        self.whole = list(self._number.values())
        """What a prompt uses."""

    def numbers_of_step(self, tokens: int) -> list[int]:
        """Pieces as of `of_step`, by number."""
        return [self._number[piece] for piece in self.of_step(tokens)]

    @property
    def ahead(self) -> int:
        """Number of pieces that have come ahead of the next step, as they are stored."""
        assert self.steps.made.gpu is not None
        reader = self.steps.made.gpu.reader
        # Some are smaller than the largest, and less may be left at the end of the memory.
        assert SLOTS - 1 <= len(reader._ahead) < len(self.pieces)
        return len(reader._ahead)

    def _pieces(self, linears: Sequence[Linear]) -> list[Piece]:
        gpu = self.steps.made.gpu
        assert gpu is not None
        return [
            placed.piece
            for linear in linears
            for placed in gpu._pieces[linear.weight.data.data_ptr()]
        ]


@pytest.mark.parametrize("prompt", [40, 150])
def test_a_prompt_copies_each_piece_once(prompt: int, monkeypatch: pytest.MonkeyPatch) -> None:
    copies = Copies(monkeypatch)
    for _ in range(2):
        copies.numbers_of_step(prompt)
    # The order is known, and what a prompt begins with has come at the end of the one before.
    whole, there_before = copies.whole, EXPANDED_AHEAD + copies.ahead
    found = copies.numbers_of_step(prompt)
    # Some of them are expanded.
    assert found == [*whole[there_before:], *whole[: EXPANDED_AHEAD + copies.ahead]]
    # Decode steps of the cores alone copy none, and leave what is there.
    there_before = EXPANDED_AHEAD + copies.ahead
    for _ in range(3):
        assert copies.numbers_of_step(1) == []
    found = copies.numbers_of_step(prompt)
    assert found == [*whole[there_before:], *whole[: EXPANDED_AHEAD + copies.ahead]]


def test_whatever_is_expected_the_results_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = Copies(monkeypatch)
    drawn, pieces = random.Random(0), copies.pieces
    monkeypatch.setattr(
        ReadSequence, "after", lambda order, piece, but=None: drawn.choice([None, *pieces])
    )
    for tokens in (150, 1, 1, 40, 2, 150, 1):
        copies.numbers_of_step(tokens)

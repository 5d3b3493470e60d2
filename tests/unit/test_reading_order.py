"""Pieces of weights cross the link in the order of each kind of step, whatever came before.

The GPU is the CPU here, with the same copies in the same order.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import cycle, islice
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from copied_pieces import CopiedPieces, small_pieces  # noqa: E402
from native_module import needs_native  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402

from ray_hetero.kernels.layers.layer_parts import Linear  # noqa: E402
from ray_hetero.kernels.prompts import piece_reader  # noqa: E402
from ray_hetero.kernels.prompts.reading_order import ReadingOrder  # noqa: E402
from ray_hetero.kernels.prompts.weight_pieces import Piece  # noqa: E402
from ray_hetero.planning.prefill_memory import SHARED_TOKENS, SLOTS  # noqa: E402

current_platform.import_kernels()
pytestmark = needs_native


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    small_pieces(monkeypatch)


AHEAD = SLOTS + 1
"""Pieces of a prompt that are there before it begins: in slots, and one that is expanded."""


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

    def behind(self, place: int) -> list[int]:
        """What lies behind the attention of a layer."""
        found = self._pieces(self.steps.known[place].parts.linears)
        return [self._number[piece] for piece in found]

    def _pieces(self, linears: Sequence[Linear]) -> list[Piece]:
        gpu = self.steps.made.gpu
        assert gpu is not None
        return [
            placed.piece
            for linear in linears
            for placed in gpu._pieces[linear.weight.data.data_ptr()]
        ]


@pytest.mark.parametrize(
    ("given", "places"),
    [
        ({"last": 2}, (3, 4)),
        ({"share": 0.4}, (1, 4)),
        ({"share": 0.6}, (0, 2, 4)),
        ({"share": 1.0}, (0, 1, 2, 3, 4)),
    ],
)
@pytest.mark.parametrize("prompt", [40, 150])
def test_a_step_copies_no_piece_that_it_does_not_use(
    given: dict[str, Any], places: tuple[int, ...], prompt: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = Copies(monkeypatch, **given)
    for _ in range(2):
        copies.numbers_of_step(prompt)
    # The order is known, and what a prompt begins with has come at the end of the one before.
    whole = copies.whole
    assert copies.numbers_of_step(prompt) == [*whole[AHEAD:], *whole[:AHEAD]]
    for _ in range(3):
        copies.numbers_of_step(1)
    # Decode steps have used the slots for what they need next; what is expanded has stayed.
    assert copies.numbers_of_step(prompt) == [*whole[1:], *whole[:AHEAD]]
    behind = [copies.behind(place) for place in places]
    ring = cycle([piece for layer in behind for piece in layer])
    # A small prompt leaves the first layer where it is, a larger one may have had its first piece
    # come.
    there = behind[0] if prompt <= SHARED_TOKENS else behind[0][:1] if behind[0][0] < AHEAD else []
    assert list(islice(ring, len(there))) == there
    step = sum(map(len, behind))
    count = step + len(behind[0]) - len(there)
    assert copies.numbers_of_step(1) == list(islice(ring, count + SLOTS))
    for _ in range(2):
        assert copies.numbers_of_step(1) == list(islice(ring, step))


def test_slots_that_decode_steps_leave_free_are_filled_for_a_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copies = Copies(monkeypatch, last=1)
    for tokens in (150, 150, 1, 1, 150, 1, 150):
        copies.numbers_of_step(tokens)
    whole, behind = copies.whole, copies.behind(4)
    assert copies.numbers_of_step(1) == [*behind, *whole[1:AHEAD]]
    assert copies.numbers_of_step(1) == []
    assert copies.numbers_of_step(150) == [*whole[AHEAD:], *whole[:AHEAD]]
    # Whole weights of a decode step stay while a small prompt is computed.
    copies.numbers_of_step(1)
    assert copies.numbers_of_step(40) == [*whole[AHEAD:], *whole[:AHEAD]]
    assert copies.numbers_of_step(1) == []
    assert copies.numbers_of_step(40) == [*whole[AHEAD:], *whole[:AHEAD]]


def test_where_there_is_room_for_some_of_a_layer_the_rest_comes_in_each_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copies = Copies(monkeypatch, last=1, most=300)
    for tokens in (150, 150, 1, 1, 150, 1):
        copies.numbers_of_step(tokens)
    gpu, behind, whole = copies.steps.made.gpu, copies.behind(4), copies.whole
    assert gpu is not None
    linears = copies.steps.known[4].parts.linears
    there = sum(gpu._ahead.of(one.weight.data.data_ptr()).pieces for one in linears)
    assert 0 < there < len(behind) - SLOTS
    rest = behind[there:]
    assert copies.numbers_of_step(1) == [*rest[SLOTS:], *rest[:SLOTS]]
    assert copies.numbers_of_step(150) == [*whole, *whole[:AHEAD]]
    assert copies.numbers_of_step(1) == [*behind, *rest[:SLOTS]]
    assert copies.numbers_of_step(1) == [*rest[SLOTS:], *rest[:SLOTS]]


def test_whatever_is_expected_the_results_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = Copies(monkeypatch, share=0.6)
    drawn, pieces = random.Random(0), copies.pieces
    monkeypatch.setattr(
        ReadingOrder, "after", lambda order, piece, but=None: drawn.choice([None, *pieces])
    )
    for tokens in (150, 1, 1, 40, 2, 150, 1):
        copies.numbers_of_step(tokens)

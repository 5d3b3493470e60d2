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
from ray_hetero.planning.prefill_memory import EXPANDED, SHARED_TOKENS, SLOTS  # noqa: E402

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
    whole, there_before = copies.whole, EXPANDED_AHEAD + copies.ahead
    found = copies.numbers_of_step(prompt)
    # Some of them are expanded.
    assert found == [*whole[there_before:], *whole[: EXPANDED_AHEAD + copies.ahead]]
    for _ in range(3):
        copies.numbers_of_step(1)
    # Decode steps have used the memory for what they need next; what is expanded has stayed.
    found = copies.numbers_of_step(prompt)
    assert found == [*whole[EXPANDED_AHEAD:], *whole[: EXPANDED_AHEAD + copies.ahead]]
    behind = [copies.behind(place) for place in places]
    ring = cycle([piece for layer in behind for piece in layer])
    # A small prompt leaves the first layer where it is, a larger one may have had its first pieces
    # come.
    come = [piece for piece in behind[0] if piece < EXPANDED_AHEAD + copies.ahead]
    there = behind[0] if prompt <= SHARED_TOKENS else come
    assert list(islice(ring, len(there))) == there
    step = sum(map(len, behind))
    found = copies.numbers_of_step(1)
    count = step + len(behind[0]) - len(there) + copies.ahead
    assert found == list(islice(ring, count))
    for _ in range(2):
        before = copies.ahead
        found = copies.numbers_of_step(1)
        assert found == list(islice(ring, step + copies.ahead - before))


def test_slots_that_decode_steps_leave_free_are_filled_for_a_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copies = Copies(monkeypatch, last=1)
    for tokens in (150, 150, 1, 1, 150, 1, 150):
        copies.numbers_of_step(tokens)
    whole, behind = copies.whole, copies.behind(4)
    found = copies.numbers_of_step(1)
    assert found == [*behind, *whole[EXPANDED_AHEAD : EXPANDED_AHEAD + copies.ahead]]
    assert copies.numbers_of_step(1) == []

    def check_prompt(tokens: int) -> None:
        before = EXPANDED_AHEAD + copies.ahead
        found = copies.numbers_of_step(tokens)
        assert found == [*whole[before:], *whole[: EXPANDED_AHEAD + copies.ahead]]

    check_prompt(150)
    # Whole weights of a decode step stay while a small prompt is computed.
    copies.numbers_of_step(1)
    check_prompt(40)
    assert copies.numbers_of_step(1) == []
    check_prompt(40)


def test_where_there_is_room_for_some_of_a_layer_the_rest_comes_in_each_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copies = Copies(monkeypatch, last=1, most=300)
    for tokens in (150, 150, 1, 1, 150, 1):
        copies.numbers_of_step(tokens)
    gpu, behind, whole = copies.steps.made.gpu, copies.behind(4), copies.whole
    assert gpu is not None
    linears = copies.steps.known[4].parts.linears
    there = sum(gpu._ahead.of(one.weight.data.data_ptr()).placed for one in linears)
    assert 0 < there < len(behind) - SLOTS
    rest = behind[there:]

    def check_decode() -> None:
        before = copies.ahead
        found = copies.numbers_of_step(1)
        assert found == [*rest[before:], *rest[: copies.ahead]]

    check_decode()
    found = copies.numbers_of_step(150)
    assert found == [*whole, *whole[: EXPANDED_AHEAD + copies.ahead]]
    found = copies.numbers_of_step(1)
    assert found == [*behind, *rest[: copies.ahead]]
    check_decode()


def test_whatever_is_expected_the_results_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = Copies(monkeypatch, share=0.6)
    drawn, pieces = random.Random(0), copies.pieces
    monkeypatch.setattr(
        ReadingOrder, "after", lambda order, piece, but=None: drawn.choice([None, *pieces])
    )
    for tokens in (150, 1, 1, 40, 2, 150, 1):
        copies.numbers_of_step(tokens)

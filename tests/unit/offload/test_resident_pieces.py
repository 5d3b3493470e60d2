"""Pieces of weights that stay on a GPU, pretended, from one decode step to the next."""

from __future__ import annotations

import gc
import random
import weakref
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from copied_pieces import KeptColumns, small_pieces  # noqa: E402
from native_module import needs_native  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402

from ray_hetero.kernels.layers.layer_parts import CpuBlocks  # noqa: E402
from ray_hetero.offload.decode.share_choice import Share, Shares  # noqa: E402
from ray_hetero.offload.weights.read_sequence import ReadSequence  # noqa: E402
from ray_hetero.offload.weights.resident_pieces import IdleMemory, ResidentPieces  # noqa: E402
from ray_hetero.offload.weights.weight_pieces import Piece  # noqa: E402
from ray_hetero.planning.prefill_memory import EXPANDED  # noqa: E402

current_platform.import_kernels()
pytestmark = needs_native


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    small_pieces(monkeypatch)


def test_some_stay_until_the_next_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = KeptColumns(monkeypatch, 512)
    kept.of_step(150)
    first = kept.of_step(1)
    needed = {piece for layer in kept.of_layers for piece in layer}
    assert needed <= set(first)
    kept.of_step(1)
    # Whatever has stayed is not copied again, and everything else once a step.
    again = [kept.of_step(1) for _ in range(3)]
    stay = needed.difference(*again)
    assert 0 < len(stay) < len(needed)
    # One may come at the end of the step before, or at the beginning of the one after.
    times = Counter(piece for copied in again[:2] for piece in copied)
    assert set(times) == needed - stay
    assert sum(abs(count - 2) for count in times.values()) <= 2
    # From now on the steps are ordered in one call each, where every piece has its place.
    assert set(again[2]) == needed - stay
    # As many of each layer as of the others, or one more.
    counts = [sum(piece in stay for piece in layer) for layer in kept.of_layers]
    assert max(counts) - min(counts) <= 1
    # A long prompt takes their place, and the step behind it has them come anew.
    kept.of_step(500)
    assert stay <= set(kept.of_step(1))
    copied = {piece for _ in range(2) for piece in kept.of_step(1)}
    assert not stay & copied


def test_there_may_be_room_for_none_or_all(monkeypatch: pytest.MonkeyPatch) -> None:
    none = KeptColumns(monkeypatch, 128)
    none.have_idle(monkeypatch, [])
    none.of_step(100)
    none.of_step(1)
    needed = {piece for layer in none.of_layers for piece in layer}
    none.of_step(1)
    assert set(none.of_step(1)) == needed
    every = KeptColumns(monkeypatch, 4096)
    every.of_step(100)
    every.of_step(1)
    every.of_step(1)
    assert not every.of_step(1)


def test_steps_of_other_sizes_take_their_place(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = KeptColumns(monkeypatch, 512)
    shares = Shares((Share(1, columns=4), Share(2, columns=20), Share(20, columns=8)))
    kept.steps.shared.shares = shares
    drawn = random.Random(1)
    kept.of_step(40)
    for _ in range(4):
        for _ in range(6):
            kept.of_step(drawn.choice([1, 1, 1, 2, 5, 20]))
        kept.of_step(140)


def test_a_piece_on_its_way_is_waited_for_before_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = KeptColumns(monkeypatch, 512)
    kept.of_step(150)
    for _ in range(2):
        kept.of_step(1)
    reader = kept.reader
    waited: list[Any] = []

    class Noting:
        def wait_event(self, event: Any) -> None:
            waited.append(event)

    there = [slot for slot in reader.kept._at.slots.values() if slot.piece is not None]
    assert there
    reader.kept._computing = Noting()
    reader.kept.forget()
    assert waited == [slot.ready for slot in there]
    assert not any(reader.kept.has(piece) for layer in kept.of_layers for piece in layer)
    reader.kept.forget()
    assert len(waited) == len(there)


def test_an_order_whose_pieces_are_all_passed_over() -> None:
    order = ReadSequence()
    pieces = [Piece(torch.empty(1), at, at + 1, 1, lambda rows, into: None) for at in range(3)]
    for piece in [*pieces, pieces[0]]:
        order.use(piece)
    assert order.after(pieces[0]) is pieces[1]
    assert order.after(pieces[0], but=lambda piece: piece is pieces[1]) is pieces[2]
    assert order.after(pieces[0], but=lambda piece: True) is None
    assert order.after(pieces[0], but=lambda piece: piece is not pieces[0]) is pieces[0]


class Noted:
    """Events and a stream that note what is ordered."""

    def __init__(self) -> None:
        self.log: list[tuple[str, object]] = []

    def event(self, name: str = "of a slot") -> Any:
        """Make an event with a name."""
        made = SimpleNamespace(name=name)
        made.record = lambda stream: self.log.append(("record", made.name))
        return made

    def wait_event(self, event: Any) -> None:
        """Have the stream wait."""
        self.log.append(("wait", event.name))


def test_other_streams_are_done_before_pieces_come_and_wait_until_they_are_gone() -> None:
    noted = Noted()
    kept = ResidentPieces(SimpleNamespace(Event=noted.event), noted)
    pieces = [
        Piece(torch.empty(16, 64), at, at + 32, 64, lambda rows, into: None) for at in (0, 32)
    ]
    idle = [
        IdleMemory(torch.empty(8192, dtype=torch.uint8)),
        IdleMemory(
            torch.empty(8192, dtype=torch.uint8), noted.event("uploads came"),
            noted.event("uploads may come"),
        ),
    ]  # fmt: skip
    order = ReadSequence()
    kept.begin(order, pieces, lambda: idle)
    assert noted.log == [("wait", "uploads came"), *[("record", "of a slot")] * 2]
    assert not kept.is_complete
    for piece in pieces:
        slot = kept.slot(piece)
        assert slot is not None
        slot.piece = piece
    noted.log.clear()
    kept.begin(order, pieces, lambda: idle)
    assert kept.is_complete
    assert not noted.log
    kept.forget()
    assert noted.log == [*[("wait", "of a slot")] * 2, ("record", "uploads may come")]
    kept.forget()
    assert len(noted.log) == 3


def test_what_was_measured_with_is_freed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = KeptColumns(monkeypatch, 512)
    kept.of_step(150)
    for _ in range(6):
        kept.of_step(1)
    columns, piece = weakref.ref(kept.columns), weakref.ref(kept.of_layers[0][0])
    reader = kept.reader
    assert len(reader.kept._known) == 1
    # Where the CPU is the GPU, what is repeated is a method; in a CUDA graph nothing is left of it.
    kept.columns.graphs._graphs.clear()
    # Another order takes its place, as that of the engine's own layers does.
    other = ReadSequence()
    reader.keep(other, [Piece(torch.empty(1, 8), 0, 1, 8, lambda rows, into: None)], list)
    reader.forget()
    reader.lend(object())
    gc.disable()
    try:
        kept.steps.shared = kept.steps.made.shared = kept.steps.columns = None
        assert columns() is None
        assert len(reader.kept._known) == 1
        for slot in reader.all_slots:
            slot.piece = None
        assert piece() is None
    finally:
        gc.enable()


def test_rows_of_embeddings_go_to_none_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = KeptColumns(monkeypatch, 512)
    (step,) = [kept.columns._pieces_of(CpuBlocks(4))]
    assert kept.columns._is_whole(step)
    # These are sent in decode steps of many requests too.
    rows = kept.steps.kernel.gpu.memory.embedded._there
    assert rows is not None
    begin, end = rows.data_ptr(), rows.data_ptr() + rows.nbytes
    idle = kept.columns._idle(step)
    assert len(idle) == 2 + 2 + 3 + EXPANDED
    for one in idle:
        first = one.memory.data_ptr()
        assert first + one.memory.nbytes <= begin or end <= first


def test_pieces_expanded_ahead_come_once_where_a_layer_does_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = KeptColumns(monkeypatch, 150)
    kept.of_step(150)
    for _ in range(3):
        kept.of_step(1)
    (step,) = kept.columns._pieces.values()
    assert not kept.columns._is_whole(step)
    copied = Counter(piece for _ in range(6) for piece in kept.of_step(1))
    # Of those ahead there may be one more or less at the end than at the beginning.
    assert sum(copied.values()) in range(6 * len(copied) - 1, 6 * len(copied) + 2)
    assert set(copied.values()) <= {5, 6, 7}
    # Nor is a measured step captured: its pieces wait for what the stream was given before.
    kept.shared.prepare(1, 12)
    assert not kept.columns.graphs.kinds
    assert kept.columns.graphs.replayed == 0


def test_short_prompts_take_the_place_of_few(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = KeptColumns(monkeypatch, 512)
    kept.of_step(150)
    for _ in range(6):
        kept.of_step(1)
    pieces = {piece for layer in kept.of_layers for piece in layer}
    reader = kept.reader

    def there() -> set[Piece]:
        return {piece for piece in pieces if reader.kept.has(piece)}

    every, taken = there(), []
    for tokens in (40, 140, 300):
        kept.of_step(tokens)
        left = there()
        # What is left comes no more, and behind the others come the first ones of the next step.
        copied = kept.of_step(1)
        assert set(copied) == pieces - left
        smallest = min(piece.weight.nbytes for piece in pieces)
        assert len(copied) - len(set(copied)) <= len(reader.memory) // smallest
        assert there() == every
        for _ in range(3):
            kept.of_step(1)
        taken.append(len(every - left))
    assert 0 < taken[0] <= taken[1] < taken[2] <= len(every)
    assert taken[0] < len(every) / 2

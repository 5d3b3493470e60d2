"""Decode steps whose part of a GPU, pretended, is ordered in one call."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

import paged_steps  # noqa: E402
from copied_pieces import LAYERS, Decoding, KeptColumns, small_pieces  # noqa: E402
from native_module import TESTED, level_of, needs_native  # noqa: E402
from paged_steps import Steps  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402

from ray_hetero.errors import UnsupportedError  # noqa: E402
from ray_hetero.kernels.layers.layer_parts import CpuBlocks  # noqa: E402
from ray_hetero.kernels.linear.streaming_linear import StreamingLinear  # noqa: E402
from ray_hetero.offload.decode import (  # noqa: E402
    mlp_columns,
    shared_decode,
    step_graphs,
)
from ray_hetero.offload.decode.column_channel import PHASES  # noqa: E402
from ray_hetero.offload.decode.mlp_columns import MlpColumnOffload  # noqa: E402
from ray_hetero.offload.decode.share_choice import Share, Shares  # noqa: E402
from ray_hetero.offload.weights.piece_reader import PieceReader  # noqa: E402
from ray_hetero.offload.weights.resident_pieces import IdleMemory  # noqa: E402
from ray_hetero.offload.weights.weight_pieces import Piece  # noqa: E402
from ray_hetero.planning.prefill_memory import SHARED_TOKENS  # noqa: E402

current_platform.import_kernels()
pytestmark = needs_native


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    small_pieces(monkeypatch)


def needed(kept: KeptColumns) -> set[Piece]:
    """Pieces that a step copies once some stay."""
    reader = kept.reader
    return {piece for layer in kept.of_layers for piece in layer if not reader.kept.has(piece)}


def test_each_copies_what_does_not_stay_once(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = KeptColumns(monkeypatch, 512)
    kept.of_step(150)
    # One has its pieces stay, and graphs are made of the next ones, of each of the phases.
    for _ in range(1 + PHASES):
        kept.of_step(1)
    graphs = kept.columns.graphs
    assert graphs.replayed == 0
    kept.of_step(1)
    for number in range(2, 2 + 2 * PHASES):
        copied = kept.of_step(1)
        assert graphs.replayed == number
        assert len(copied) == len(set(copied))
        assert set(copied) == needed(kept)
    # Behind a long prompt, pieces come to where graphs have them: those that stay, and the first
    # ones of the others.
    kept.of_step(500)
    before = graphs.replayed
    every = {piece for layer in kept.of_layers for piece in layer}
    again = kept.of_step(1)
    assert graphs.replayed == before + 1
    assert set(again) == every
    assert len(again) - len(every) == len(kept.reader.all_slots)
    assert set(kept.of_step(1)) == needed(kept)


def gone(kept: KeptColumns) -> set[Piece]:
    """Pieces whose place a prompt has taken."""
    reader = kept.reader
    every = {piece for layer in kept.of_layers for piece in layer}
    return {piece for piece in every if reader.kept.slot(piece) and not reader.kept.has(piece)}


def decoding(monkeypatch: pytest.MonkeyPatch, **given: Any) -> KeptColumns:
    """Decode steps of one request that are ordered in one call."""
    kept = KeptColumns(monkeypatch, 512, **given)
    kept.of_step(150)
    for _ in range(2 + PHASES):
        kept.of_step(1)
    assert kept.columns.graphs.replayed == 1
    return kept


def test_the_cores_compute_a_step_whose_pieces_are_on_their_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = decoding(monkeypatch)
    graphs, columns = kept.columns.graphs, kept.columns
    for tokens in (300, 150):
        kept.of_step(tokens)
        every = {piece for layer in kept.of_layers for piece in layer}
        reader, taken = kept.reader, gone(kept)
        assert taken
        replayed, steps = graphs.replayed, columns.steps
        with monkeypatch.context() as patched:
            patched.setattr(torch.cpu.Event, "query", lambda event: False)
            copied = kept.of_step(1)
            assert len(copied) == len(set(copied)) == len(taken) + len(reader.all_slots)
            assert taken < set(copied) < every
            # They come once.
            assert not kept.of_step(1)
            assert (graphs.replayed, columns.steps) == (replayed, steps)
        for number in range(1, 1 + PHASES):
            assert set(kept.of_step(1)) == needed(kept)
            assert (graphs.replayed, columns.steps) == (replayed + number, steps + number)


def test_the_gpu_has_its_part_where_pieces_come_sooner_than_the_cores_are_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = decoding(monkeypatch)
    shared, columns = kept.shared, kept.columns
    kept.of_step(300)
    moving = sum(slot.memory.nbytes for slot in kept.reader.all_slots)
    nbytes = moving + sum(piece.weight.nbytes for piece in gone(kept))
    monkeypatch.setattr(columns, "_link_rate", nbytes / 0.1)
    steps = columns.steps
    with monkeypatch.context() as patched:
        patched.setattr(torch.cpu.Event, "query", lambda event: False)
        # Slots are of the largest piece.
        for left_s, is_shared in ((0.05, False), (0.2, True)):
            shared.shares = Shares((Share(1, columns=12, gain_s=left_s / LAYERS),))
            kept.of_step(1)
            assert columns.steps == steps + is_shared, left_s


def test_the_gpu_has_its_part_where_steps_of_several_kinds_take_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared_decode, "STEPS", 1)
    kept = decoding(monkeypatch)
    shared, columns = kept.shared, kept.columns
    for parts in (4, 4, 4, 4, 4, 12):
        shared.shares = Shares((Share(1, columns=parts),))
        kept.of_step(1)
    monkeypatch.setattr(torch.cpu.Event, "query", lambda event: False)
    steps = columns.steps
    for number, parts in enumerate((4, 12, 4, 12), 1):
        shared.shares = Shares((Share(1, columns=parts),))
        kept.of_step(1)
        assert columns.steps == steps + number


def test_pieces_come_before_the_step_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = decoding(monkeypatch)
    shared, graphs = kept.shared, kept.columns.graphs
    kept.of_step(300)
    computing, awaited = kept.steps.kernel.gpu.computing, []
    with monkeypatch.context() as patched, kept.traced():
        patched.setattr(computing, "wait_event", awaited.append)
        assert shared.fetch(1)
    copied = kept.copied
    assert copied
    # Products with them are computed behind their copies.
    reader = kept.reader
    slots = [*reader.all_slots, *filter(None, map(reader.kept.slot, copied))]
    assert {id(slot.ready) for slot in slots} <= set(map(id, awaited))
    with kept.traced():
        assert shared.fetch(1)
    assert not kept.copied
    replayed = graphs.replayed
    assert set(kept.of_step(1)) == needed(kept)
    assert graphs.replayed == replayed + 1
    # Steps of more tokens have another graph, or none yet, and none is shared of so many.
    assert shared.fetch(2)
    assert not shared.fetch(500)
    # A prompt takes their place again.
    shared.fetch(1)
    kept.of_step(300)
    assert set(copied) <= set(kept.of_step(1))


def test_what_cuda_says_while_pieces_come_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = decoding(monkeypatch)
    kept.of_step(300)

    def fail(*given: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(PieceReader, "bring", fail)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        kept.of_step(1)


def test_nothing_is_copied_where_all_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = KeptColumns(monkeypatch, 4096)
    kept.of_step(100)
    for _ in range(2 + PHASES):
        kept.of_step(1)
    assert not kept.of_step(1)
    assert kept.columns.graphs.replayed == 2


def test_each_has_memory_of_its_own_where_there_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = KeptColumns(monkeypatch, 512)
    kept.shared.shares = Shares((Share(1, columns=2),))
    # Room for four of five pieces, wherever it begins.
    memory = torch.empty((5 * 64 << 10) - 1, dtype=torch.uint8)
    kept.have_idle(monkeypatch, [IdleMemory(memory)])
    kept.of_step(150)
    for _ in range(2 + PHASES):
        kept.of_step(1)
    slots = kept.reader.all_slots
    assert 0 < len(needed(kept)) <= len(slots)
    for _ in range(PHASES):
        assert not kept.of_step(1)
    assert kept.columns.graphs.replayed == 1 + PHASES


TILED = [name for name in TESTED if "tiles" in name or "amx" in name]
"""Levels with tiles."""


@pytest.mark.parametrize("parts", [12, 20])
@pytest.mark.parametrize("tiles", [None, *TILED])
def test_one_graph_is_of_several_numbers_of_tokens(
    tiles: str | None, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if tiles:
        level = level_of(tiles)
        monkeypatch.setattr(paged_steps, "StreamingLinear", partial(StreamingLinear, level=level))
    steps = Steps(monkeypatch, layers=LAYERS, columns=parts, most=512)
    assert steps.shared is not None
    assert steps.kernel.level.has_tiles or not tiles
    graphs = steps.columns.graphs
    decoding = Decoding(steps, *[60] * 8)
    for count in [5, 8, *[7] * PHASES]:
        decoding.step(count)
    assert (graphs.replayed, len(graphs.kinds)) == (1, PHASES)
    for number, count in enumerate((8, 5, 6, 7, 6, 5), 2):
        decoding.step(count)
        assert graphs.replayed == number
    decoding.step(4)
    assert graphs.replayed == 7
    assert {kind.tokens for kind in graphs.kinds} == {8}


@pytest.mark.parametrize("most", [100, 512])
def test_there_is_a_size_for_every_number_of_tokens(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = KeptColumns(monkeypatch, most).columns._size
    largest = min(most, SHARED_TOKENS)
    for tokens in range(1, largest + 1):
        assert tokens <= size(tokens) <= min(largest, 2 * tokens)
    assert [size(tokens) for tokens in (1, 3, 8, 9, 33, 97)] == [1, 4, 8, 16, 48, largest]
    # All of them have graphs at the same time.
    assert len(mlp_columns.SIZES) * PHASES <= step_graphs.MOST_GRAPHS


@pytest.mark.parametrize("parts", [12, 20])
def test_steps_of_several_kinds_take_turns(parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_decode, "STEPS", 1)
    monkeypatch.setattr(step_graphs, "MOST_GRAPHS", 2 * PHASES)
    steps = Steps(monkeypatch, layers=5, columns=12, most=512)
    shared = steps.shared
    assert shared is not None
    shared.shares = Shares((Share(1, columns=4), Share(2, columns=parts)))
    graphs = steps.columns.graphs
    decoding = Decoding(steps, 150, 120, 130)
    for _ in range(2):
        for count in (1, 2, 3):
            for _ in range(3 + PHASES):
                decoding.step(count)
    assert len(graphs.kinds) == 2 * PHASES
    # The kept pieces are those of two parts of all columns in turn.
    replayed = graphs.replayed
    assert replayed >= 2 * 3 * 2
    for count in (3, 2, 3, 2, 3):
        decoding.step(count)
    assert graphs.replayed == replayed + 5


def test_another_share_is_taken_once_it_is_asked_for_some_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = Steps(monkeypatch, layers=LAYERS, columns=12, most=512)
    shared = steps.shared
    assert shared is not None
    shared.shares = Shares((Share(1, columns=4), Share(3, columns=12)))
    decoding = Decoding(steps, 120, 120, 120)
    kept: list[int] = []
    of_step = MlpColumnOffload.of_step

    def noted(columns: MlpColumnOffload, tokens: int, blocks: CpuBlocks) -> Any:
        kept.append(blocks.columns)
        return of_step(columns, tokens, blocks)

    monkeypatch.setattr(MlpColumnOffload, "of_step", noted)
    for count in (1, 3, 3, 1, *[3] * shared_decode.STEPS):
        decoding.step(count)
    few, many = (shared._kept(parts).columns for parts in (4, 12))
    assert kept == [few] * (3 + shared_decode.STEPS) + [many]
    decoding.step(1)
    assert kept.pop() == many
    # A prompt takes the place of what stays.
    prompt = steps.request(200)
    steps.check((prompt, 0, 190))
    decoding.step(1)
    assert kept.pop() == few


def test_what_cannot_be_captured_is_ordered_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(
        step_graphs.logger, "warning", lambda text, *given: said.append(text % given)
    )

    def refuse(*given: Any) -> Any:
        raise UnsupportedError("CUDA error: operation not permitted when stream is capturing")

    monkeypatch.setattr(step_graphs, "captured", refuse)
    kept = KeptColumns(monkeypatch, 512)
    kept.of_step(150)
    for _ in range(3 + PHASES):
        kept.of_step(1)
    assert kept.columns.graphs.replayed == 0
    (line,) = said
    assert "cannot capture them (CUDA error: operation not permitted" in line


def test_a_step_that_fails_leaves_the_next_ones_right(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = KeptColumns(monkeypatch, 512)
    kept.of_step(150)
    for _ in range(3 + PHASES):
        kept.of_step(1)
    replayed = kept.columns.graphs.replayed
    assert replayed > 0
    layers = kept.shared._layers
    native_run = layers.run

    def fail(*given: Any, **others: Any) -> None:
        raise RuntimeError("a rank of the group has ended")

    monkeypatch.setattr(layers, "run", fail)
    positions, hidden = kept.steps.begin([(kept.request, kept.done, kept.done + 1)])
    with pytest.raises(RuntimeError, match="has ended"):
        kept.steps.made(positions, hidden, None)
    monkeypatch.setattr(layers, "run", native_run)
    for _ in range(PHASES):
        kept.of_step(1)
    assert kept.columns.graphs.replayed == replayed + 1 + PHASES


def test_measured_steps_are_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = KeptColumns(monkeypatch, 512)
    shared, columns = kept.shared, kept.columns
    kept.of_step(150)
    kept.of_step(1)
    orders: list[Sequence[Any]] = []
    order = columns._order_layers
    monkeypatch.setattr(
        columns, "_order_layers", lambda *given: (orders.append(given), order(*given))
    )
    shared.prepare(1, 12)
    # Nothing is done by that.
    assert not orders
    for number in range(1, 2 * PHASES):
        kept.of_step(1)
        assert columns.graphs.replayed == number == len(orders)
    shared.prepare(1, 12)
    assert len(columns.graphs.kinds) == PHASES

"""A pretended GPU begins with its part of a decode step before the cores compute theirs."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from copied_pieces import KeptColumns, small_pieces  # noqa: E402
from group_steps import GroupSteps  # noqa: E402
from native_module import needs_native  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402

from ray_hetero.kernels.prompts import column_pieces, columns_on_gpu  # noqa: E402
from ray_hetero.kernels.prompts.column_memory import PHASES  # noqa: E402
from ray_hetero.kernels.prompts.columns_on_gpu import ColumnsOnGpu  # noqa: E402

current_platform.import_kernels()
pytestmark = needs_native

FIRST_GRAPHS = 3 + PHASES
"""Steps of one kind after which those that follow are ordered in one call."""


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    small_pieces(monkeypatch)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> KeptColumns:
    """Decode steps of one request that have graphs."""
    made = KeptColumns(monkeypatch, 512)
    made.of_step(150)
    for _ in range(FIRST_GRAPHS):
        made.of_step(1)
    return made


def words(columns: ColumnsOnGpu) -> list[int]:
    """Layers that were asked for and answered."""
    own = columns._own
    return [ctypes.c_uint32.from_address(at).value for at in (own.asked, own.answered)]


def begin(kept: KeptColumns, tokens: int = 1) -> bool:
    """Whether a step has begun ahead."""
    assert kept.steps.shared is not None
    kept.steps.shared.begin_ahead(tokens)
    return kept.columns._ahead is not None


def test_the_step_goes_on_with_what_has_begun(kept: KeptColumns) -> None:
    for number in range(2 * PHASES):
        replayed, steps = kept.columns.graphs.replayed, kept.columns.steps
        assert begin(kept)
        kept.of_step(1)
        assert kept.columns.graphs.replayed == replayed + 1, number
        assert kept.columns.steps == steps + 1
        assert kept.steps.made.gpu.abandon is None  # type: ignore[union-attr]
        asked, answered = words(kept.columns)
        assert asked == answered


@pytest.mark.parametrize("tokens", [3, 300])
def test_another_step_has_it_abandoned(tokens: int, kept: KeptColumns) -> None:
    before = words(kept.columns)
    first = kept.columns.first
    assert begin(kept)
    assert words(kept.columns) != before
    kept.of_step(tokens)
    # A step of three tokens is one that the GPU has a part of, too.
    assert kept.columns.first == first or tokens == 3
    for _ in range(2 * PHASES):
        kept.of_step(1)
        begin(kept)
    kept.of_step(1)


def test_a_step_that_does_not_come_leaves_nothing(kept: KeptColumns) -> None:
    before, first, steps = words(kept.columns), kept.columns.first, kept.columns.steps
    assert begin(kept)
    gpu = kept.steps.made.gpu
    assert gpu is not None
    assert not gpu.is_settled
    gpu.give_up()
    assert (words(kept.columns), kept.columns.first, kept.columns.steps) == (before, first, steps)
    assert gpu.is_settled
    replayed = kept.columns.graphs.replayed
    for number in range(1, 1 + PHASES):
        kept.of_step(1)
        assert kept.columns.graphs.replayed == replayed + number


def test_steps_without_a_graph_begin_when_they_are_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = KeptColumns(monkeypatch, 512)
    kept.of_step(150)
    assert not begin(kept)
    for _ in range(FIRST_GRAPHS):
        kept.of_step(1)
    # More tokens than the GPU shares a step of, or another number of them.
    assert not begin(kept, 500)
    assert not begin(kept, 2)
    assert begin(kept)
    # It is not begun twice.
    replayed = kept.columns.graphs.replayed
    assert begin(kept)
    kept.of_step(1)
    assert kept.columns.graphs.replayed <= replayed + 1


def test_what_fails_in_a_step_that_does_not_come_is_raised(
    kept: KeptColumns, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = words(kept.columns)

    def fail(*given: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(kept.columns.graphs, "replay", fail)
    assert begin(kept)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        kept.steps.made.gpu.give_up()  # type: ignore[union-attr]
    assert words(kept.columns) == before


def test_ranks_of_a_group_count_no_step_that_does_not_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(column_pieces, "LEAST_COLUMNS", 160)
    steps = GroupSteps(monkeypatch, 2, layers=5, share=0.6, wide=160)
    steps.join()
    columns = steps.give_columns(9)
    request, done = steps.request(80), 40
    steps.check((request, 0, done))

    def decode() -> None:
        nonlocal done
        steps.check((request, done, done + 1))
        done += 1

    for _ in range(FIRST_GRAPHS):
        decode()
    first, other = columns
    assert isinstance(first, columns_on_gpu.ColumnsOnGpu)
    assert first.graphs.replayed > 0
    shared = [rank.made.shared for rank in steps.ranks]

    def begin_all() -> None:
        for one in shared:
            assert one is not None
            one.begin_ahead(1)
        assert first._ahead is not None

    for _ in range(2):
        begin_all()
        assert first.first != other.first
        steps.ranks[0].made.gpu.give_up()
        assert first.first == other.first
        for _ in range(PHASES):
            begin_all()
            decode()
    assert first.steps == other.steps

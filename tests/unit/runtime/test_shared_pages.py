"""Memory that other processes map is theirs too, and nobody can take it away."""

from __future__ import annotations

import mmap
import os

import pytest

torch = pytest.importorskip("torch")

from ray_hetero.kernels.experts.expert_room import Room, SharedRoom, room_to_share  # noqa: E402
from ray_hetero.kernels.formats import PackedWeight  # noqa: E402
from ray_hetero.runtime import shared_pages  # noqa: E402
from ray_hetero.runtime.shared_pages import (  # noqa: E402
    HUGE,
    LONG_STEP,
    STEP,
    SharedPages,
    kept_at,
    kept_memory,
)


def test_what_one_writes_the_other_reads_wherever_it_is_mapped() -> None:
    left = SharedPages.made(3 * STEP, "test")
    assert left.address % HUGE == 0
    left.prepare(0, STEP)
    assert left.prepared_bytes == STEP
    assert left.huge_bytes in (0, STEP)
    left.memory[:8] = torch.arange(8, dtype=torch.uint8)
    left.append(b"about it")
    right = SharedPages.received(left.descriptor)
    assert right.address != left.address
    assert right.memory[:8].tolist() == list(range(8))
    assert bytes(right.memory[3 * STEP :].tolist()) == b"about it"
    right.memory[STEP] = 7
    assert left.memory[STEP] == 7
    # Pages that nobody has written are not there.
    assert os.fstat(left.descriptor).st_blocks * 512 <= STEP + 2 * HUGE
    for nbytes in (0, 4 * STEP):
        with pytest.raises(PermissionError):
            os.truncate(left.descriptor, nbytes)


@pytest.mark.parametrize("nbytes", [0, 3 * STEP + 5, LONG_STEP + 1])
def test_memory_that_is_kept_is_all_there_zeroed_and_found_by_its_address(nbytes: int) -> None:
    memory = kept_memory(nbytes)
    assert nbytes <= len(memory) < nbytes + STEP + 1
    assert not memory.any()
    pages = kept_at(memory.data_ptr())
    assert pages is not None
    assert os.fstat(pages.descriptor).st_blocks * 512 == len(memory)
    found = SharedPages.received(pages.descriptor)
    memory[-1] = 7
    assert found.memory[-1] == 7
    assert kept_at(found.address) is None


def test_memory_that_can_become_smaller_is_refused() -> None:
    pages = SharedPages.made(mmap.PAGESIZE, "test")
    with pytest.raises(RuntimeError, match="is not sealed"):
        SharedPages.received(pages.descriptor)


def test_what_the_system_does_not_give_is_an_error() -> None:
    with pytest.raises(OSError, match="cannot be mapped"):
        SharedPages.made(1 << 60, "test")


@pytest.mark.parametrize("make", [Room, SharedRoom])
def test_weights_of_a_half_are_neighbours(make: type[Room]) -> None:
    room = make((3 * STEP, 2 * STEP))
    given = [torch.randn(64, 32).bfloat16() for _ in range(4)]
    moved = [room.moved(PackedWeight(one, None), half) for half, one in enumerate(given[:2])]
    moved += [room.moved(PackedWeight(one, None), half) for half, one in enumerate(given[2:])]
    for weight, one in zip(moved, given, strict=True):
        assert torch.equal(weight.data, one)
    nbytes = given[0].nbytes
    assert room.used == (2 * nbytes, 2 * nbytes)
    for first, second in ((moved[0], moved[2]), (moved[1], moved[3])):
        assert second.data.data_ptr() - first.data.data_ptr() == nbytes


def test_without_shared_memory_a_room_is_private(monkeypatch: pytest.MonkeyPatch) -> None:
    assert room_to_share((64, 64)).pages is not None

    def refused(*_: object) -> int:
        raise OSError("no memory is to be had")

    monkeypatch.setattr(shared_pages.os, "memfd_create", refused)
    assert room_to_share((64, 64)).pages is None

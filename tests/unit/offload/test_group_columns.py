"""What the ranks of a group tell each other about columns of MLPs on the first one's GPU.

The GPU is the CPU here, the ranks are threads.
"""

from __future__ import annotations

import ctypes

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from copied_pieces import small_pieces  # noqa: E402
from group_steps import GroupDecoding  # noqa: E402
from native_module import needs_native  # noqa: E402
from torch import distributed as dist  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402

from ray_hetero.offload.decode import column_channel  # noqa: E402
from ray_hetero.offload.decode.column_channel import (  # noqa: E402
    FAILED,
    OUT_OF_MEMORY,
    PHASES,
    WORDS_BYTES,
    ColumnMemory,
    MlpColumnClient,
)
from ray_hetero.offload.decode.mlp_columns import MlpColumnOffload  # noqa: E402
from ray_hetero.offload.prefill.offload_gpu import OffloadGpu  # noqa: E402

current_platform.import_kernels()
pytestmark = [needs_native, pytest.mark.timeout(300)]


def decoding_of(monkeypatch: pytest.MonkeyPatch, count: int) -> GroupDecoding:
    small_pieces(monkeypatch)
    return GroupDecoding(monkeypatch, count)


@pytest.mark.parametrize("count", [2, 3])
def test_all_ranks_compute_a_step_alone_whose_weights_are_on_their_way(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoding = decoding_of(monkeypatch, count)
    decoding.step(150)
    for number in range(1, 3 + PHASES):
        assert decoding.step() == [number] * count
    graphs = decoding.columns[0].graphs
    assert graphs.replayed == 1
    for prompt in (150, 100):
        number, replayed = 1 + decoding.columns[0].steps, graphs.replayed
        decoding.step(prompt)
        with monkeypatch.context() as patched:
            patched.setattr(torch.cpu.Event, "query", lambda event: False)
            for _ in range(2):
                assert decoding.step() == [number - 1] * count
        for more in range(3):
            assert decoding.step() == [number + more] * count
            assert graphs.replayed == replayed + more + 1


@pytest.mark.parametrize(("error", "all_ranks"), [
    (RuntimeError("CUDA error: unspecified launch failure"), False),
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
])  # fmt: skip
@pytest.mark.parametrize("steps", [0, 2 + PHASES], ids=["without a graph", "with one"])
def test_what_fails_while_weights_are_asked_for_is_told_to_all_ranks(
    steps: int, error: Exception, all_ranks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoding = decoding_of(monkeypatch, 2)
    decoding.step(150)
    for _ in range(steps):
        decoding.step()

    def fails(gpu: OffloadGpu) -> None:
        raise error

    monkeypatch.setattr(OffloadGpu, "settle", fails)
    if all_ranks:
        # The cores compute this step, and all others.
        shared = decoding.step()
        assert decoding.step() == shared
        assert all(rank.made.shared is None for rank in decoding.steps.ranks)
        return
    first, other = decoding.fails()
    assert first is error
    assert isinstance(other, RuntimeError)
    # Before a step, or in it.
    where = " on the first rank of this group" if steps else ""
    assert str(other) == f"the GPU's part of a decode step has failed{where}"


def memory() -> ColumnMemory:
    return ColumnMemory(torch.zeros(WORDS_BYTES, dtype=torch.uint8), torch.empty(0))


def rank_of(words: ColumnMemory) -> MlpColumnClient:
    """What another rank than the first has, as far as it listens."""
    rank = MlpColumnClient.__new__(MlpColumnClient)
    rank._own = words
    return rank


def test_a_rank_hears_what_was_said_once() -> None:
    words = memory()
    # The numbers go round.
    for at in (words.said, words.said + 4):
        ctypes.c_uint32.from_address(at).value = ((1 << 31) - 2) << (at == words.said)
    assert words.hear() is None
    for takes_part in (True, True, False, True, False, False):
        words.say(takes_part=takes_part)
        assert words.hear() is takes_part
        assert words.hear() is None


def test_the_first_rank_tells_all_others() -> None:
    first, others = MlpColumnOffload.__new__(MlpColumnOffload), [memory() for _ in range(2)]
    first._ranks = [memory(), *others]
    for takes_part in (True, False):
        assert first.agreed(takes_part=takes_part) is takes_part
        assert [rank_of(one).agreed(takes_part=True) for one in others] == [takes_part] * 2
    assert first._ranks[0].hear() is None


def test_a_first_rank_that_says_nothing_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(column_channel, "WAIT_S", 0.05)
    with pytest.raises(dist.DistError, match=r"has not said in 0\.05 s how a decode step"):
        rank_of(memory()).agreed(takes_part=True)


@pytest.mark.parametrize(("why", "error"), [
    (FAILED, RuntimeError), (OUT_OF_MEMORY, torch.OutOfMemoryError),
])  # fmt: skip
def test_a_first_rank_that_has_failed_is_not_waited_for(why: int, error: type[Exception]) -> None:
    words = memory()
    ctypes.c_uint32.from_address(words.failed).value = why
    with pytest.raises(error, match="on the first rank of this group"):
        rank_of(words).agreed(takes_part=True)

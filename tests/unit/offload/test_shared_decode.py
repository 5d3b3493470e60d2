"""Decode steps that cores and a GPU share give what whole sequences give.

The GPU is the CPU here, with the same copies and the same order; on a GPU it is
tests/gpu/test_prompt_gpu.py.
"""

from __future__ import annotations

import gc
import math
import time
import weakref
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

import paged_steps  # noqa: E402
from native_module import level_of, native, needs_native  # noqa: E402
from paged_steps import GPU_FAMILIES, Steps  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402

from ray_hetero.kernels.layers import decode_step, layer_tokens  # noqa: E402
from ray_hetero.kernels.layers.layer_parts import CpuBlocks  # noqa: E402
from ray_hetero.kernels.linear.streaming_linear import StreamingLinear  # noqa: E402
from ray_hetero.kernels.step_route import StepLimits  # noqa: E402
from ray_hetero.offload.decode import (  # noqa: E402  # noqa: E402
    column_channel,
    column_pieces,
    mlp_columns,
    share_choice,
    shared_decode,
)
from ray_hetero.offload.decode.column_channel import PHASE  # noqa: E402
from ray_hetero.offload.decode.share_choice import (  # noqa: E402
    COLUMN_PARTS,
    Share,
    Shares,
    best_shares,
    had_cores,
    kept_blocks,
    most_parts,
)
from ray_hetero.offload.decode.shared_decode import SharedDecode  # noqa: E402
from ray_hetero.offload.prefill import layer_ops, offload_gpu, step_memory  # noqa: E402
from ray_hetero.planning import prefill_memory  # noqa: E402
from ray_hetero.runtime import stream_words  # noqa: E402

current_platform.import_kernels()
pytestmark = needs_native
LAYERS = 5


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is logged; vLLM's logger hands nothing on to pytest's."""
    found: list[str] = []
    for level in ("info", "warning"):
        for module in (mlp_columns, share_choice, decode_step, shared_decode):
            monkeypatch.setattr(
                module.logger, level, lambda text, *given: found.append(text % given)
            )
    return found


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_memory, "PIECE_BYTES", 128 << 10)
    monkeypatch.setattr(offload_gpu, "LEAST_BYTES", 1)
    monkeypatch.setattr(column_pieces, "LEAST_COLUMNS", 64)
    layer_tokens.take()


@pytest.mark.parametrize("family", GPU_FAMILIES)
@pytest.mark.parametrize(
    ("columns", "is_compact"), [(1, False), (9, True), (16, False), (18, False), (28, True)]
)
def test_columns_of_all_layers(
    columns: int, is_compact: bool, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps(monkeypatch, layers=LAYERS, family=family, columns=columns, is_compact=is_compact)
    one, other, third = (steps.request(tokens) for tokens in (70, 33, 12))
    steps.check((one, 0, 66), (other, 0, 30), (third, 0, 9))
    layer_tokens.take()
    for at in range(3):
        steps.check(*((request, end + at, end + at + 1)
                      for request, end in ((one, 66), (other, 30), (third, 9))))  # fmt: skip
    assert layer_tokens.take().native == 9 * LAYERS
    assert steps.shared is not None
    assert steps.columns.steps == 3


@pytest.mark.parametrize("parts", [9, 21])
def test_columns_beside_tiles(parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    level = level_of("software_tiles")
    monkeypatch.setattr(paged_steps, "StreamingLinear", partial(StreamingLinear, level=level))
    steps = Steps(monkeypatch, layers=2, columns=parts)
    assert steps.kernel.level.has_tiles
    for count in (3, 17, 40):
        requests = [steps.request(4) for _ in range(count)]
        for at in (0, 2, 3):
            steps.check(*((one, at, max(2, at + 1)) for one in requests))


def test_memory_that_a_gpu_sees_by_its_address_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[torch.Tensor]] = []
    host_memory = step_memory.StepMemory.host_memory

    def noted(self: Any, *shape: int, **given: Any) -> torch.Tensor:
        memory = host_memory(self, *shape, **given)
        made.append(weakref.ref(memory))
        return memory

    monkeypatch.setattr(step_memory.StepMemory, "host_memory", noted)
    # On a GPU, what it sees is another tensor.
    monkeypatch.setattr(mlp_columns.MlpColumnOffload, "_seen", lambda _, memory: memory.clone())
    steps = Steps(monkeypatch, layers=LAYERS, columns=8)
    before = len(made)
    columns = steps.columns_of(LAYERS)
    gc.collect()
    assert columns is not None
    assert len(made) > before
    assert all(one() is not None for one in made[before:])


@pytest.mark.parametrize(("isa", "is_compact"), [("vec", True), ("amx", False)])
def test_prompts_and_drafts_come_in_between(
    isa: str, is_compact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps(monkeypatch, layers=LAYERS, columns=12, isa=isa, is_compact=is_compact)
    one, other, prompt = (steps.request(tokens) for tokens in (60, 92, 290))
    steps.check((one, 0, 55), (other, 0, 84))
    steps.check((one, 55, 56), (other, 84, 85))
    # While a GPU computes a prompt the cores decode alone.  A small one leaves some pieces where
    # they are, a larger one takes their place.
    steps.check((one, 56, 57), (prompt, 0, 70), (other, 85, 86))
    steps.check((one, 57, 58), (other, 86, 88))
    steps.check((prompt, 70, 220))
    steps.check((one, 58, 59), (other, 88, 90))
    steps.check((one, 59, 60), (prompt, 220, 290), (other, 90, 91))
    steps.check((other, 91, 92))


def test_a_residual_is_added_first(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch, layers=LAYERS, columns=8)
    request = steps.request(3)
    positions, hidden = steps.begin([(request, 0, 3)])
    first = steps.made(positions, hidden, None)
    half = hidden / 2
    again = steps.made(positions, half, half)
    for one, other in zip(first, again, strict=True):
        torch.testing.assert_close(one, other, rtol=2**-6, atol=2**-6)


def test_results_are_not_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch, layers=LAYERS, columns=16)
    request = steps.request(8)
    positions, hidden = steps.begin([(request, 0, 4)])
    found = steps.made(positions, hidden, None)
    kept = [one.clone() for one in found]
    positions, hidden = steps.begin([(request, 4, 8)])
    steps.made(positions, hidden, None)
    assert all(torch.equal(one, other) for one, other in zip(found, kept, strict=True))


def test_more_tokens_than_a_shared_step_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlp_columns, "SHARED_TOKENS", 2)
    steps = Steps(monkeypatch, layers=LAYERS, columns=8)
    assert steps.shared is not None
    request = steps.request(5)
    steps.check((request, 0, 3))
    assert steps.columns.steps == 0
    steps.check((request, 3, 5))
    assert steps.columns.steps == 1


def test_without_memory_of_the_gpu_the_cores_compute_the_step(
    monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    steps = Steps(monkeypatch, layers=LAYERS, columns=8)
    computed, calls = layer_ops.activated, []

    def fails_in_the_second_layer(*parts: Any) -> Any:
        calls.append(parts)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 MiB")
        return computed(*parts)

    monkeypatch.setattr(layer_ops, "activated", fails_in_the_second_layer)
    request = steps.request(6)
    steps.check((request, 0, 4))
    (line,) = said
    assert "run out of memory (CUDA out of memory. Tried to allocate 2 MiB)" in line
    steps.check((request, 4, 6))
    assert len(calls) == 2


def test_what_fails_while_columns_are_computed_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch, layers=LAYERS, columns=8)

    def fails(*given: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(layer_ops, "activated", fails)
    request = steps.request(2)
    positions, hidden = steps.begin([(request, 0, 2)])
    with pytest.raises(RuntimeError, match="illegal memory access"):
        steps.made(positions, hidden, None)


@pytest.mark.parametrize(("parts", "late"), [(8, "_compute_columns"), (20, "_compute_outputs")])
def test_what_the_cores_wait_for_columns_is_counted(
    parts: int, late: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps(monkeypatch, layers=LAYERS, columns=parts)
    compute, late_s = getattr(mlp_columns.MlpColumnOffload, late), 0.05

    def compute_late(*given: Any) -> Any:
        time.sleep(late_s)
        return compute(*given)

    monkeypatch.setattr(mlp_columns.MlpColumnOffload, late, compute_late)
    request = steps.request(3)
    steps.check((request, 0, 2))
    layer_tokens.take()
    began = time.perf_counter()
    steps.check((request, 2, 3))
    passed = time.perf_counter() - began
    # The cores' own columns take less than a millisecond.
    assert LAYERS * late_s / 2 < layer_tokens.take().columns_waited_s < passed
    assert layer_tokens.take().columns_waited_s == 0


@pytest.mark.parametrize(("parts", "missing"), [(8, "answered"), (20, "projected")])
def test_columns_that_do_not_come_are_an_error(
    parts: int, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(column_channel, "WAIT_S", 0.25)
    write = stream_words.OfHost.write
    steps = Steps(monkeypatch, layers=LAYERS, columns=parts)
    assert steps.shared is not None
    never = getattr(steps.columns._own, missing)

    def write_others(self: Any, address: int, number: int) -> None:
        if address != never:
            write(self, address, number)

    monkeypatch.setattr(stream_words.OfHost, "write", write_others)
    request = steps.request(2)
    positions, hidden = steps.begin([(request, 0, 2)])
    with pytest.raises(
        native.MissingColumns, match=r"was not there in 0\.25 s; with cpu\.decode_gpu"
    ):
        steps.made(positions, hidden, None)


@pytest.mark.parametrize("parts", [12, 24])
@pytest.mark.parametrize("most", [128, 160, 420, 512])
def test_room_for_none_some_or_all_columns(
    most: int, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps(monkeypatch, layers=LAYERS, columns=parts, most=most, is_compact=True)
    one, other = steps.request(70), steps.request(33)
    steps.check((one, 0, 66), (other, 0, 30))
    for at in range(2):
        steps.check((one, 66 + at, 67 + at), (other, 30 + at, 31 + at))


def test_a_driver_that_refuses_to_wait_leaves_all_to_the_cores(
    monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    class Refusing:
        def run(self, given: Any, stream: Any) -> int:
            return 801

    mlp_columns._say_once.cache_clear()
    monkeypatch.setattr(stream_words, "Driver", Refusing)
    words_of = stream_words.words_of
    monkeypatch.setattr(
        mlp_columns, "words_of", lambda _, *given: words_of(torch.device("cuda"), *given)
    )
    steps = Steps(monkeypatch, layers=LAYERS)
    for _ in range(2):
        found = shared_decode.shares_of("auto", steps.known, steps.kernel, steps.columns_of)
        assert found.is_empty
    (line,) = said
    assert "compute decode steps alone: CUDA's driver refuses a stream memory operation" in line
    assert "801" in line


@pytest.mark.parametrize("parts", [6, 22])
def test_words_go_round(parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch, layers=LAYERS, columns=parts)
    assert steps.shared is not None
    given = steps.columns
    assert given is not None
    words = given._own.words.view(torch.uint32)
    request = steps.request(6)
    counted = []
    for at in range(6):
        steps.check((request, at, at + 1))
        assert words[0] == words[16]
        # Outputs are counted where there are some.
        assert int(words[48]) == int(words[0]) - (0 if parts > COLUMN_PARTS else LAYERS)
        counted.append(int(words[0]))
    begins = [PHASE, 2 * PHASE, 0] * 2
    assert counted == [begin + LAYERS for begin in begins]
    # A step's numbers are all ahead of those of the step before, for whoever compares 32 bits.
    for last, begin in zip(counted, begins[1:], strict=False):
        assert 0 < (begin - last) % (1 << 32) < 1 << 31


@pytest.mark.parametrize("kept", [0, -1, 1 << 20])
def test_some_columns_are_left_for_both(kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch, layers=2, columns=8)
    assert steps.shared is not None
    monkeypatch.setattr(shared_decode, "kept_blocks", lambda *given: CpuBlocks(kept))
    monkeypatch.setattr(mlp_columns.MlpColumnOffload, "of_step", lambda *given: nullcontext())
    request = steps.request(2)
    positions, hidden = steps.begin([(request, 0, 2)])
    with pytest.raises(ValueError, match="expected from 1 to"):
        steps.made(positions, hidden, None)


def test_a_step_of_more_tokens_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch, layers=2, columns=8)
    assert steps.shared is not None
    assert steps.columns is not None
    monkeypatch.setattr(mlp_columns.MlpColumnOffload, "of_step", lambda *given: nullcontext())
    steps.columns.native.room = 1
    requests = [steps.request(1) for _ in range(2)]
    positions, hidden = steps.begin([(one, 0, 1) for one in requests])
    with pytest.raises(ValueError, match="at most 1 tokens, for which there is room, got 2"):
        steps.made(positions, hidden, None)


def test_parts_are_whole_blocks() -> None:
    def of(columns: int, outputs: int, *asked: int) -> list[tuple[int, int]]:
        return [tuple(kept_blocks(columns, outputs, parts)) for parts in asked]

    assert of(448, 128, 1, 8, 15, 16) == [(420, 0), (224, 0), (28, 0), (1, 0)]
    assert of(448, 128, 17, 24, 28) == [(1, 120), (1, 64), (1, 32)]
    assert of(2, 2, 1, 8, 16, 17, 28) == [(1, 0)] * 3 + [(1, 1)] * 2
    # Layers of which none can be shared out, beside others that were measured.
    assert of(448, 0, 16, 20) == [(1, 0)] * 2
    assert (most_parts(0), most_parts(1), most_parts(2)) == (16, 16, 28)


@pytest.mark.usefixtures("own_cores")
def test_steps_of_these_layers_are_measured(
    monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    monkeypatch.setattr(shared_decode, "MEASURED_TOKENS", (1, 5))
    steps = Steps(monkeypatch, layers=LAYERS)
    found = shared_decode.shares_of("auto", steps.known, steps.kernel, steps.columns_of)
    assert [one.tokens for one in found.measured] == [1, 5]
    (line,) = said
    assert line.startswith(f"decode steps of {LAYERS} layers take least time if the GPU computes")
    # Nothing of it is left in a cache.
    assert all(bool(cache.isnan().all()) for cache in steps.caches)


@pytest.mark.usefixtures("own_cores")
def test_steps_are_measured_that_the_gpu_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch, layers=LAYERS, columns=8, most=9)
    assert steps.shared is not None
    found = shared_decode.shares_of("auto", steps.known, steps.kernel, steps.columns_of)
    assert [one.tokens for one in found.measured] == [1, 8]
    assert [steps.shared.has(tokens) for tokens in (9, 10)] == [True, False]


def test_the_share_that_takes_least_is_chosen(said: list[str]) -> None:
    asked: list[tuple[int, int]] = []

    def seconds(tokens: int, parts: int) -> float:
        asked.append((tokens, parts))
        # Columns of the cores, and the link beside them.
        return max((16 - parts) * tokens * 1.0, parts * 20.0) + 0.5 * parts

    found = best_shares(seconds, 8, (1, 8, 32, 64), 16)
    # 16 s alone; 128 s alone, 98 s; 512 s alone, 205 s; 1,024 s alone, 262 s.
    assert found == Shares((Share(1), Share(8, 4), Share(32, 10), Share(64, 12)))
    assert "8: 4 of 16 parts, 128000.0 to 98000.0 ms" in said[0]
    gains = [one.gain_s for one in found.measured]
    assert gains == pytest.approx([0, 30 / 8, 307 / 8, 762 / 8])
    assert [found.of(tokens).columns for tokens in (0, 7, 40, 128)] == [0, 4, 10, 12]
    # Every fourth number, those two and one beside the best one, none below what fewer tokens give
    # away; then what was chosen is compared with the cores alone again.
    of_32 = [parts for tokens, parts in asked if tokens == 32]
    assert of_32 == [0, 4, 8, 12, 16, 10, 14, 9, 11, *[0, 10] * 3]
    # 8 tokens are between 1 and 32, which differ; a size between two that agree is not measured.
    assert 8 in {tokens for tokens, _ in asked}
    asked.clear()
    found = best_shares(
        lambda *step: asked.append(step) or 1 - 0.2 * (step[1] == 4), 4, (1, 8, 32), 16
    )
    assert found == Shares((Share(1, 4), Share(8, 4), Share(32, 4)))
    assert {tokens for tokens, _ in asked} == {1, 32}


def test_a_step_that_something_slowed_down_does_not_end_the_search() -> None:
    slow = {8: 3.0}

    def seconds(tokens: int, parts: int) -> float:
        return slow.pop(parts, 1.0 - 0.04 * min(parts, 28 - parts))

    assert best_shares(seconds, 8, (8,), 16) == Shares((Share(8, 14),))


def test_fewer_tokens_give_away_what_more_of_them_do_where_that_takes_less() -> None:
    def seconds(tokens: int, parts: int) -> float:
        if not parts:
            return 1.0 + tokens / 100
        # Something else used the link while one token was measured.
        return 1.0 + 0.1 * parts if tokens == 1 and parts > 1 else 0.8 - 0.02 * min(parts, 12)

    found = best_shares(seconds, 8, (1, 32), 16)
    assert found == Shares((Share(1, 12), Share(32, 12)))
    assert found.measured[0].gain_s == found.measured[1].gain_s


def test_steps_that_other_programs_disturb_are_measured_again() -> None:
    pauses: list[float] = []
    answers = [math.inf, math.inf, 0.5, 0.25]
    measured = share_choice.undisturbed(lambda *step: answers.pop(0), pauses.append)
    assert [measured(1, 0), measured(1, 2)] == [0.5, 0.25]
    assert pauses == [share_choice.PAUSE_S] * 2
    measured = share_choice.undisturbed(lambda *step: math.inf, pauses.append)
    with pytest.raises(share_choice.DisturbedError):
        measured(1, 0)
    assert len(pauses) == 2 + share_choice.TRIES


def test_a_step_is_believed_if_its_threads_had_their_cores() -> None:
    assert had_cores(0.020, 24 * 0.019, 24)
    assert not had_cores(0.130, 24 * 0.065, 24)
    assert had_cores(0.001, 0.0, 24)


def test_nothing_is_given_away_or_kept_where_cores_are_not_free(
    monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    kept: list[Shares] = []
    monkeypatch.setattr(share_choice, "PAUSE_S", 0.0)
    monkeypatch.setattr(shared_decode, "had_cores", lambda *given: False)
    monkeypatch.setattr(shared_decode.ShareCache, "keep", lambda _, found: kept.append(found))
    steps = Steps(monkeypatch, layers=LAYERS)
    found = shared_decode.shares_of("auto", steps.known, steps.kernel, steps.columns_of)
    assert (found, kept) == (Shares(()), [])
    (line,) = said
    assert "other programs compute on this rank's cores" in line


def test_nothing_may_be_given_away() -> None:
    assert best_shares(lambda tokens, parts: 1.0 + parts, 1, (1, 8), 16).is_empty
    assert best_shares(lambda tokens, parts: 1.0, 8, (), 16) == Shares(())


def test_a_share_is_measured_once_a_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(shared_decode, "MEASURED_TOKENS", (1, 5))
    steps = Steps(monkeypatch, layers=LAYERS)
    kernel = steps.kernel
    chosen = Shares((Share(1), Share(5, 6)))
    measured, run = [], []
    monkeypatch.setattr(
        shared_decode, "best_shares", lambda *given: measured.append(given) or chosen
    )
    run_parts = SharedDecode.run

    def run_and_note(self: SharedDecode, parts: int, *given: Any) -> Any:
        run.append(parts)
        return run_parts(self, parts, *given)

    monkeypatch.setattr(SharedDecode, "run", run_and_note)

    def ask(place: str) -> Shares:
        return shared_decode.shares_of("auto", steps.known, kernel, steps.columns_of, place=place)

    assert [ask("here") for _ in range(2)] == [chosen] * 2
    assert len(measured) == 1
    (line,) = said
    assert "as an earlier start measured it" in line
    assert (
        "1: nothing; 5: 6 of 16 parts of every gate and up (cpu.decode_gpu_share; RAY_HETERO"
        in line
    )
    # What it gives away is run once, so that no request waits for a kernel that is to be built.
    assert set(run) == {6}
    ask("elsewhere")
    assert len(measured) == 2
    monkeypatch.setattr(kernel, "limits", StepLimits(64))
    ask("here")
    assert len(measured) == 3
    for _ in range(2):
        ask("")
    assert len(measured) == 5
    # A number is what was asked for.
    for share, parts in ((0.5, 8), (0.01, 1), (1.0, 16)):
        found = shared_decode.shares_of(share, steps.known, kernel, steps.columns_of, place="here")
        assert found == Shares((Share(1, parts),))


def test_no_fewer_parts_than_for_fewer_tokens(said: list[str]) -> None:
    asked: list[tuple[int, int]] = []

    def seconds(tokens: int, parts: int) -> float:
        asked.append((tokens, parts))
        return max(tokens * (1 - 0.5 * parts / 16), 1.5 * parts)

    found = best_shares(seconds, 8, (1, 8, 64), 16)
    assert [one.columns for one in found.measured] == [0, 4, 16]
    assert str(found) == (
        "1: nothing; 8: 4 of 16 parts of every gate and up; 64: 16 of 16 parts of every gate and up"
    )
    asked.clear()
    best_shares(seconds, 8, (8, 64), 16)
    assert min(parts for tokens, parts in asked if tokens == 64 and parts) == 4


@pytest.mark.parametrize("slow_for", [1, 2])
def test_cores_that_take_longer_for_fewer_tokens_are_measured_again(slow_for: int) -> None:
    asked: list[int] = []

    def seconds(tokens: int, parts: int) -> float:
        if not asked or asked[-1] != tokens:
            asked.append(tokens)
        # As where the host takes cores away: what the GPU computes is quicker by far then.
        if tokens == 1 and asked.count(1) <= slow_for:
            return 5.0 - 3.0 * (parts > 0)
        return 1.0 - 0.04 * parts

    found = best_shares(seconds, 8, (1, 8), 8)
    # Measured again only once; then it is that of more tokens.
    assert asked == [1, 8, 1]
    assert found == Shares((Share(1, columns=8), Share(8, columns=8)))


def test_a_gain_that_noise_may_be_is_none() -> None:
    assert best_shares(lambda tokens, parts: 1 - 0.01 * (parts == 4), 4, (8,), 16).is_empty


def test_a_moment_in_which_others_compute_decides_nothing() -> None:
    slow = iter([8.0])  # the first step of the cores alone

    def seconds(tokens: int, parts: int) -> float:
        return 1.2 + 0.1 * parts if parts else next(slow, 1.0)

    assert best_shares(seconds, 4, (8,), 16).is_empty


def test_steps_of_no_more_tokens_than_the_native_module_takes() -> None:
    assert max(shared_decode.MEASURED_TOKENS) == prefill_memory.SHARED_TOKENS == native.STEP_TOKENS

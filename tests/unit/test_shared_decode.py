"""Decode steps that cores and a GPU share give what whole sequences give.

The GPU is the CPU here, with the same copies and the same order; on a GPU it is
tests/gpu/test_prompt_gpu.py.
"""

from __future__ import annotations

import gc
import math
import threading
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

from ray_hetero.kernels.layers import decode_shares, decode_step, layer_tokens, shared_decode  # noqa: E402
from ray_hetero.kernels.layers.decode_shares import (  # noqa: E402
    COLUMN_PARTS,
    Share,
    Shares,
    Way,
    best_shares,
    had_cores,
    kept_blocks,
    most_parts,
)
from ray_hetero.kernels.layers.layer_parts import KeptBlocks  # noqa: E402
from ray_hetero.kernels.layers.layer_tokens import LayerTokens  # noqa: E402
from ray_hetero.kernels.layers.shared_decode import SharedDecode  # noqa: E402
from ray_hetero.kernels.linear.streaming_linear import StreamingLinear  # noqa: E402
from ray_hetero.kernels.prompts import (  # noqa: E402
    behind_attention,
    column_memory,
    column_pieces,
    columns_on_gpu,
    gpu_post_attention,
    gpu_prefill,
    step_memory,
)
from ray_hetero.kernels.prompts.column_memory import PHASE  # noqa: E402
from ray_hetero.kernels.prompts.gpu_prefill import GpuPrefill  # noqa: E402
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
        for module in (columns_on_gpu, decode_shares, decode_step, shared_decode):
            monkeypatch.setattr(
                module.logger, level, lambda text, *given: found.append(text % given)
            )
    return found


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_memory, "PIECE_BYTES", 128 << 10)
    monkeypatch.setattr(gpu_prefill, "LEAST_BYTES", 1)
    monkeypatch.setattr(column_pieces, "LEAST_COLUMNS", 64)
    layer_tokens.take()


@pytest.mark.parametrize("family", GPU_FAMILIES)
@pytest.mark.parametrize(("count", "is_late"), [(1, False), (2, False), (2, True), (5, False)])
def test_steps_of_several_requests(
    count: int, is_late: bool, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {"last": count} if is_late else {"share": count / LAYERS}
    steps = Steps(monkeypatch, layers=LAYERS, family=family, **given)
    one, other, third = (steps.request(tokens) for tokens in (70, 33, 12))
    steps.check((one, 0, 66), (other, 0, 30), (third, 0, 9))
    layer_tokens.take()
    for at in range(3):
        steps.check(*((request, end + at, end + at + 1)
                      for request, end in ((one, 66), (other, 30), (third, 9))))  # fmt: skip
    assert layer_tokens.take() == LayerTokens(native=9 * (LAYERS - count), on_gpu=9 * count)


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
    for at in range(3):
        steps.check(*((request, end + at, end + at + 1)
                      for request, end in ((one, 66), (other, 30), (third, 9))))  # fmt: skip


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
    monkeypatch.setattr(columns_on_gpu.ColumnsOnGpu, "_seen", lambda _, memory: memory.clone())
    steps = Steps(monkeypatch, layers=LAYERS, columns=8)
    before = len(made)
    columns = columns_on_gpu.columns_of(steps.known, steps.behind.gpu, steps.kernel)
    gc.collect()
    assert columns is not None
    assert len(made) > before
    assert all(one() is not None for one in made[before:])


@pytest.mark.parametrize(("isa", "is_compact"), [("vec", True), ("amx", False)])
def test_prompts_and_drafts_come_in_between(
    isa: str, is_compact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps(monkeypatch, layers=LAYERS, share=0.6, isa=isa, is_compact=is_compact)
    one, other, prompt = (steps.request(tokens) for tokens in (60, 92, 290))
    steps.check((one, 0, 55), (other, 0, 84))
    steps.check((one, 55, 56), (other, 84, 85))
    # While a GPU computes a prompt the cores decode alone.  A small one leaves whole weights where
    # they are, a larger one takes their place; other pieces are expected than come then.
    steps.check((one, 56, 57), (prompt, 0, 70), (other, 85, 86))
    steps.check((one, 57, 58), (other, 86, 88))
    steps.check((prompt, 70, 220))
    steps.check((one, 58, 59), (other, 88, 90))
    steps.check((one, 59, 60), (prompt, 220, 290), (other, 90, 91))
    steps.check((other, 91, 92))


def test_a_residual_is_added_first(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch, layers=LAYERS, share=0.4)
    request = steps.request(3)
    positions, hidden = steps.begin([(request, 0, 3)])
    first = steps.made(positions, hidden, None)
    half = hidden / 2
    again = steps.made(positions, half, half)
    for one, other in zip(first, again, strict=True):
        torch.testing.assert_close(one, other, rtol=2**-6, atol=2**-6)


def test_results_are_not_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch, layers=LAYERS, share=1.0)
    request = steps.request(8)
    positions, hidden = steps.begin([(request, 0, 4)])
    found = steps.made(positions, hidden, None)
    kept = [one.clone() for one in found]
    positions, hidden = steps.begin([(request, 4, 8)])
    steps.made(positions, hidden, None)
    assert all(torch.equal(one, other) for one, other in zip(found, kept, strict=True))


def test_more_tokens_than_a_shared_step_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(behind_attention, "SHARED_TOKENS", 2)
    steps = Steps(monkeypatch, layers=LAYERS, share=0.4)
    request = steps.request(5)
    steps.check((request, 0, 3))
    assert layer_tokens.take() == LayerTokens(native=3 * LAYERS)
    steps.check((request, 3, 5))
    assert layer_tokens.take() == LayerTokens(native=2 * 3, on_gpu=2 * 2)


@pytest.mark.parametrize(
    ("count", "is_late", "expected"),
    [
        (0, False, [(0, 5)]),
        (1, False, [(0, 5)]),
        (2, False, [(0, 2), (2, 5)]),
        (3, False, [(0, 1), (1, 3), (3, 5)]),
        (5, False, [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)]),
        (2, True, [(0, 4), (4, 5)]),
    ],
)
def test_calls_end_where_layers_are_given_away(
    count: int, is_late: bool, expected: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps(monkeypatch, layers=LAYERS, share=1.0)
    assert steps.shared is not None
    found = steps.shared.divided(count, is_late=is_late)
    assert [(one.begin, one.end, one.is_given) for one in found] == [
        (begin, end, count > 0) for begin, end in expected
    ]


def test_what_the_next_step_needs_first_is_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch, layers=LAYERS, share=0.6)
    ordered: list[Any] = []
    expand = GpuPrefill.expand

    def expand_and_note(self: GpuPrefill, linears: Any) -> None:
        ordered.append(linears)
        expand(self, linears)

    monkeypatch.setattr(GpuPrefill, "expand", expand_and_note)
    request = steps.request(160)
    steps.check((request, 0, 1))
    layers = [steps.known[place].parts.linears for place in (0, 2, 4)]
    assert steps.made.gpu is not None
    steps.made.gpu.settle()
    assert ordered == [*layers, layers[0]]
    steps.check((request, 1, 2))
    steps.made.gpu.settle()
    assert ordered[4:] == [*layers[1:], layers[0]]
    # A prompt takes their place.
    steps.check((request, 2, 150))
    steps.check((request, 150, 151))
    assert ordered[7:10] == layers


@pytest.mark.parametrize("most", [128, 300, 512, 2048])
def test_room_for_none_some_or_all_of_a_layer(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch, layers=LAYERS, share=0.6, most=most, is_compact=True)
    one, other = steps.request(70), steps.request(33)
    steps.check((one, 0, 66), (other, 0, 30))
    for at in range(2):
        steps.check((one, 66 + at, 67 + at), (other, 30 + at, 31 + at))
    gpu = steps.made.gpu
    assert gpu is not None
    gpu.settle()
    first = steps.known[0].parts.linears
    assert gpu.has(first)
    addresses = [linear.weight.data.data_ptr() for linear in first]
    pieces = [len(gpu._pieces[at]) for at in addresses]
    there = sum(gpu._ahead.of(at).placed for at in addresses)
    assert {128: there == 0, 300: 0 < there < sum(pieces), 512: 0 < there < sum(pieces),
            2048: there == sum(pieces)}[most]  # fmt: skip
    steps.check((one, 68, 70), (other, 32, 33))


def test_one_layer_stays_there(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch, layers=LAYERS, share=0.2)
    ordered: list[Any] = []
    expand = GpuPrefill.expand
    monkeypatch.setattr(
        GpuPrefill, "expand", lambda *given: ordered.append(given[1]) or expand(*given)
    )
    request = steps.request(3)
    for at in range(3):
        steps.check((request, at, at + 1))
    assert len(ordered) == 1


@pytest.mark.parametrize(
    ("given", "function"), [({"share": 0.6}, "behind_from"), ({"columns": 8}, "activated")]
)
def test_without_memory_of_the_gpu_the_cores_compute_the_step(
    given: dict[str, Any], function: str, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    steps = Steps(monkeypatch, layers=LAYERS, **given)
    computed, calls = getattr(gpu_post_attention, function), []

    def fails_in_the_second_layer(*parts: Any) -> Any:
        calls.append(parts)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 MiB")
        return computed(*parts)

    monkeypatch.setattr(gpu_post_attention, function, fails_in_the_second_layer)
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

    monkeypatch.setattr(gpu_post_attention, "activated", fails)
    request = steps.request(2)
    positions, hidden = steps.begin([(request, 0, 2)])
    with pytest.raises(RuntimeError, match="illegal memory access"):
        steps.made(positions, hidden, None)


@pytest.mark.parametrize(("parts", "late"), [(8, "_compute_columns"), (20, "_compute_outputs")])
def test_what_the_cores_wait_for_columns_is_counted(
    parts: int, late: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps(monkeypatch, layers=LAYERS, columns=parts)
    compute, late_s = getattr(columns_on_gpu.ColumnsOnGpu, late), 0.05

    def compute_late(*given: Any) -> Any:
        time.sleep(late_s)
        return compute(*given)

    monkeypatch.setattr(columns_on_gpu.ColumnsOnGpu, late, compute_late)
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
    monkeypatch.setattr(column_memory, "WAIT_S", 0.25)
    write = stream_words.OfHost.write
    steps = Steps(monkeypatch, layers=LAYERS, columns=parts)
    given = steps.shared._columns  # type: ignore[union-attr]
    never = getattr(given._own, missing)  # type: ignore[union-attr]

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


def test_layers_whose_columns_cannot_be_split_are_the_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Shares are measured with the first of several runs of layers.
    steps = Steps(monkeypatch, layers=LAYERS, columns=8)
    shared = steps.shared
    assert shared is not None
    assert shared.has(2)
    shared._columns = None
    assert not shared.has(2)
    steps.check((steps.request(3), 0, 2))


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


def test_a_driver_that_refuses_to_wait_leaves_whole_layers(
    monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    class Refusing:
        def run(self, given: Any, stream: Any) -> int:
            return 801

    columns_on_gpu._say_once.cache_clear()
    monkeypatch.setattr(stream_words, "Driver", Refusing)
    words_of = stream_words.words_of
    monkeypatch.setattr(
        columns_on_gpu, "words_of", lambda _, *given: words_of(torch.device("cuda"), *given)
    )
    steps = Steps(monkeypatch, layers=LAYERS, share=0.5)
    for _ in range(2):
        assert columns_on_gpu.columns_of(steps.known, steps.behind.gpu, steps.kernel) is None
    (line,) = said
    assert "whole layers only, or none: CUDA's driver refuses a stream memory operation" in line
    assert "801" in line


@pytest.mark.parametrize("parts", [6, 22])
def test_words_go_round(parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch, layers=LAYERS, columns=parts)
    assert steps.shared is not None
    given = steps.shared._columns
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
    monkeypatch.setattr(shared_decode, "kept_blocks", lambda *given: KeptBlocks(kept))
    monkeypatch.setattr(columns_on_gpu.ColumnsOnGpu, "of_step", lambda *given: nullcontext())
    request = steps.request(2)
    positions, hidden = steps.begin([(request, 0, 2)])
    with pytest.raises(ValueError, match="expected from 1 to"):
        steps.made(positions, hidden, None)


def test_a_step_of_more_tokens_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch, layers=2, columns=8)
    assert steps.shared is not None
    assert steps.shared._columns is not None
    monkeypatch.setattr(columns_on_gpu.ColumnsOnGpu, "of_step", lambda *given: nullcontext())
    steps.shared._columns.native.room = 1
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


def test_what_fails_while_weights_are_ordered_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch, layers=LAYERS, share=0.6)
    threads = []

    def fails(self: GpuPrefill, linears: Any) -> None:
        threads.append(threading.current_thread())
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(GpuPrefill, "expand", fails)
    request = steps.request(2)
    positions, hidden = steps.begin([(request, 0, 2)])
    with pytest.raises(RuntimeError, match="illegal memory access"):
        steps.made(positions, hidden, None)
    assert threads[0] is not threading.main_thread()


@pytest.mark.usefixtures("own_cores")
def test_steps_of_these_layers_are_measured(
    monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    monkeypatch.setattr(shared_decode, "MEASURED_TOKENS", (1, 5))
    steps = Steps(monkeypatch, layers=LAYERS, share=1.0)
    assert steps.shared is not None
    found = shared_decode.shares_of("auto", steps.known, steps.shared._kernel, steps.behind)
    assert [one.tokens for one in found.measured] == [1, 5]
    (line,) = said
    assert line.startswith(f"decode steps of {LAYERS} layers take least time if the GPU computes")
    # Nothing of it is left in a cache.
    assert all(bool(cache.isnan().all()) for cache in steps.caches)


@pytest.mark.usefixtures("own_cores")
def test_steps_are_measured_that_the_gpu_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch, layers=LAYERS, share=1.0, most=9)
    assert steps.shared is not None
    found = shared_decode.shares_of("auto", steps.known, steps.shared._kernel, steps.behind)
    assert [one.tokens for one in found.measured] == [1, 8]
    assert [steps.shared.count(tokens) for tokens in (9, 10)] == [LAYERS, 0]


def test_the_share_that_takes_least_is_chosen(said: list[str]) -> None:
    asked = []

    def seconds(tokens: int, count: int, way: Way) -> float:
        asked.append((tokens, count, way))
        # Layers of the cores, and the link beside them, on which the last layers come ahead.
        return max((8 - count) * tokens * 1.0, (count - 2 * (way == "last")) * 20.0) + 0.5 * count

    found = best_shares(seconds, 8, (1, 8, 32, 64))
    assert found == Shares(
        (
            Share(1, last=2),  # 8 s alone, 7 s with two
            Share(8, last=2),  # 64 s alone, 49 s
            Share(32, 5 / 8),  # 256 s alone, 102.5 s
            Share(64, 6 / 8),  # 512 s alone, 131 s
        )
    )
    assert "8: 2 (the last), 64000.0 to 49000.0 ms" in said[0]
    gains = [one.gain_s for one in found.measured]
    assert gains == pytest.approx([1 / 8, 15 / 8, 153.5 / 8, 381 / 8])
    assert [found.of(tokens).of_layers for tokens in (0, 7, 40, 128)] == [0, 0, 0.625, 0.75]
    assert [found.of(tokens).last for tokens in (0, 7, 40, 128)] == [0, 2, 0, 0]
    # Every fourth number until more takes longer, those two and one beside the best one, none below
    # what fewer tokens give away; then what was chosen is compared with the cores alone again.
    evenly = [one[:2] for one in asked if one[2] == "evenly"]
    assert [count for tokens, count in evenly if tokens == 32] == [0, 4, 8, 2, 6, 5, 7, *[0, 5] * 3]
    assert [count for tokens, count in evenly if tokens == 64] == [0, 5, 8, 6, 7, *[0, 6] * 3]
    # 8 tokens are between 1 and 32, which differ; a size between two that agree is not measured.
    assert 8 in {tokens for tokens, *_ in asked}
    asked.clear()
    found = best_shares(lambda *step: asked.append(step) or 1 - 0.2 * (step[1] == 2), 4, (1, 8, 32))
    assert found == Shares((Share(1, last=2), Share(8, last=2), Share(32, last=2)))
    assert {tokens for tokens, *_ in asked} == {1, 32}


def test_a_step_that_something_slowed_down_does_not_end_the_search_for_columns() -> None:
    slow = {8: 3.0}

    def seconds(tokens: int, count: int, way: Way) -> float:
        return 1.0 if way != "columns" else slow.pop(count, 1.0 - 0.04 * min(count, 28 - count))

    found = best_shares(seconds, 8, (8,), parts=16)
    assert found == Shares((Share(8, columns=14),))


def test_fewer_tokens_give_away_what_more_of_them_do_where_that_takes_less() -> None:
    def seconds(tokens: int, count: int, way: Way) -> float:
        if way != "columns":
            return 1.0 + tokens / 100
        # Something else used the link while one token was measured.
        return 1.0 + 0.1 * count if tokens == 1 and count > 1 else 0.8 - 0.02 * min(count, 12)

    found = best_shares(seconds, 8, (1, 32), parts=16)
    assert found == Shares((Share(1, columns=12), Share(32, columns=12)))
    assert found.measured[0].gain_s == found.measured[1].gain_s


def test_steps_that_other_programs_disturb_are_measured_again() -> None:
    pauses: list[float] = []
    answers = [math.inf, math.inf, 0.5, 0.25]
    measured = decode_shares.undisturbed(lambda *step: answers.pop(0), pauses.append)
    assert [measured(1, 0, "evenly"), measured(1, 2, "evenly")] == [0.5, 0.25]
    assert pauses == [decode_shares.PAUSE_S] * 2
    measured = decode_shares.undisturbed(lambda *step: math.inf, pauses.append)
    with pytest.raises(decode_shares.DisturbedError):
        measured(1, 0, "evenly")
    assert len(pauses) == 2 + decode_shares.TRIES


def test_a_step_is_believed_if_its_threads_had_their_cores() -> None:
    assert had_cores(0.020, 24 * 0.019, 24)
    assert not had_cores(0.130, 24 * 0.065, 24)
    assert had_cores(0.001, 0.0, 24)


def test_nothing_is_given_away_or_kept_where_cores_are_not_free(
    monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    kept: list[Shares] = []
    monkeypatch.setattr(decode_shares, "PAUSE_S", 0.0)
    monkeypatch.setattr(shared_decode, "had_cores", lambda *given: False)
    monkeypatch.setattr(shared_decode.KeptShares, "keep", lambda _, found: kept.append(found))
    steps = Steps(monkeypatch, layers=LAYERS, share=1.0)
    assert steps.shared is not None
    found = shared_decode.shares_of("auto", steps.known, steps.shared._kernel, steps.behind)
    assert (found, kept) == (Shares(()), [])
    (line,) = said
    assert "other programs compute on this rank's cores" in line


def test_one_layer_or_none_may_be_given_away() -> None:
    for layers in (1, 2, 3):
        found = best_shares(
            lambda tokens, count, way: 1 - 0.5 * (count == 1 and way == "evenly"), layers, (8,)
        )
        assert found == Shares((Share(8, 1 / layers),))
    assert best_shares(lambda tokens, count, way: 1.0 + count, 1, (1, 8)).is_empty
    assert best_shares(lambda tokens, count, way: 1.0, 8, ()) == Shares(())


def test_a_share_is_measured_once_a_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(shared_decode, "MEASURED_TOKENS", (1, 5))
    steps = Steps(monkeypatch, layers=LAYERS, share=1.0)
    kernel = steps.kernel
    chosen = Shares((Share(1), Share(5, 3 / LAYERS)))
    measured, run = [], []
    monkeypatch.setattr(
        shared_decode, "best_shares", lambda *given: measured.append(given) or chosen
    )
    divided = SharedDecode.divided

    def divided_and_noted(self: SharedDecode, count: int, *, is_late: bool = False) -> Any:
        run.append((count, is_late))
        return divided(self, count, is_late=is_late)

    monkeypatch.setattr(SharedDecode, "divided", divided_and_noted)

    def ask(place: str) -> Shares:
        return shared_decode.shares_of("auto", steps.known, kernel, steps.behind, place=place)

    assert [ask("here") for _ in range(2)] == [chosen] * 2
    assert len(measured) == 1
    (line,) = said
    assert "as an earlier start measured it" in line
    assert "1: 0 %; 5: 60 % (cpu.decode_gpu_share; RAY_HETERO_MEASURE_AGAIN=1" in line
    # What it gives away is run once, so that no request waits for a kernel that is to be built.
    assert run == [(3, False)]
    ask("elsewhere")
    assert len(measured) == 2
    monkeypatch.setattr(kernel, "step_tokens", 64)
    ask("here")
    assert len(measured) == 3
    for _ in range(2):
        ask("")
    assert len(measured) == 5
    # A number is what was asked for.
    assert shared_decode.shares_of(0.5, steps.known, kernel, steps.behind, place="here") == Shares(
        (Share(1, 0.5),)
    )


def test_columns_are_chosen_where_they_take_least(said: list[str]) -> None:
    asked = []

    def seconds(tokens: int, count: int, way: Way) -> float:
        asked.append((tokens, count, way))
        if way != "columns":
            return tokens + 0.1 * count
        return max(tokens * (1 - 0.5 * count / 16), 1.5 * count)

    found = best_shares(seconds, 8, (1, 8, 64), 16)
    assert [(one.columns, one.of_layers) for one in found.measured] == [(0, 0), (4, 0), (16, 0)]
    assert str(found) == (
        "1: 0 %; 8: 4 of 16 parts of every gate and up; 64: 16 of 16 parts of every gate and up"
    )
    assert "8: 4 of 16 parts, 8000.0 to 7000.0 ms" in said[0]
    # No fewer than for fewer tokens.
    asked.clear()
    best_shares(seconds, 8, (8, 64), 16)
    parts = {count for tokens, count, way in asked if (tokens, way) == (64, "columns")}
    assert min(parts) == 4


@pytest.mark.parametrize("slow_for", [1, 2])
def test_cores_that_take_longer_for_fewer_tokens_are_measured_again(slow_for: int) -> None:
    asked: list[int] = []

    def seconds(tokens: int, count: int, way: Way) -> float:
        if not asked or asked[-1] != tokens:
            asked.append(tokens)
        # As where the host takes cores away: whole layers of the GPU are quickest by far then.
        if tokens == 1 and asked.count(1) <= slow_for:
            return 5.0 if way != "evenly" or count == 0 else 2.0
        return 1.0 - 0.04 * count if way == "columns" else 1.0

    found = best_shares(seconds, 8, (1, 8), parts=8)
    # Measured again only once; then it is that of more tokens.
    assert asked == [1, 8, 1]
    assert found == Shares((Share(1, columns=8), Share(8, columns=8)))


def test_a_gain_that_noise_may_be_is_none() -> None:
    assert best_shares(lambda tokens, count, way: 1 - 0.01 * (count == 1), 4, (8,)).is_empty


def test_a_moment_in_which_others_compute_decides_nothing() -> None:
    slow = iter([8.0])  # the first step of the cores alone

    def seconds(tokens: int, count: int, way: Way) -> float:
        return next(slow, 1.0) if count == 0 else 1.2 + 0.1 * count

    assert best_shares(seconds, 4, (8,)).is_empty


def test_steps_of_no_more_tokens_than_the_native_module_takes() -> None:
    assert max(shared_decode.MEASURED_TOKENS) == prefill_memory.SHARED_TOKENS == native.STEP_TOKENS

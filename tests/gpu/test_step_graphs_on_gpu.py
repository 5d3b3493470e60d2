"""Decode steps whose part of a real GPU is one CUDA graph."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from cpu_rank import layout, replace_streams
from gpu_host import IS_PRETENDED, needs_gpus

sys.path.append(str(Path(__file__).parents[1] / "unit"))
pytest.register_assert_rewrite("copied_pieces", "group_steps", "paged_steps")

from copied_pieces import LAYERS, Decoding, KeptColumns, small_pieces  # noqa: E402
from group_steps import GroupDecoding, GroupSteps  # noqa: E402
from native_module import needs_native  # noqa: E402
from paged_steps import GPU_FAMILIES, Steps  # noqa: E402

from ray_hetero.errors import UnsupportedError  # noqa: E402
from ray_hetero.offload.decode import column_pieces  # noqa: E402
from ray_hetero.offload.decode.column_channel import LINE_BYTES, PHASES  # noqa: E402
from ray_hetero.runtime.stream_graph import captured  # noqa: E402
from ray_hetero.runtime.stream_words import words_of  # noqa: E402

pytestmark = [pytest.mark.gpu, needs_gpus(1), needs_native]
GPU = torch.device("cpu" if IS_PRETENDED else "cuda:0")
BEFORE = 1 + PHASES
"""Steps that are like one another before they are ordered in one call."""
MORE = 8


@pytest.fixture(autouse=True)
def _as_in_a_cpu_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_streams(monkeypatch)
    small_pieces(monkeypatch)


@pytest.mark.parametrize("most", [512, 4096])
@pytest.mark.parametrize("is_compact", [False, True])
@pytest.mark.parametrize("family", GPU_FAMILIES)
def test_steps_in_one_call_give_the_same(
    family: str, is_compact: bool, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = KeptColumns(
        monkeypatch, most, device=GPU, family=family, is_compact=is_compact, isa=layout()
    )
    kept.of_step(150)
    graphs = kept.columns.graphs
    for _ in range(BEFORE + MORE):
        kept.of_step(1)
    assert graphs.replayed == MORE
    # A prompt takes the place of what stays, unless that lies behind its rows, and drafts are steps
    # of another kind.
    kept.of_step(140)
    for tokens in (1, 1, 3, 1, 1):
        kept.of_step(tokens)
    assert graphs.replayed - MORE in (3, 4)


@pytest.mark.parametrize("parts", [12, 20])
def test_one_graph_is_of_several_numbers_of_tokens(
    parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps(
        monkeypatch, layers=LAYERS, columns=parts, most=512, device=GPU, is_compact=True,
        isa=layout(),
    )  # fmt: skip
    assert steps.shared is not None
    graphs = steps.columns.graphs
    decoding = Decoding(steps, *[75] * 20)
    for count in (5, 8, 20, 17):
        for at in range(BEFORE):
            decoding.step(count - at % 2)
    replayed = graphs.replayed
    for number, count in enumerate((5, 6, 7, 8, 17, 20, 18, 7), 1):
        decoding.step(count)
        assert graphs.replayed == replayed + number
    assert {kind.tokens for kind in graphs._graphs} == {8, 24}


@pytest.mark.skipif(IS_PRETENDED, reason="the CPU's stream is the thread that would wait")
def test_the_cores_compute_a_step_whose_pieces_are_on_their_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = KeptColumns(monkeypatch, 512, device=GPU, is_compact=True, isa=layout())
    kept.of_step(150)
    for _ in range(BEFORE + 1):
        kept.of_step(1)
    kept.of_step(300)
    columns, gpu = kept.columns, kept.columns._gpu
    replayed, steps = columns.graphs.replayed, columns.steps
    word = gpu.memory.host_memory(LINE_BYTES, dtype=torch.uint8).zero_()
    at = word.data_ptr()
    words_of(GPU, gpu.reader.copying, at).wait(at, 1)
    for _ in range(2):
        kept.of_step(1)
        assert (columns.graphs.replayed, columns.steps) == (replayed, steps)
    word[0] = 1
    gpu.reader.copying.synchronize()
    for number in range(1, MORE):
        kept.of_step(1)
        assert (columns.graphs.replayed, columns.steps) == (replayed + number, steps + number)


@pytest.mark.parametrize("count", [2, 3])
def test_ranks_of_a_group_get_the_same(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(column_pieces, "LEAST_COLUMNS", 160)
    steps = GroupSteps(
        monkeypatch, count, device=GPU, is_compact=True, isa=layout(), layers=3, has_bias=True,
        share=1.0, wide=160,
    )  # fmt: skip
    assert None not in steps.join()
    first, *_ = steps.give_columns(9)
    one, other, prompt = (steps.request(tokens) for tokens in (90, 92, 150))
    steps.check((one, 0, 52), (other, 0, 54))
    for at in range(BEFORE + MORE):
        steps.check((one, 52 + at, 53 + at), (other, 54 + at, 55 + at))
    assert first.graphs.replayed == MORE
    steps.check((prompt, 0, 150))
    for at in range(BEFORE + MORE, BEFORE + MORE + 4):
        steps.check((one, 52 + at, 53 + at), (other, 54 + at, 55 + at))
    assert first.graphs.replayed >= MORE + 3


@pytest.mark.skipif(IS_PRETENDED, reason="the CPU's stream is the thread that would wait")
@pytest.mark.parametrize("count", [2, 3])
def test_the_cores_of_a_group_compute_a_step_whose_pieces_are_on_their_way(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoding = GroupDecoding(monkeypatch, count, device=GPU, is_compact=True, isa=layout())
    decoding.step(150)
    for _ in range(BEFORE + 1):
        decoding.step()
    (own, *_), gpu = decoding.step(300), decoding.columns[0]._gpu
    word = gpu.memory.host_memory(LINE_BYTES, dtype=torch.uint8).zero_()
    at = word.data_ptr()
    words_of(GPU, gpu.reader.copying, at).wait(at, 1)
    for _ in range(2):
        assert decoding.step() == [own] * count
    word[0] = 1
    gpu.reader.copying.synchronize()
    for number in range(1, MORE):
        assert decoding.step() == [own + number] * count


@pytest.mark.skipif(IS_PRETENDED, reason="the CPU captures nothing")
def test_what_cuda_cannot_capture_is_said() -> None:
    from torch.cuda.streams import Stream

    stream: Any = Stream()
    x = torch.ones(8, device=GPU)
    with stream, pytest.raises(UnsupportedError, match=r"captur"):
        captured(lambda: print(float(x.sum())), GPU)
    with stream:
        y = torch.zeros(8, device=GPU)
        graph = captured(lambda: y.add_(1), GPU)
        assert float(y.sum()) == 0
        for _ in range(3):
            graph.replay()
    stream.synchronize()
    assert float(y.sum()) == 24

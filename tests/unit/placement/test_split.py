from __future__ import annotations

import time
from dataclasses import replace
from itertools import accumulate, combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import (
    LLAMA_8B,
    LLAMA_70B,
    LLAMA_405B,
    MIXTRAL_8X22B,
    config_of,
    device,
    llama,
    split_of,
    stage,
)

from placement.errors import DoesNotFitError, LayoutError
from placement.model.reading import shape_from_config
from placement.model.shape import ModelShape
from placement.plan.devices import DeviceFigures, RankDevice, StageDevices
from placement.plan.drafts import Drafter
from placement.plan.partition import StageCosts, fits, reach_of, shortest_sum, smallest_peak
from placement.plan.split import Split
from placement.units import GIB

SMALL = llama(12, 1024, 4096, (16, 4))
"""12 layers of 28.3 MB, embedding and output matrix of 262.7 MB each."""


def cuts(layers: int, stages: int) -> list[tuple[int, ...]]:
    ends = combinations(range(1, layers), stages - 1)
    return [tuple(b - a for a, b in pairwise((0, *inner, layers))) for inner in ends]


def totals(stages: list[StageCosts], cut: tuple[int, ...]) -> list[int] | None:
    """Cost of each stage; None where one does not fit."""
    found, first = [], 0
    for costs, count in zip(stages, cut, strict=True):
        if first + count > costs.reach[first]:
            return None
        found.append(costs.fixed + sum(costs.layers[first : first + count]))
        first += count
    return found


@st.composite
def costs_of_stages(draw: st.DrawFn) -> list[StageCosts]:
    layers = draw(st.integers(2, 9))
    needs = draw(st.lists(st.integers(1, 9), min_size=layers, max_size=layers))
    return [
        StageCosts(
            tuple(draw(st.lists(st.integers(0, 20), min_size=layers, max_size=layers))),
            draw(st.integers(0, 10)),
            reach_of(needs, draw(st.integers(0, 50))),
        )
        for _ in range(draw(st.integers(1, min(4, layers))))
    ]


@given(costs_of_stages(), st.frozensets(st.integers(1, 9), max_size=5))
def test_cuts_are_the_best_of_all(stages: list[StageCosts], barred: frozenset[int]) -> None:
    barred -= {len(stages[0].layers)}
    all_cuts = [
        cut
        for cut in cuts(len(stages[0].layers), len(stages))
        if barred.isdisjoint(accumulate(cut))
    ]
    priced = [found for cut in all_cuts if (found := totals(stages, cut)) is not None]
    by_sum, by_peak = shortest_sum(stages, barred), smallest_peak(stages, barred)
    assert fits(stages, barred) == bool(priced)
    if not priced:
        assert by_sum is None
        assert by_peak is None
        return
    assert by_sum is not None
    assert by_peak is not None
    sums, peaks = totals(stages, by_sum), totals(stages, by_peak)
    assert sums is not None
    assert peaks is not None
    assert (sum(sums), max(sums)) == min((sum(found), max(found)) for found in priced)
    assert (max(peaks), sum(peaks)) == min((max(found), sum(found)) for found in priced)


@st.composite
def ranks(draw: st.DrawFn) -> RankDevice:
    kind = draw(st.sampled_from(["cpu", "gpu"]))
    figures = DeviceFigures(
        name=kind,
        kind="gpu" if kind == "gpu" else "cpu",
        read_bandwidth=draw(st.sampled_from([1e11, 2e11, 1e12, 3e12])),
        compute=draw(st.sampled_from([1e12, 1e13, 1e14])),
        memory_bytes=0,
        host_link=25e9 if kind == "gpu" else None,
    )
    usable = int(draw(st.floats(0.3, 3)) * GIB)
    limit = draw(st.none() | st.integers(1, 200).map(lambda mib: mib * 2**20))
    return RankDevice("a", kind, figures, usable, 2**27, limit)


@st.composite
def questions(draw: st.DrawFn) -> dict[str, object]:
    size = draw(st.sampled_from([1, 2]))
    return {
        "stages": [
            stage(*(draw(ranks()) for _ in range(size))) for _ in range(draw(st.integers(1, 4)))
        ],
        "batch": draw(st.integers(1, 16)),
        "context": draw(st.integers(1, 4096)),
        "max_sequences": draw(st.integers(1, 16)),
        "max_batched_tokens": draw(st.sampled_from([256, 2048])),
        "objective": draw(st.sampled_from(["latency", "throughput"])),
    }


def answer(question: dict[str, object]) -> Split | None:
    try:
        return split_of(SMALL, **question)  # type: ignore[arg-type]
    except DoesNotFitError:
        return None


@settings(deadline=None)
@given(questions())
def test_splits_add_up_and_budgets_are_respected(question: dict[str, object]) -> None:
    split = answer(question)
    if split is None:
        return
    assert sum(split.layers) == 12
    assert min(split.layers) >= 1
    starts = [stage.first_layer for stage in split.stages]
    assert starts == [sum(split.layers[:i]) for i in range(len(starts))]
    assert sorted(split.order) == list(range(len(starts)))
    assert [rank.rank for rank in split.ranks] == list(range(len(split.ranks)))
    work = split.work
    assert split.kv_tokens >= max(work.batch, work.max_sequences) * work.context
    for rank in split.ranks:
        assert rank.kv_bytes >= rank.memory.kv
        assert rank.free_bytes >= 0
        assert rank.kv_bytes <= (rank.device.kv_limit_bytes or rank.kv_bytes)


@settings(deadline=None)
@given(questions(), st.integers(0, 3), st.integers(1, 4 * GIB))
def test_more_memory_never_makes_the_step_slower(
    question: dict[str, object], place: int, more: int
) -> None:
    before = answer(question)
    stages = list(question["stages"])  # type: ignore[call-overload]
    place %= len(stages)
    stages[place] = stage(
        *(replace(rank, usable_bytes=rank.usable_bytes + more) for rank in stages[place].ranks)
    )
    after = answer(question | {"stages": stages})
    if before is not None:
        assert after is not None
        assert after.value <= before.value


@settings(deadline=None, max_examples=25)
@given(questions())
def test_the_same_question_has_the_same_answer(question: dict[str, object]) -> None:
    assert answer(question) == answer(question)


def test_like_stages_share_evenly_and_keep_their_order() -> None:
    stages = [stage(device("Xeon 8480+", index)) for index in range(4)]
    split = split_of(SMALL, stages, batch=1, context=128, max_sequences=1)
    assert split.order == (0, 1, 2, 3)
    # The output matrix weighs 9.3 layers: the last stage gets one, the others share the rest.
    assert split.layers == (3, 4, 4, 1)


def test_throughput_balances_stages() -> None:
    stages = [stage(device("H100 SXM")), stage(device("Xeon 8480+"))]
    by = {
        objective: split_of(
            SMALL, stages, batch=1, context=128, max_sequences=1, objective=objective
        )
        for objective in ("latency", "throughput")
    }
    assert by["latency"].step_s <= by["throughput"].step_s
    assert by["throughput"].slowest_s <= by["latency"].slowest_s
    assert by["throughput"].tokens_per_s == 1 / by["throughput"].slowest_s


def test_126_layers_on_four_stages_take_less_than_a_second() -> None:
    stages = [
        stage(device("H100 SXM")),
        stage(device("A100 80GB")),
        stage(device("Xeon 8480+", gib=700)),
        stage(device("EPYC 9654", gib=700)),
    ]
    start = time.perf_counter()
    split = split_of(LLAMA_405B, stages, batch=4, context=8192, max_sequences=4)
    assert time.perf_counter() - start < 1
    assert sum(split.layers) == 126


def test_the_users_layers_win() -> None:
    stages = [stage(device("H100 SXM")), stage(device("Xeon 8480+"))]
    split = split_of(LLAMA_70B, stages, batch=1, context=4096, max_sequences=1, layers=[10, 70])
    assert (split.order, split.layers) == ((0, 1), (10, 70))


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([40, 41], "layers 40 \\+ 41 = 81, but the model has 80 layers"),
        ([80, 0], "layers 80 \\+ 0 = 80.*each stage needs at least one"),
        ([40, 20, 20], "has 3 numbers, the pipeline has 2 stages"),
    ],
)
def test_layers_that_do_not_add_up(layers: list[int], message: str) -> None:
    stages = [stage(device("H100 SXM")), stage(device("Xeon 8480+"))]
    with pytest.raises(LayoutError, match=message):
        split_of(LLAMA_70B, stages, batch=1, context=64, max_sequences=1, layers=layers)


def test_senseless_questions_are_refused() -> None:
    one = stage(device("H100 SXM"))
    with pytest.raises(LayoutError, match="batch must be 1 or more, got 0"):
        split_of(SMALL, [one], batch=0, context=1, max_sequences=1)
    with pytest.raises(LayoutError, match="13 pipeline stages for 12 layers"):
        split_of(SMALL, [one] * 13, batch=1, context=1, max_sequences=1)
    with pytest.raises(LayoutError, match=r"\[1, 0\] ranks"):
        split_of(SMALL, [one, stage()], batch=1, context=1, max_sequences=1)


def test_a_stage_is_priced_and_filled_by_its_own_size() -> None:
    alone, pair = stage(device("H100 SXM")), stage(device("Xeon 8480+"), device("Xeon 8480+", 1))
    question = {"batch": 1, "context": 64, "max_sequences": 1, "order": "fixed"}
    found = split_of(SMALL, [pair, alone], layers=[6, 6], **question)  # type: ignore[arg-type]
    first, second = found.stages
    assert [rank.rank for rank in found.ranks] == [0, 1, 2]
    # 6 layers of 28.3 MB each; the pair has the halves of them, and the embedding twice.
    weights = 6 * SMALL.layers[0].nbytes
    embedding = (SMALL.weight_bytes - 12 * SMALL.layers[0].nbytes) // 2
    for rank in first.ranks:
        assert rank.memory.weights == pytest.approx(weights / 2 + embedding, rel=1e-3)
    assert second.ranks[0].memory.weights == pytest.approx(weights + embedding, rel=1e-3)
    assert second.ranks[0].kv_bytes == pytest.approx(2 * first.ranks[0].kv_bytes, rel=1e-3)
    single = split_of(SMALL, [stage(device("Xeon 8480+")), alone], layers=[6, 6], **question)  # type: ignore[arg-type]
    assert first.decode.weights == pytest.approx(single.stages[0].decode.weights / 2, rel=1e-2)
    assert second.decode == single.stages[1].decode


XEONS = stage(device("Xeon 8480+"), device("Xeon 8480+", 1))
GPUS = stage(device("H100 SXM"), device("H100 SXM", 1))
MIXED = stage(device("Xeon 8480+"), device("H100 SXM"))
TIED = shape_from_config(
    config_of("llama", 12, 1024, 4096, (16, 4), 128256, tie_word_embeddings=True)
)  # fmt: skip


@pytest.mark.parametrize(
    ("stages", "shape", "drafter", "parts"),
    [
        ([XEONS, GPUS], SMALL, None, 2),
        ([XEONS, GPUS], TIED, None, 2),
        ([XEONS], SMALL, None, 2),
        ([XEONS], SMALL, Drafter(3), 2),
        # The last stage multiplies with it, or a drafter may take it for its own.
        ([XEONS], TIED, None, 1),
        ([XEONS], SMALL, Drafter(3, SMALL, has_own_vocabulary=False), 1),
        ([MIXED, GPUS], SMALL, None, 1),
        ([GPUS, XEONS], SMALL, None, 1),
    ],
)
def test_a_group_of_cpu_ranks_that_looks_up_only_has_the_embedding_whole(
    stages: list[StageDevices], shape: ModelShape, drafter: Drafter | None, parts: int
) -> None:
    """Each of two ranks has so many halves of it."""
    question = {"batch": 1, "context": 64, "max_sequences": 1, "order": "fixed"}
    layers = [12 // len(stages)] * len(stages)
    found = split_of(shape, stages, layers=layers, drafter=drafter, **question)  # type: ignore[arg-type]
    embedding = sum(tensor.nbytes for tensor in shape.embedding)
    beside = sum(tensor.nbytes for tensor in shape.layers[0].tensors) * layers[0]
    if len(stages) == 1:
        beside += sum(tensor.nbytes for tensor in shape.output_head)
    of_drafter = 0 if drafter is None else drafter.weights(2, is_first=True)
    for rank in found.stages[0].ranks:
        expected = of_drafter + (beside + parts * embedding) / 2
        assert rank.memory.weights == pytest.approx(expected, rel=1e-3)


def refusal(**question: object) -> str:
    with pytest.raises(DoesNotFitError) as caught:
        split_of(LLAMA_70B, **question)  # type: ignore[arg-type]
    return str(caught.value)


def test_the_nearest_that_fits_really_fits_and_the_next_does_not() -> None:
    stages = [stage(device("H100 SXM")), stage(device("Xeon 8480+"))]
    question = {"stages": stages, "batch": 1, "context": 4096, "max_sequences": 8}
    message = refusal(**question, max_model_len=131072)
    # 301.5 GiB are there; weights take 131.4, activations and runtime 3.
    assert "rank 1 (a GPU 0): weights" in message
    length = int(message.split("--max-model-len ")[1].split()[0])
    sequences = int(message.split("; or ")[1].split()[0])
    assert (length, sequences) == (67728, 4)
    fitting = split_of(LLAMA_70B, **question, max_model_len=length)  # type: ignore[arg-type]
    assert fitting.kv_tokens >= 8 * length
    refusal(**question, max_model_len=length + 1)
    fewer = question | {"max_sequences": sequences}
    assert split_of(LLAMA_70B, **fewer, max_model_len=131072)  # type: ignore[arg-type]
    refusal(**(question | {"max_sequences": sequences + 1}), max_model_len=131072)


def test_weights_that_fit_nowhere() -> None:
    message = refusal(stages=[stage(device("H100 SXM"))], batch=1, context=64, max_sequences=1)
    # 131.42 weights + 0.02 KV + 0.45 activations + 1 runtime = 132.9 GiB of 71.1 GiB.
    assert "= 132.9 GiB of 71.1 GiB: 61.8 GiB short" in message
    assert "No shorter context helps: 61.8 GiB are missing in all" in message


def test_a_longer_cpu_stage_is_named() -> None:
    stages = [stage(device("H100 SXM")), stage(device("Xeon 8480+"))]
    message = refusal(stages=stages, batch=1, context=4096, max_sequences=8, layers=[50, 30])
    assert message.startswith("layers [50, 30]: llama does not fit: ")
    assert 'Type "layers": [39, 41], which fit, or leave layers out.' in message


def test_a_kv_limit_that_is_too_small() -> None:
    socket = replace(device("Xeon 8480+"), kv_limit_bytes=GIB)
    message = refusal(stages=[stage(socket)], batch=1, context=4096, max_sequences=1)
    # 80 layers x 4096 tokens x 4096 bytes = 1.25 GiB.
    assert "KV over its limit of 1.0 GiB" in message
    assert "--max-model-len 3264 instead of 4096" in message


def test_tensor_parallel_reductions_take_the_link_of_the_group() -> None:
    def reduce_s(*parts: RankDevice) -> float:
        split = split_of(SMALL, [stage(*parts)], batch=1, context=128, max_sequences=1)
        return split.stages[0].decode.parts()["reduce"]

    gpu, cpu = device("H100 SXM"), device("Xeon 8480+")
    other_node = device("Xeon 8480+", node="b")
    assert reduce_s(gpu) == 0
    # 12 layers x 2 all-reduces of 1024 x 2 bytes, one half out and one half in.
    assert reduce_s(gpu, gpu) == pytest.approx(24 * (15e-6 + 2048 / 100e9), rel=1e-6)
    assert reduce_s(cpu, cpu) == pytest.approx(24 * (30e-6 + 2048 / 10e9), rel=1e-6)
    assert reduce_s(gpu, cpu) == pytest.approx(24 * (150e-6 + 2048 / 3e9), rel=1e-6)
    assert reduce_s(cpu, other_node) == pytest.approx(24 * (300e-6 + 2048 / 1.25e9), rel=1e-6)


def test_large_batches_are_bound_by_compute() -> None:
    split = split_of(SMALL, [stage(device("EPYC 9654"))], batch=512, context=16, max_sequences=512)
    # 0.4 x 14.7 = 5.88 TFLOP/s; 2 FLOP a weight and token.
    weights = 12 * (2 * 1024 * 1024 + 2 * 1024 * 256 + 3 * 1024 * 4096)
    attention = 12 * 16 * 4 * 1024
    # What one of the tokens computes is hidden behind reading.
    seconds = split.stages[0].decode.compute / 1e12
    assert seconds == pytest.approx(511 * (2 * weights + attention) / 5.88e12, rel=1e-6)


def test_only_active_experts_compute() -> None:
    # One layer's worth of a step at batch 4096 on a socket of 5.88 TFLOP/s: bound by compute.
    socket = stage(device("EPYC 9654", gib=1000))
    split = split_of(MIXTRAL_8X22B, [socket], batch=4096, context=1, max_sequences=4096)
    attention, router = 2 * 6144**2 + 2 * 6144 * 1024, 8 * 6144
    weights = 56 * (attention + router + 2 * 3 * 6144 * 16384)  # 2 of 8 experts
    pairs = 56 * 4 * 6144
    seconds = split.stages[0].decode.compute / 1e12
    assert seconds == pytest.approx(4095 * (2 * weights + pairs) / 5.88e12, rel=1e-6)


@pytest.mark.parametrize(
    ("model_type", "tied", "copies"),
    [
        # Embedding and output matrix of 100 x 64 x 2 bytes on the first, a middle, the last stage.
        ("llama", False, (1, 0, 1)),
        ("llama", True, (1, 0, 1)),
        ("qwen3_moe", False, (2, 2, 2)),  # vLLM holds both everywhere in this family
        ("gemma", True, (1, 1, 1)),
    ],
)
def test_stages_that_hold_the_vocabulary(
    model_type: str, tied: bool, copies: tuple[int, ...]
) -> None:
    config = config_of(model_type, 3, 64, 96, (4, 2), 100, head_dim=16, tie_word_embeddings=tied)
    shape = shape_from_config(config)
    sockets = [stage(device("Xeon 8480+", index)) for index in range(3)]
    split = split_of(shape, sockets, batch=1, context=16, max_sequences=1)
    norm = 64 * 2
    norms = (norm, norm, norm) if shape.vocabulary_everywhere else (0, 0, norm)
    around = [
        rank.memory.weights - layer.nbytes
        for rank, layer in zip(split.ranks, shape.layers, strict=True)
    ]
    assert around == [
        count * 100 * 64 * 2 + more for count, more in zip(copies, norms, strict=True)
    ]


def test_a_split_over_gpus_alone_is_offered_only_where_it_is_no_slower() -> None:
    stages = [stage(device("H100 SXM")), stage(device("Xeon 8480+"))]
    question = {"batch": 1, "context": 4096, "max_sequences": 1}
    assert split_of(LLAMA_8B, stages, **question).gpu_only is not None  # type: ignore[arg-type]
    # Overlapping stages get faster by the two layers that the socket takes off the GPU.
    split = split_of(LLAMA_8B, stages, **question, objective="throughput")  # type: ignore[arg-type]
    assert split.gpu_only is None


def test_of_equal_orders_the_given_one_is_taken() -> None:
    # More memory than needed makes two stages different, but not faster.
    stages = [stage(device("H100 SXM", gib=60)), stage(device("H100 SXM", 1, gib=50))]
    for row in (stages, stages[::-1]):
        split = split_of(SMALL, row, batch=1, context=64, max_sequences=1)
        assert split.order == (0, 1)


def test_activations_take_the_way_between_their_stages() -> None:
    def send_s(*parts: RankDevice) -> float:
        stages = [stage(part) for part in parts]
        split = split_of(SMALL, stages, batch=3, context=64, max_sequences=3, order="fixed")
        return split.stages[0].decode.parts()["send"]

    gpu, cpu = device("H100 SXM"), device("Xeon 8480+")
    # Hidden states and residual of 3 tokens x 1024 x 2 bytes; 0.8 x 64 GB/s to and from a GPU.
    payload = 2 * 3 * 1024 * 2
    assert send_s(gpu, gpu) == pytest.approx(15e-6 + payload / 100e9, rel=1e-6)
    assert send_s(cpu, cpu) == pytest.approx(70e-6 + payload / 10e9, rel=1e-6)
    assert send_s(cpu, gpu) == pytest.approx(70e-6 + payload / 10e9 + payload / 51.2e9, rel=1e-6)
    # With a socket anywhere in the engine, GPUs exchange through host memory too.
    both_ways = 70e-6 + payload / 10e9 + 2 * payload / 51.2e9
    assert send_s(gpu, gpu, cpu) == pytest.approx(both_ways, rel=1e-6)
    far = replace(cpu, node="b")
    assert send_s(cpu, far) == pytest.approx(300e-6 + payload / 1.25e9, rel=1e-6)

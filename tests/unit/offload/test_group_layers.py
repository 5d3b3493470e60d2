"""One GPU computes whole layers for the ranks of a group, each of which has a part of them.

The GPU is the CPU here, the ranks are threads.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from decoder_parts import HIDDEN  # noqa: E402
from group_steps import GroupSteps  # noqa: E402
from native_module import native, needs_native  # noqa: E402
from slow_links import PRODUCT_S, slow_cores, slow_link  # noqa: E402
from stored_codes import made  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402
from vllm.v1.attention.backends import cpu_attn  # noqa: E402

from ray_hetero.errors import UnsupportedError  # noqa: E402
from ray_hetero.kernels.formats import (  # noqa: E402
    SCALED_FORMATS,
    CompactWeight,
    PackedWeight,
    ScaledWeight,
)
from ray_hetero.kernels.formats.base import pack  # noqa: E402
from ray_hetero.kernels.layers import layer_tokens  # noqa: E402
from ray_hetero.kernels.layers.decoder_layers import DecoderLayers  # noqa: E402
from ray_hetero.kernels.layers.layer_parts import Linear  # noqa: E402
from ray_hetero.kernels.layers.layer_tokens import LayerTokens  # noqa: E402
from ray_hetero.offload.decode import (  # noqa: E402
    column_pieces,
    mlp_columns,
    shared_decode,
)
from ray_hetero.offload.decode.share_choice import Share, Shares  # noqa: E402
from ray_hetero.offload.group.group_layers import linears_of  # noqa: E402
from ray_hetero.offload.prefill import (  # noqa: E402
    gpu_layers,
    layer_ops,
    threshold,
)
from ray_hetero.offload.weights.shared_weights import SharedWeights, linked  # noqa: E402
from ray_hetero.offload.weights.weight_pieces import WeightSlice, WholeWeight, cut  # noqa: E402
from ray_hetero.planning import prefill_memory  # noqa: E402

current_platform.import_kernels()
pytestmark = [needs_native, pytest.mark.timeout(300)]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_memory, "PIECE_BYTES", 128 << 10)
    # Two blocks of 32 tokens and two heads of keys.
    monkeypatch.setattr(prefill_memory, "KV_SPAN_BYTES", 2 * 32 * 2 * 2 * 64 * 2)
    monkeypatch.setattr(layer_ops, "CHUNK_TOKENS", 24)


@pytest.mark.parametrize(
    ("family", "given"),
    [
        ("llama", {}),
        ("llama", {"has_bias": True, "is_compact": True}),
        ("qwen3", {"is_compact": True}),
        ("gemma3", {}),
        # Fewer heads of keys than ranks.
        ("llama", {"kv_heads": 1, "has_bias": True}),
    ],
)
def test_prompts_alone_together_and_in_chunks(
    family: str, given: Any, monkeypatch: pytest.MonkeyPatch, on_gpu: list[int]
) -> None:
    steps = GroupSteps(monkeypatch, family=family, **given)
    steps.join()
    one, other, third = (steps.request(tokens) for tokens in (170, 33, 40))
    steps.check((one, 0, 70))
    steps.check((other, 0, 33), (third, 0, 9))
    steps.check((third, 9, 40), (one, 70, 170))
    assert on_gpu == [70, 42, 131]


@pytest.mark.parametrize(("count", "isa"), [(3, "vec"), (2, "amx")])
def test_requests_decode_beside_prompts(
    count: int, isa: str, monkeypatch: pytest.MonkeyPatch, on_gpu: list[int]
) -> None:
    monkeypatch.setattr(prefill_memory, "KV_SPAN_BYTES", 2 * 32 * count * 2 * 64 * 2)
    steps = GroupSteps(monkeypatch, count, isa=isa)
    steps.join()
    one, other, prompt = (steps.request(tokens) for tokens in (60, 92, 150))
    steps.check((one, 0, 57), (other, 0, 88))
    # Each rank decodes with keys and values that the first one has written.
    steps.check((one, 57, 58), (other, 88, 89))
    steps.check((one, 58, 59), (prompt, 0, 70), (other, 89, 90))
    layer_tokens.take()
    steps.check((prompt, 70, 150), (one, 59, 60), (other, 90, 92))
    assert on_gpu == [145, 70, 80]
    layers = count * len(steps.caches)
    assert layer_tokens.take() == LayerTokens(native=3 * layers, on_gpu=80 * layers)


def test_a_prefix_that_another_request_has_computed(
    monkeypatch: pytest.MonkeyPatch, on_gpu: list[int]
) -> None:
    steps = GroupSteps(monkeypatch)
    steps.join()
    first = steps.request(100)
    steps.check((first, 0, 100))
    second = steps.request(120, after=first, shared=3)
    steps.check((second, 96, 120))
    # One that is computed in the same step, beside a request that decodes.
    third, fourth = steps.request(70), steps.request(90)
    fifth = steps.request(100, after=fourth, shared=2)
    steps.check((third, 0, 69))
    steps.check((fourth, 0, 90), (third, 69, 70), (fifth, 64, 100))
    assert on_gpu == [100, 24, 69, 126]


def test_a_residual_is_added_first_and_a_dummy_run_leaves_no_keys(
    monkeypatch: pytest.MonkeyPatch, on_gpu: list[int]
) -> None:
    steps = GroupSteps(monkeypatch)
    steps.join()
    request = steps.request(40)
    residual = torch.randn(40, HIDDEN).bfloat16()
    for y, total in steps.step((request, 0, 40), is_dummy=True):
        assert bool((y + total).isfinite().all())
    assert all(bool(cache.isnan().all()) for rank in steps.ranks for cache in rank.caches)
    found = steps.step((request, 0, 40), residual=residual)
    request.inputs = request.inputs + residual
    for y, total in found:
        torch.testing.assert_close(
            y.float() + total.float(), steps.expected(request), rtol=2**-5, atol=2**-3
        )
    assert on_gpu == [40, 40]


def test_a_gpu_that_runs_out_of_memory_ends_it_on_all_ranks(
    monkeypatch: pytest.MonkeyPatch, on_gpu: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    steps = GroupSteps(monkeypatch)
    steps.join()

    def fail(*args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(gpu_layers, "attend", fail)
    monkeypatch.setattr(DecoderLayers, "one_by_one", lambda self, *given: given[1:])
    request = steps.request(80)
    for _ in range(2):
        for hidden, residual in steps.step((request, 0, 40)):
            assert len(hidden) == 40
            assert residual is None
    assert on_gpu == [40]
    assert caplog.text.count("from now on the cores of its group's ranks compute them") == 2


def test_a_failure_of_the_first_rank_is_the_others_too(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = GroupSteps(monkeypatch)
    steps.join()

    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(gpu_layers, "attend", fail)
    first, other = steps.step((steps.request(40), 0, 40))
    assert str(first).startswith("CUDA error: an illegal")
    assert str(other) == (
        "rank 4, of the same tensor-parallel group, has failed: CUDA error: an illegal memory "
        "access was encountered"
    )


@pytest.mark.parametrize("lost", [0, 1])
def test_a_rank_that_has_ended_is_named(lost: int, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = GroupSteps(monkeypatch)
    steps.join()
    steps.check((steps.request(40), 0, 40))
    steps.end(lost)
    found = steps.step((steps.request(40), 0, 40))
    assert str(found[1 - lost]) == f"rank {4 + lost}, of the same tensor-parallel group, has ended"


@pytest.mark.parametrize("missing", [0, 1])
def test_a_rank_that_does_not_come_is_named_within_the_limit(
    missing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = GroupSteps(monkeypatch, limit_s=1.5)
    steps.join()
    request = steps.request(40)
    steps.check((request, 0, 40))
    steps.ranks[missing].made = lambda *given: None
    found = steps.step((request, 0, 40))
    assert str(found[1 - missing]) == (
        f"rank {4 + missing}, of the same tensor-parallel group, was not there in 1.5 s "
        "(exchange.timeout_s)"
    )


def test_ranks_that_come_to_different_steps_find_out(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = GroupSteps(monkeypatch, limit_s=5)
    steps.join()
    group = steps.ranks[1].made._on_gpu._group
    begin = group.begin
    monkeypatch.setattr(group, "begin", lambda step: begin((step[0] - 1, *step[1:])))
    found = steps.step((steps.request(40), 0, 40))
    assert str(found[0]) == "rank 5, of the same tensor-parallel group, computes another step"


def test_caches_that_cannot_be_mapped_leave_prompts_to_the_cores_of_all(
    monkeypatch: pytest.MonkeyPatch, on_gpu: list[int]
) -> None:
    steps = GroupSteps(monkeypatch, is_shared=False)
    steps.join()
    monkeypatch.setattr(DecoderLayers, "one_by_one", lambda self, *given: given[1:])
    for _ in range(2):
        found = steps.step((steps.request(40), 0, 40))
        assert not [one for one in found if isinstance(one, Exception)]
    assert on_gpu == []


def test_ranks_that_do_not_suit_do_not_join(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = GroupSteps(monkeypatch)
    steps.ranks[1].offer = None
    assert steps.join() == [None, None]


def test_a_gpu_without_memory_is_no_ranks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    steps = GroupSteps(monkeypatch)

    def no_memory(*args: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore")

    monkeypatch.setattr(gpu_layers, "KvReturns", no_memory)
    assert steps.join() == [None, None]
    assert caplog.text.count("no GPU computes whole layers of prompts for all of the ranks") == 1
    assert "allocate 2.00 GiB. Prompts" in caplog.text


@pytest.mark.parametrize("kind", [PackedWeight, CompactWeight, *SCALED_FORMATS.values()])
def test_weights_of_another_process_are_read_in_pieces(kind: Any) -> None:
    torch.manual_seed(0)
    matrices = [torch.randn(192, 64).bfloat16() for _ in range(2)]
    # In a compact weight, outliers and a block that stays packed.
    matrices[1][70, 3] = matrices[1][5, 60] = 2.0**100
    matrices[1][128:160] *= 2.0 ** torch.randint(-90, 90, (32, 64))
    shared, bias = SharedWeights(), torch.randn(192)
    weights = []
    for number, matrix in enumerate(matrices):
        if issubclass(kind, ScaledWeight):
            codes = made(kind, 192, 64, 32, has_zeros=number > 0 and kind.has_zeros)
            matrix.copy_(kind.expanded(codes))
            weights.append(kind.stored(codes, native))
        else:
            weights.append(kind.made(pack(matrix), native))
    if kind is CompactWeight:
        assert weights[1].encoding.packed_blocks == [4]
    linears = [Linear(shared.moved(weight), bias) for weight in weights]
    assert shared.holds(linears)
    found = linked(shared.described(linears), shared.pages)
    for one, own, matrix in zip(found, weights, matrices, strict=True):
        assert torch.equal(one.bias, bias)
        assert one.weight.data.data_ptr() % 4096 == 0
        assert one.weight.gpu_bytes >= own.gpu_bytes
        whole = WholeWeight.by_columns([one.weight], [128, 32, 32])
        rebuilt = torch.zeros_like(matrix)
        for placed, values in _expanded(whole):
            rebuilt[placed.outputs] = values
        assert torch.equal(rebuilt, matrix)


def _expanded(whole: WholeWeight) -> Iterator[tuple[WeightSlice, torch.Tensor]]:
    """What pieces give of a weight with 64 inputs."""
    for placed in cut(whole, CPU):
        piece = placed.piece
        into = torch.empty(piece.values, dtype=torch.bfloat16)
        piece.expansion(piece.stored, into)
        yield placed, into.view(-1, 64)[placed.rows]


@pytest.mark.parametrize(
    ("sizes", "room", "expected"),
    [
        # All runs fit; some do; each is larger than a piece; runs of one size.
        ([128, 32, 32], 192, [[(0, 128), (128, 160), (160, 192)]]),
        ([128, 32, 32], 160, [[(0, 128)], [(0, 32)], [(0, 32)]]),
        ([96, 96], 64, [[(0, 64)], [(0, 32)], [(0, 64)], [(0, 32)]]),
        ([192], 192, [[(0, 192)]]),
    ],
)  # fmt: skip
def test_runs_of_a_rank_that_fit_come_in_one_piece(
    sizes: list[int], room: int, expected: list[list[tuple[int, int]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(prefill_memory, "PIECE_BYTES", room * 64 * 2)
    matrices = [torch.randn(192, 64).bfloat16() for _ in range(2)]
    ranks = [PackedWeight.made(pack(matrix), native) for matrix in matrices]
    whole = WholeWeight.by_columns(ranks, sizes)
    rebuilt = torch.zeros(384, 64).bfloat16()
    found: dict[Any, list[tuple[int, int]]] = {}
    for placed, values in _expanded(whole):
        rebuilt[placed.outputs] = values
        found.setdefault(placed.piece, []).append((placed.rows.start, placed.rows.stop))
    assert list(found.values()) == 2 * expected
    kinds = [matrix.split(sizes) for matrix in matrices]
    assert torch.equal(
        rebuilt, torch.cat([one[kind] for kind in range(len(sizes)) for one in kinds])
    )
    # Where steps take columns of each run, they have pieces of their own.
    alone = [placed.rows for placed in cut(whole, CPU, 192)]
    assert [rows.stop for rows in alone] == 2 * sizes
    assert not any(rows.start for rows in alone)


def test_places_of_parts_in_the_whole() -> None:
    ranks = [PackedWeight.made(torch.zeros(96, 64).bfloat16(), native) for _ in range(2)]
    columns = WholeWeight.by_columns(ranks, [32, 64])
    assert columns.shape == (192, 64)
    assert [part.outputs for part in columns.parts] == [
        ((0, 32, 0), (32, 96, 64)), ((0, 32, 32), (32, 96, 128)),
    ]  # fmt: skip
    rows = WholeWeight.by_rows(ranks)
    assert rows.shape == (96, 128)
    assert [(part.inputs, part.is_added) for part in rows.parts] == [(0, False), (64, True)]


@pytest.mark.parametrize(
    ("cores", "link", "expected", "most"),
    [
        ((0.01, 0.03), 0.015, "gpu", 512),
        ((0.01, 0.03), 0.025, "cores", 512),
        ((0.01, 0.03), 0.04, "cores", 512),
        (None, None, "either", 512),
        (None, None, "cores", 124),
    ],
    ids=[
        "the slowest rank decides",
        "keys and values decide",
        "the cores are faster",
        "as measured here",
        "small steps",
    ],
)
def test_ranks_agree_on_the_largest_step_of_their_cores(
    cores: tuple[float, float] | None, link: float | None, expected: str, most: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    steps = GroupSteps(monkeypatch, most=most)
    steps.least = native.STEP_TOKENS - 8
    kernels = [rank.kernel for rank in steps.ranks]
    for rank in steps.ranks:
        rank.offer = replace(rank.offer, kernel=rank.kernel, from_tokens=steps.least)
    if cores is not None:
        of_kernels = dict(zip(map(id, kernels), cores, strict=True))
        monkeypatch.setattr(threshold, "on_cores", lambda kernel, layers: of_kernels[id(kernel)])
        monkeypatch.setattr(threshold, "over_link", lambda kernel, gpu, layers: link)
    steps.join()
    limits = {kernel.limits.native_tokens for kernel in kernels}
    by_gpu, by_cores = {steps.least - 1}, {native.STEP_TOKENS}
    assert limits in {"gpu": [by_gpu], "cores": [by_cores], "either": [by_gpu, by_cores]}[expected]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_prompts_of_a_group_stay_on_the_cores_up_to_one_number(
    share: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    on_gpu: list[int],
) -> None:  # fmt: skip
    steps = GroupSteps(monkeypatch, least=96, most=1024, share=share)
    for rank in steps.ranks:
        rank.offer = replace(rank.offer, kernel=rank.kernel, is_auto=True)
        for cache in rank.caches:
            cache.zero_()  # vLLM's attention multiplies what was never written by nought
    some = [one for rank in steps.ranks for layer in rank.known for one in linears_of(layer)]
    slowest_s = 1.5 * PRODUCT_S * len(some) / 2
    with monkeypatch.context() as patch:
        # What the slowest rank's cores take counts.
        for rank, factor in zip(steps.ranks, (1.0, 1.5), strict=True):
            slow_cores(patch, rank.kernel, factor * PRODUCT_S)
        slow_link(patch, some, 2.5 * slowest_s)
        found = steps.join()
    (least,) = {group.from_tokens for groups in found for group in groups}
    assert 320 - threshold.MULTIPLE < least < 1024
    assert {rank.kernel.limits.native_tokens for rank in steps.ranks} == {native.STEP_TOKENS}
    assert caplog.text.count(f"prompts of fewer than {least} tokens stay on the cores") == 1
    assert caplog.text.count("the GPU's link is slow") == 1
    # Ranks are processes; of one, all threads would have the same memory for attentions.
    lock, attend = threading.Lock(), cpu_attn.CPUAttentionBackendImpl.forward

    def attend_alone(*given: Any) -> Any:
        torch.set_num_threads(1)  # of this thread, as for the one that has planned the attention
        with lock:
            return attend(*given)

    monkeypatch.setattr(cpu_attn.CPUAttentionBackendImpl, "forward", attend_alone)
    one, other = steps.request(least - 1), steps.request(least)
    layer_tokens.take()
    steps.check((one, 0, least - 1))
    assert on_gpu == []
    layers = 2 * len(steps.caches)
    assert layer_tokens.take() == LayerTokens(by_operators=(least - 1) * layers)
    steps.check((other, 0, least))
    assert on_gpu == [least]
    assert layer_tokens.take() == LayerTokens(on_gpu=least * layers)


def asked(columns: Sequence[Any]) -> list[int]:
    """Layers whose columns each rank has asked for."""
    return [one.steps * one._layers for one in columns]


@pytest.mark.parametrize(("count", "parts", "isa", "given"), [
    (2, 1, "vec", {}),
    (2, 9, "amx", {"has_bias": True, "is_compact": True}),
    (3, 16, "vec", {"family": "qwen3"}),
    (2, 5, "vec", {"family": "gemma"}),
])  # fmt: skip
def test_columns_of_all_ranks_are_computed_by_the_gpu(
    count: int, parts: int, isa: str, given: Any, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(column_pieces, "LEAST_COLUMNS", 160)
    steps = GroupSteps(monkeypatch, count, isa=isa, layers=5, share=0.75, wide=160, **given)
    steps.join()
    columns = steps.give_columns(parts)
    one, other, prompt = (steps.request(tokens) for tokens in (60, 92, 290))
    steps.check((one, 0, 55), (other, 0, 88))
    steps.check((one, 55, 56), (other, 88, 89))
    steps.check((one, 56, 58))
    assert asked(columns) == [10] * count
    # A prompt takes the place of expanded columns.
    steps.check((prompt, 0, 200))
    steps.check((prompt, 200, 201), (one, 58, 59), (other, 89, 90))
    assert asked(columns) == [15] * count


def test_columns_that_a_gpu_has_no_memory_for_are_computed_by_all_ranks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(column_pieces, "LEAST_COLUMNS", 64)
    steps = GroupSteps(monkeypatch, layers=5, share=1.0)
    steps.join()
    columns = steps.give_columns(8)
    expanded, times = mlp_columns.expanded_whole, iter(range(8))

    def until_none_is_left(*given: Any) -> Any:
        if next(times, None) is None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return expanded(*given)

    monkeypatch.setattr(mlp_columns, "expanded_whole", until_none_is_left)
    request = steps.request(6)
    steps.check((request, 0, 3))
    assert asked(columns) == [5, 5]
    # In the fourth layer of this step.
    steps.check((request, 3, 4))
    assert asked(columns) == [10, 10]
    assert caplog.text.count("from now on the cores compute all") == 2
    assert "on the first rank of this group" in caplog.text
    assert all(rank.made.shared is None for rank in steps.ranks)
    steps.check((request, 4, 6))


def test_columns_stay_on_the_cores_of_all_ranks_where_the_driver_refuses(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(column_pieces, "LEAST_COLUMNS", 64)
    mlp_columns._say_once.cache_clear()

    def refuse(*given: Any) -> Any:
        raise UnsupportedError("CUDA's driver refuses a stream memory operation (CUresult 801)")

    monkeypatch.setattr(mlp_columns, "words_of", refuse)
    steps = GroupSteps(monkeypatch, layers=3, share=1.0)
    found = steps.join()
    assert [group[0].columns_of(3) for group in found] == [None, None]
    assert caplog.text.count("the cores compute decode steps alone") == 1
    request = steps.request(4)
    steps.check((request, 0, 3))
    steps.check((request, 3, 4))


@pytest.mark.usefixtures("own_cores")
def test_ranks_measure_columns_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(column_pieces, "LEAST_COLUMNS", 160)
    monkeypatch.setattr(shared_decode, "MEASURED_TOKENS", (1, 6))
    measured = shared_decode.best_shares

    def best(seconds: Any, layers: int, asked: Any, parts: int) -> Any:
        def said(tokens: int, count: int) -> float:
            seconds(tokens, count)
            return 1.0 + (count != 12)

        return measured(said, layers, asked, parts)

    monkeypatch.setattr(shared_decode, "best_shares", best)
    steps = GroupSteps(monkeypatch, layers=3, share="auto", wide=160)
    found = steps.join()
    assert {group[0].shares for group in found} == {
        Shares((Share(1, columns=12), Share(6, columns=12)))
    }
    assert {rank.kernel.limits.native_tokens for rank in steps.ranks} == {native.STEP_TOKENS}
    request = steps.request(6)
    steps.check((request, 0, 4))
    steps.check((request, 4, 5))


def test_a_group_measures_once_a_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(shared_decode, "MEASURED_TOKENS", (1, 6))
    chosen, measured = Shares((Share(1), Share(6, 5))), []
    monkeypatch.setattr(
        shared_decode, "best_shares", lambda *given: measured.append(given) or chosen
    )
    for places in (("CPUs 0", "CPUs 1"), ("CPUs 0", "CPUs 1"), ("CPUs 0", "CPUs 2")):
        steps = GroupSteps(monkeypatch, layers=3, share="auto")
        for rank, place in zip(steps.ranks, places, strict=True):
            rank.offer = replace(rank.offer, place=place)
        found = steps.join()
        assert [group[0].shares for group in found] == [chosen, chosen]
    # Both ranks, before anything was kept and with other cores.
    assert len(measured) == 2 + 2


def test_without_memory_of_the_gpu_all_ranks_decode_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    steps = GroupSteps(monkeypatch, layers=3, share=1.0)
    steps.join()

    def fail(*args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(layer_ops, "activated", fail)
    request = steps.request(4)
    steps.check((request, 0, 3))
    steps.check((request, 3, 4))
    assert caplog.text.count("from now on the cores compute all") == 2
    assert all(rank.made.shared is None for rank in steps.ranks)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_rank_that_ends_in_a_shared_step_is_named(
    lost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = GroupSteps(monkeypatch, layers=3, share=1.0)
    steps.join()
    layers = steps.ranks[lost].made.shared._layers

    def ends(*given: Any, **more: Any) -> Any:
        steps.end(lost)
        raise RuntimeError("killed")

    monkeypatch.setattr(layers, "run", ends)
    found = steps.step((steps.request(4), 0, 4))
    assert str(found[lost]) == "killed"
    assert str(found[1 - lost]) == f"rank {4 + lost}, of the same tensor-parallel group, has ended"

"""Experts that a GPU reads over its link are computed as the cores compute them.

Without a GPU here: the CPU takes its place, with the same pieces, copies and expansions; only
vLLM's kernel has one of torch's operators in its place.
"""

from __future__ import annotations

import logging
import multiprocessing
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from linked_layers import (  # noqa: E402
    ACTIVATIONS,
    CHOSEN,
    EXPERTS,
    HIDDEN,
    Layer,
    assert_close,
    routed,
)
from native_module import native  # noqa: E402

from placement.units import GIB  # noqa: E402
from ray_hetero.config import ExpertsConfig  # noqa: E402
from ray_hetero.distributed import expert_offers, expert_prompts  # noqa: E402
from ray_hetero.distributed.expert_memory import RemoteLayer  # noqa: E402
from ray_hetero.distributed.expert_offers import Offer  # noqa: E402
from ray_hetero.errors import AgreementError, StartupError, UnsupportedError  # noqa: E402
from ray_hetero.kernels.experts.expert_rates import CoreRates  # noqa: E402
from ray_hetero.kernels.experts.quantised_experts import KINDS  # noqa: E402
from ray_hetero.kernels.formats import FORMATS  # noqa: E402
from ray_hetero.offload.experts import gpu_experts  # noqa: E402
from ray_hetero.offload.experts.expert_expansion import sizes_of  # noqa: E402
from ray_hetero.offload.experts.expert_pieces import Part, runs_of  # noqa: E402
from ray_hetero.offload.experts.expert_shares import ExpertShares  # noqa: E402
from ray_hetero.offload.experts.gpu_experts import GpuExperts  # noqa: E402
from ray_hetero.offload.experts.linked_experts import LinkedSlice, shared  # noqa: E402
from ray_hetero.planning.prefill_memory import ExpertSizes  # noqa: E402

if native is None:
    pytest.skip("needs the native module", allow_module_level=True)

CPU = torch.device("cpu")


def computed(gpu: GpuExperts, given: Any, layer: int = 0) -> torch.Tensor:
    gpu.begin(given[2], layer)
    return gpu.sums(*given, layer)


def made(layers: Sequence[Sequence[LinkedSlice] | None], pieces: int) -> GpuExperts:
    """With room for pieces of so many experts."""
    sizes = sizes_of([one for one in layers if one is not None])
    found = GpuExperts(CPU, layers, CHOSEN, (sizes.beside + pieces * sizes.each) / GIB)
    assert found.experts <= pieces
    return found


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("kind", [*FORMATS, *KINDS])
def test_sums_are_those_of_the_cores_and_of_a_reference(
    kind: str, ranks: int, activation: str
) -> None:
    torch.manual_seed(0)
    layer = Layer(kind, ranks, activation)
    gpu = made([layer.slices], 3)
    given = routed(70)
    # A row that only fills a step up.
    given[2][5] = -1
    found = computed(gpu, given)
    assert_close(found, layer.expected(*given))
    assert_close(found, sum(rank(*given).float() for rank in layer.ranks))
    assert not found[5].any()
    assert torch.equal(found, computed(gpu, given))


def split(gpu: GpuExperts, layer: Layer, given: Any, experts: int, number: int = 0) -> torch.Tensor:
    """A layer whose first experts the GPU computes, and the cores the others."""
    x, weights, ids = given
    order = []

    def others() -> torch.Tensor:
        order.append(len(order))
        left = ids.masked_fill(ids < experts, -1)
        sums: torch.Tensor = sum(rank(x, weights, left) for rank in layer.ranks)
        return sums

    gpu.begin(ids, number, experts)
    found = gpu.sums(x, weights, ids, number, experts, others)
    assert order == [0]
    return found


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", [*FORMATS, *KINDS])
def test_sums_of_a_split_layer_are_those_of_the_whole(kind: str, ranks: int) -> None:
    torch.manual_seed(8)
    activation = "swigluoai" if kind in ("packed", "mxfp4") else "silu"
    layer = Layer(kind, ranks, activation, inner=64 * ranks)
    given = routed(70)
    given[2][5] = -1
    for pieces in (2, 7):
        gpu = made([layer.slices], pieces)
        whole = computed(gpu, given)
        for experts in (1, 3, 6):
            found = split(gpu, layer, given, experts)
            assert_close(found, layer.expected(*given))
            assert_close(found, whole.float())
            assert not found[5].any()
            assert torch.equal(found, split(gpu, layer, given, experts))


@pytest.mark.parametrize("size", [2, 3, EXPERTS])
def test_parts_of_several_gpus_add_up_to_the_whole(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(9)
    layer = Layer("compact", 2, inner=128)
    x, weights, ids = routed(70)
    ids[5] = -1
    parts = [Part(rank, size) for rank in range(size)]
    gpus = [GpuExperts(CPU, [layer.slices], CHOSEN, "auto", part) for part in parts]
    read = [pieces_read(gpu, monkeypatch) for gpu in gpus]
    assert sum(gpu.nbytes for gpu in gpus) == sum(one.nbytes for one in layer.slices)
    for experts in (EXPERTS, 5, 1):
        for pieces in read:
            pieces.clear()
        here = parts[0].of_all(experts, EXPERTS)
        is_here = torch.zeros(EXPERTS, dtype=torch.bool)
        is_here[here] = True
        left = ids.masked_fill(is_here[ids.clamp(min=0)], -1)
        total = sum(rank(x, weights, left).float() for rank in layer.ranks)
        for gpu in gpus:
            gpu.begin(ids, 0, experts)
            total += gpu.sums(x, weights, ids, 0, experts).float()
        assert_close(total.bfloat16(), layer.expected(x, weights, ids))
        # Every expert is read once, by the GPU whose it is.
        assert [one for pieces in read for some in pieces for one in some] == here
        assert len(here) == experts
        for part, pieces in zip(parts, read, strict=True):
            assert {one for some in pieces for one in some} <= set(part.block(EXPERTS))


def test_more_gpus_than_experts_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="7 experts, fewer than the 8 GPUs of the stage"):
        GpuExperts(CPU, [Layer("packed", 1).slices], CHOSEN, "auto", Part(0, EXPERTS + 1))


def pieces_read(gpu: GpuExperts, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The experts of each piece that is read from now on."""
    read: list[tuple[int, ...]] = []
    fetch = gpu._reader.fetch
    monkeypatch.setattr(
        gpu._reader,
        "fetch",
        lambda piece: (
            read.append(tuple(n for run in piece.runs for n in range(*run))), fetch(piece)
        ),
    )  # fmt: skip
    return read


def test_only_the_experts_of_a_share_are_read_and_each_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(9)
    layers = [Layer("packed", 1), Layer("compact", 1), Layer("packed", 1)]
    gpu = made([layer.slices for layer in layers], 3)
    read = pieces_read(gpu, monkeypatch)
    given = routed(90)
    for experts, groups in [
        (4, [(0, 1), (2, 3)]),
        (2, [(0, 1)]),
        (7, [(0, 1, 2), (3, 4, 5), (6,)]),
    ]:
        read.clear()
        for number, layer in enumerate(layers):
            if experts < EXPERTS:
                assert_close(split(gpu, layer, given, experts, number), layer.expected(*given))
            else:
                assert_close(computed(gpu, given, number), layer.expected(*given))
        # What a layer begins with was on its way while the layer before was computed.
        assert read == groups * 3
    # So few tokens are looked at: those of the share that one of them has chosen.
    read.clear()
    x, weights, ids = routed(2)
    ids[:] = torch.tensor([1, 4, 5])
    assert_close(split(gpu, layers[0], (x, weights, ids), 5), layers[0].expected(x, weights, ids))
    assert read == [(1, 4)]
    read.clear()
    assert_close(split(gpu, layers[0], (x, weights, ids), 1), layers[0].expected(x, weights, ids))
    assert read == []


def test_shares_of_steps_change_and_layers_between_are_not_read() -> None:
    torch.manual_seed(10)
    layers = [Layer("packed", 1), Layer("compact", 1)]
    gpu = made([layers[0].slices, None, layers[1].slices], 3)
    given = routed(90)
    for experts, number, layer in [(4, 0, 0), (2, 2, 1), (2, 0, 0), (5, 0, 0), (5, 2, 1)]:
        expected = layers[layer].expected(*given)
        assert_close(split(gpu, layers[layer], given, experts, number), expected)
    # A layer is asked for with another share than it is computed with.
    gpu.begin(given[2], 0, 6)
    assert_close(split(gpu, layers[0], given, 3), layers[0].expected(*given))


@pytest.mark.parametrize("pieces", [1, 2, 7, 100])
@pytest.mark.parametrize("tokens", [1, 2, 70])
def test_pieces_and_what_is_left_out_change_nothing(tokens: int, pieces: int) -> None:
    torch.manual_seed(1)
    layer = Layer("compact", 2, inner=64)
    gpu = made([layer.slices], pieces)
    for most in (CHOSEN, 5, EXPERTS):
        given = routed(tokens, most=most)
        assert_close(computed(gpu, given), layer.expected(*given))


def test_experts_that_no_token_has_chosen_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(2)
    gpu = made([Layer("packed", 1).slices], 2)
    read = pieces_read(gpu, monkeypatch)
    x, weights, ids = routed(2)
    ids[:] = torch.tensor([1, 4, 5])
    computed(gpu, (x, weights, ids))
    assert read == [(1, 4), (5,)]
    read.clear()
    # So many tokens are expected to use all.
    computed(gpu, routed(200, most=4))
    assert read == [(0, 1), (2, 3), (4, 5), (6,)]
    # No token is anybody's: nothing to read, nothing to add up.
    read.clear()
    assert not computed(gpu, (x, weights, ids.fill_(-1))).any()
    assert read == [(0,)]


def test_what_comes_next_is_on_its_way_and_may_not_come() -> None:
    torch.manual_seed(3)
    layers = [Layer("packed", 1), Layer("compact", 1), Layer("packed", 1)]
    slices = [layers[0].slices, layers[1].slices, None, layers[2].slices]
    gpu = made(slices, 3)
    assert [number in gpu for number in range(4)] == [True, True, False, True]
    given = routed(90)
    for number, layer in [(0, 0), (1, 1), (3, 2), (1, 1), (0, 0), (0, 0), (3, 2)]:
        assert_close(computed(gpu, given, number), layers[layer].expected(*given))
    # A layer is asked for, and another one is computed.
    gpu.begin(given[2], 0)
    assert_close(computed(gpu, given, 1), layers[1].expected(*given))


def test_experts_that_stay_packed_lie_between_compact_ones() -> None:
    torch.manual_seed(4)
    layer = Layer("compact", 2, inner=64, is_mixed=True)
    slices = layer.slices
    formats = [stack.format for stack in slices[0].halves[0].stacks]
    assert formats == ["compact", "packed", "compact"]
    for pieces in (1, 3, 7):
        given = routed(60)
        assert_close(computed(made([slices], pieces), given), layer.expected(*given))


def test_many_tokens_are_multiplied_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(5)
    layer = Layer("packed", 1)
    monkeypatch.setattr(gpu_experts, "LEAST_TOKENS", 16)
    monkeypatch.setattr(gpu_experts, "EXPERT_WORK_BYTES", 1)
    given = routed(70)
    for pieces in (3, 7):
        assert_close(computed(made([layer.slices], pieces), given), layer.expected(*given))


def test_slices_of_other_shapes_and_budgets_for_nothing_are_refused() -> None:
    left, right = Layer("packed", 1, inner=64).slices, Layer("packed", 1).slices
    with pytest.raises(AgreementError, match="slices of different shapes"):
        GpuExperts(CPU, [(*left, *right)], CHOSEN, "auto")
    with pytest.raises(
        UnsupportedError, match=r"GiB of the GPU, .* experts\.prefill_gpu_gib is 0\.03"
    ):
        GpuExperts(CPU, [left], CHOSEN, 1 / 32)


def test_pieces_are_of_one_size_within_the_budget() -> None:
    sizes = ExpertSizes(
        count=128, stored=9 << 20, expanded=9 << 20, largest=6 << 20, tables=1 << 20
    )
    assert sizes.each == 27 << 20
    # 65 MiB beside; 40 experts would fit, four pieces of 32 are as many as of 40 and less.
    budget = (65 + 27 * 40) << 20
    assert sizes.experts_of_a_piece(budget) == 32
    assert sizes.gpu_bytes(32) <= budget
    assert sizes.experts_of_a_piece(1 << 40) == 128
    assert sizes.experts_of_a_piece(sizes.beside + sizes.each - 1) == 0
    assert sizes.experts_of_a_piece(sizes.beside + sizes.each) == 1
    assert sizes.budget(0.5) == GIB // 2
    assert sizes.budget("auto") == GIB
    large = replace(sizes, stored=GIB)
    assert large.experts_of_a_piece(large.budget("auto")) == 1


def test_neighbours_are_read_at_once() -> None:
    assert runs_of([0, 1, 2]) == ((0, 3),)
    assert runs_of([1, 2, 4, 7, 8]) == ((1, 3), (4, 5), (7, 9))
    assert runs_of([]) == ()


def test_what_cores_take_lies_between_what_was_measured() -> None:
    slow = CoreRates(((256, 0.010), (1024, 0.025)))
    fast = CoreRates(((256, 0.008), (1024, 0.026)))
    rates = CoreRates.of_all([slow, fast])
    assert rates.points == ((256, 0.010), (1024, 0.026))
    assert rates.seconds(128) == pytest.approx(0.005)
    assert rates.seconds(640) == pytest.approx(0.018)
    assert rates.seconds(1024) == pytest.approx(0.026)
    assert rates.seconds(2 * 1024 + 256) == pytest.approx(0.062)


def test_weights_of_a_rank_that_has_died_can_still_be_read() -> None:
    torch.manual_seed(7)
    layer = Layer("compact", 1)
    given = routed(60)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    rates = CoreRates(((16, 0.25), (64, 1.0)))

    def offer() -> None:
        pages = shared(layer.ranks[0])
        assert pages is not None
        layers = (ASKED, RemoteLayer("b", 1, 1))
        expert_offers.give(theirs, layers, {"a": pages, "c": pages}, rates, 20)

    process = multiprocessing.get_context("fork").Process(target=offer)
    process.start()
    theirs.close()
    (found,) = expert_offers.taken([ours], ["expert rank 0"], 20)
    process.join(20)
    assert process.exitcode == 0
    assert found.rates == rates
    assert list(found.slices) == ["a"]
    assert_close(computed(made([[found.slices["a"]]], 3), given), layer.expected(*given))
    with pytest.raises(StartupError, match="expert rank 0 has closed the connection"):
        expert_offers.taken([ours], ["expert rank 0"], 20)


ASKED = RemoteLayer("a", HIDDEN, CHOSEN)


def linked(offers: Sequence[Offer], **config: Any) -> expert_prompts.ExpertLink | None:
    channel: Any = None
    return expert_prompts.made(
        ExpertsConfig(ranks=1, **config), CPU, [ASKED], offers, channel,
        dtype=torch.bfloat16, tokens=64,
    )  # fmt: skip


def offered(points: Any, *, is_there: bool = True) -> Offer:
    slices = {"a": Layer("packed", 1).slices[0]} if is_there else {}
    return Offer(None if points is None else CoreRates(points), slices)


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The log."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level("INFO", "vllm.ray_hetero")
    return caplog


def test_the_link_is_taken_from_where_it_is_faster(said: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(6)
    slow, fast = offered(((16, 1e3), (64, 1e4))), offered(((16, 1e-9), (64, 1e-8)))
    link = linked([slow])
    assert link is not None
    assert link.shares == ExpertShares(EXPERTS, ((8, EXPERTS),))
    assert [link.experts_here(*step) for step in [(8, 0), (7, 0), (8, 1)]] == [EXPERTS, 0, 0]
    assert "experts of steps of 8 tokens and more" in said.text
    assert "together with the cores" not in said.text
    assert linked([fast]) is None
    assert "because in steps of up to 64 tokens they are faster" in said.text
    # What was asked for is not measured against.
    link = linked([fast], prefill_on_gpu_tokens=20)
    assert link is not None
    assert link.shares == ExpertShares(EXPERTS, ((20, EXPERTS),))
    link = linked([fast], prefill_on_gpu_tokens=20, prefill_gpu_share=0.4)
    assert link is not None
    assert link.shares == ExpertShares(EXPERTS, ((20, 3),))
    assert linked([slow], prefill_on_gpu=False) is None


def test_experts_are_split_where_sockets_and_link_take_as_long(
    said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert_prompts, "_measured", lambda *given: 1.0)
    link = linked([offered(((16, 0.25), (64, 1.0)))])
    assert link is not None
    # Of 7 experts the link reads 1, 2, 3 in 1/7, 2/7, 3/7 s; the cores take 1/8 to 1 s for all.
    assert [link.experts_here(tokens, 0) for tokens in (7, 16, 32, 64)] == [0, 1, 2, 4]
    assert (
        "computed by the GPU, together with the cores (of 7 experts of a layer "
        "1 in steps of 16 tokens, 4 in steps of 64 tokens): it can read 0.0 GiB"
    ) in said.text
    # What is asked for, from where that is faster than the cores alone.
    link = linked([offered(((16, 0.25), (64, 1.0)))], prefill_gpu_share=0.3)
    assert link is not None
    assert link.shares == ExpertShares(EXPERTS, ((24, 2),))
    link = linked([offered(((16, 0.25), (64, 2.0)))], prefill_gpu_share=1.0)
    assert link is not None
    assert link.shares.points[0][1] == EXPERTS


class Stage:
    """The ranks of a stage as threads, which gather what they say."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._said: list[Any] = [None] * size
        self._barrier = threading.Barrier(size, timeout=60)

    def readers(self, rank: int) -> expert_prompts.Readers:
        def gather(value: Any) -> list[Any]:
            self._said[rank] = value
            self._barrier.wait()
            found = list(self._said)
            self._barrier.wait()
            return found

        return expert_prompts.Readers(Part(rank, self._size), gather)

    def links(self, offer: Offer, budgets: Sequence[Any]) -> list[expert_prompts.ExpertLink | None]:
        """The links of all ranks, which may take so much of their GPUs."""

        def link(rank: int) -> expert_prompts.ExpertLink | None:
            channel: Any = "a channel" if rank == 0 else None
            return expert_prompts.made(
                ExpertsConfig(ranks=1, prefill_gpu_gib=budgets[rank]), CPU, [ASKED], [offer],
                channel, dtype=torch.bfloat16, tokens=64, readers=self.readers(rank),
            )  # fmt: skip

        with ThreadPoolExecutor(self._size) as pool:
            return list(pool.map(link, range(self._size)))


def test_the_gpus_of_a_stage_agree_on_what_each_reads(
    said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert_prompts, "OtherExperts", lambda *given: None)
    taken = iter([0.5, 1.0])
    monkeypatch.setattr(expert_prompts, "_measured", lambda *given: next(taken))
    offer = offered(((16, 0.25), (64, 1.0)))
    first, second = Stage(2).links(offer, ["auto", "auto"])
    assert first is not None
    assert second is not None
    # The slower one counts, as for one GPU that takes a second.
    assert first.shares == second.shares
    assert [first.experts_here(tokens, 0) for tokens in (7, 16, 32, 64)] == [0, 1, 2, 4]
    assert said.text.count("are computed by the 2 GPUs of the stage") == 1


def test_one_gpu_reads_all_experts_where_another_has_no_room(
    said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert_prompts, "OtherExperts", lambda *given: None)
    offer = offered(((16, 1e3), (64, 1e4)))
    first, *others = Stage(3).links(offer, ["auto", "auto", 0.01])
    assert first is not None
    assert others == [None, None]
    assert "because rank 2 of the stage cannot: this needs at least" in said.text
    assert "are computed by the GPU: it can read" in said.text
    with pytest.raises(UnsupportedError, match=r"prefill_gpu_gib is 0\.01"):
        linked([offer], prefill_on_gpu=True, prefill_gpu_gib=0.01)
    assert Stage(2).links(offer, [0.01, "auto"]) == [None, None]
    assert "computed by the cores of expert ranks alone" in said.text


def test_kernels_of_all_sizes_are_built_before_the_first_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, steps = [], []

    def kernel_tokens(self: GpuExperts, *given: int) -> list[int]:
        asked.append(given)
        return [20, 33, 64]

    def sums(self: GpuExperts, x: torch.Tensor, *given: Any) -> torch.Tensor:
        steps.append((len(x), given[-1]))
        return real(self, x, *given)

    real = GpuExperts.sums
    monkeypatch.setattr(GpuExperts, "kernel_tokens", kernel_tokens)
    monkeypatch.setattr(GpuExperts, "sums", sums)
    assert linked([offered(None)], prefill_on_gpu_tokens=20, prefill_gpu_share=0.4) is not None
    assert asked == [(0, CHOSEN, 20, 64)]
    # Of those that the GPU is to compute; others are measured before.
    assert steps[-3:] == [(20, 3), (33, 3), (64, 3)]


def test_without_memory_to_read_the_cores_compute_all(said: pytest.LogCaptureFixture) -> None:
    missing = offered(((16, 0.01), (64, 0.04)), is_there=False)
    assert linked([missing]) is None
    assert "the GPU can read none of them" in said.text
    assert "the cores take 40.0 ms a layer for 64 tokens" in said.text
    with pytest.raises(UnsupportedError, match=r"Set experts\.prefill_on_gpu to false"):
        linked([missing], prefill_on_gpu=True)
    with pytest.raises(UnsupportedError, match=r"prefill_gpu_gib is 0\.01"):
        linked([offered(None)], prefill_on_gpu=True, prefill_gpu_gib=0.01)

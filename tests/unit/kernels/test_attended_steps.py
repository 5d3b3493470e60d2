"""A decode step that ends with its last layer's attention is followed by what lies behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

import decoder_parts  # noqa: E402
from adapted_layers import adapt, adapted, choose, load, punica  # noqa: E402
from decoder_parts import HIDDEN, attends, known_layers, linears  # noqa: E402
from native_module import LEVELS, TESTED, level_of, native, needs_native  # noqa: E402
from test_adapters import slots_of  # noqa: E402
from test_decode_step import CLOSE, Requests, unpacked  # noqa: E402
from test_rank_sums import FEW, Whole, shared, together  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402

from ray_hetero.kernels.layers import decode_step  # noqa: E402
from ray_hetero.kernels.layers.decode_step import DecodeStep, NativeLayers, address_of  # noqa: E402
from ray_hetero.kernels.layers.decoder_layers import DecoderLayers  # noqa: E402
from ray_hetero.kernels.layers.post_attention import PostAttentionBlock  # noqa: E402
from ray_hetero.kernels.linear.streaming_linear import StreamingLinear  # noqa: E402

current_platform.import_kernels()
pytestmark = needs_native

LAYERS = 3
TOKENS = {1: [33], 5: [300, 1, 64, 512, 130], 40: list(range(30, 70))}
"""Lengths of requests, by their number; the last are so many that a call of its own computes what
lies behind an attention in two parts."""
MANY_INPUTS = 2080
"""Of a product, so that its sums are cut into parts: one of few tokens into others than one of
more."""
BEST = LEVELS[-1] if LEVELS else ""


def last_of(block: PostAttentionBlock, kernel: StreamingLinear) -> PostAttentionBlock:
    """The same as if no layer followed."""
    return PostAttentionBlock(replace(block.parts, next=None), kernel)


class CutStep:
    """A decode step in three native calls: up to an attention, what lies behind it, and the rest.

    Args:
        made: the layers.
        cut: the layer whose attention is the end of the first call.

    """

    def __init__(self, made: DecoderLayers, cut: int) -> None:
        self._kernel = made._kernel
        self._count = cut + 1
        attention, block = made._layers[cut]
        self._behind = last_of(block, self._kernel)
        self._queries = attention.shape.queries
        self._front = NativeLayers(
            self._kernel, made._input, [*made._layers[:cut], (attention, self._behind)],
            ends_attended=True,
        )  # fmt: skip
        following = block.parts.next
        self._rest = (
            None
            if following is None
            else DecodeStep(following, made._layers[cut + 1 :], self._kernel, made._adapters)
        )

    def front(
        self, requests: Any, contexts: Sequence[Any], hidden: Any, residual: Any, slots: Any = None
    ) -> tuple[Any, Any]:
        """The attention [M, queries], and what its output projection is to be added to."""
        tokens, (_, module, cache, _) = len(hidden), contexts[0]
        # Behind what is written there is a row that must not be.
        attended = torch.full((tokens + 1, self._queries), torch.nan, dtype=torch.bfloat16)
        total = torch.full((tokens + 1, HIDDEN), torch.nan, dtype=torch.bfloat16)
        self._front.run(
            [requests.native(native, cache, module.isa)],
            [address_of(cache) for _, _, cache, _ in contexts[: self._count]],
            hidden, residual, attended, total, slots,
        )  # fmt: skip
        for one in (attended, total):
            assert bool(one[:-1].isfinite().all())
            assert bool(one[-1].isnan().all())
        return attended[:-1], total[:-1]

    def __call__(
        self, requests: Any, contexts: Sequence[Any], hidden: Any, residual: Any, slots: Any = None
    ) -> tuple[Any, Any]:
        """All three; what a step in one call gives."""
        attended, before = self.front(requests, contexts, hidden, residual, slots)
        y, total = torch.empty_like(hidden), torch.empty_like(hidden)
        self._behind.native.run(
            attended.data_ptr(), before.data_ptr(), len(hidden), total.data_ptr(), y.data_ptr(),
            self._kernel.level, slots=0 if slots is None else slots.data_ptr(),
        )  # fmt: skip
        if self._rest is None:
            return y, total
        given = contexts[self._count :]
        return self._rest._run([requests], given[:1], given, y, total, slots)


def given(requests: Requests) -> tuple[Any, list[Any]]:
    """The requests, and the context of each layer, of a step that has begun."""
    own = decode_step.StepRequests(
        requests.positions, requests.slots, requests.lengths, requests.blocks
    )
    return own, [requests.contexts[attends(layer).layer_name] for layer in requests.layers]


def expect_the_same(
    requests: Requests, cut: int, *, isa: str = "vec", level: str = BEST, is_first: bool = True,
    slots: Any = None, is_exact: bool = True,
) -> None:  # fmt: skip
    """A step that is cut gives what it gives in one call, and writes the same.

    Args:
        requests: of the step.
        cut: the layer whose attention is the end of the first call.
        isa: how keys and values lie in blocks.
        level: of the kernels.
        is_first: whether there is no residual yet.
        slots: of the requests' adapters.
        is_exact: whether bit by bit also behind that attention.

    """
    made, (hidden, residual) = requests.made(level), requests.inputs(is_first=is_first)
    assert made._decode_step is not None
    whole = requests.begin(isa)
    own, contexts = given(requests)
    expected = made._decode_step._run([own], contexts[:1], contexts, hidden, residual, slots)
    in_parts = requests.begin(isa)
    own, contexts = given(requests)
    kept = hidden.clone(), None if residual is None else residual.clone()
    found = CutStep(made, cut)(own, contexts, hidden, residual, slots)
    assert torch.equal(hidden, kept[0])
    assert residual is None or torch.equal(residual, kept[1])
    for one, other in zip(found, expected, strict=True):
        if is_exact:
            assert torch.equal(one, other)
        else:
            torch.testing.assert_close(one.float(), other.float(), **CLOSE)
    for layer, (mine, theirs) in enumerate(zip(in_parts, whole, strict=True)):
        if is_exact or layer <= cut:
            assert torch.equal(mine, theirs)
        else:
            both = (unpacked(cache, isa).float() for cache in (mine, theirs))
            torch.testing.assert_close(*both, **CLOSE)


@pytest.mark.parametrize("level", TESTED)
@pytest.mark.parametrize("isa", ["vec", "amx"])
@pytest.mark.parametrize("cut", range(LAYERS))
@pytest.mark.parametrize("tokens", TOKENS)
def test_a_step_may_be_cut_behind_any_attention(
    tokens: int, cut: int, isa: str, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = Requests(monkeypatch, TOKENS[tokens], layers=LAYERS)
    expect_the_same(requests, cut, isa=isa, level=level, is_first=cut == 1)


@pytest.mark.parametrize("level", TESTED)
@pytest.mark.parametrize("tokens", TOKENS)
def test_so_may_one_whose_sums_are_cut_into_parts(
    tokens: int, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoder_parts, "WIDE", MANY_INPUTS)
    # A step of more than few tokens adds up other parts than a call that has few at a time
    # (csrc/kernels/few_tokens.h), which rounds differently.
    is_exact = tokens <= native.FEW_TOKENS
    requests = Requests(monkeypatch, TOKENS[tokens], layers=LAYERS)
    expect_the_same(requests, 1, level=level, is_exact=is_exact)


@pytest.mark.parametrize("cut", range(2))
@pytest.mark.parametrize(
    "family", ["qwen3", "gemma2", "granite", "stablelm", "opt", "falcon-7b", "falcon-rw"]
)
def test_so_may_those_of_other_models(
    family: str, cut: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv_heads = 6 if family == "opt" else 2
    expect_the_same(Requests(monkeypatch, TOKENS[5], family=family, kv_heads=kv_heads), cut)


def test_an_attention_in_front_of_experts_may_be_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = Requests(monkeypatch, TOKENS[5], family="qwen3_moe", layers=1)
    expect_the_same(requests, 0, is_first=False)


def test_the_end_does_not_depend_on_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = Requests(monkeypatch, TOKENS[5], layers=LAYERS)
    made, (hidden, residual) = requests.made(), requests.inputs(is_first=False)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            requests.begin("vec")
            own, contexts = given(requests)
            found.append(CutStep(made, 1).front(own, contexts, hidden, residual))
    finally:
        torch.set_num_threads(before)
    for one in found[1:]:
        assert all(map(torch.equal, found[0], one))


@pytest.mark.parametrize("level", TESTED)
@pytest.mark.parametrize("cut", range(2))
def test_adapters_are_added_before_the_end(
    cut: int, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests, wrapper = Requests(monkeypatch, TOKENS[5]), punica()
    adapt(requests.decoder, wrapper, slots=3, rank=8)
    for slot in range(3):
        load(list(adapted(requests.decoder)), slot, rank=8, seed=slot)
    slots = torch.tensor(slots_of(requests.tokens))
    choose(wrapper, slots.tolist())
    expect_the_same(requests, cut, level=level, slots=slots)


def test_slots_behind_the_end_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = Requests(monkeypatch, TOKENS[5], layers=1)
    made, (hidden, residual) = requests.made(), requests.inputs(is_first=True)
    ((attention, block),) = made._layers
    output = block.parts.output
    # An adapter that nothing must read.
    one: Any = SimpleNamespace(native=native.Adapters(
        slots=1, rank=8, k=output.weight.shape[1], slices=[(0, 0, output.weight.shape[0])]
    ))  # fmt: skip
    adapting = replace(output, adapters=one)
    behind = PostAttentionBlock(replace(block.parts, output=adapting), made._kernel)
    made._layers = [(attention, behind)]
    requests.begin("vec")
    own, contexts = given(requests)
    slots = torch.full((requests.tokens,), 1)
    whole = DecodeStep(made._input, made._layers, made._kernel, None)
    with pytest.raises(ValueError, match="a slot of adapters below 1, got 1 for request 0"):
        whole._run([own], contexts[:1], contexts, hidden, residual, slots)
    CutStep(made, 0).front(own, contexts, hidden, residual, slots)


@pytest.mark.parametrize("level", TESTED)
@pytest.mark.parametrize("cut", range(2))
def test_ranks_of_a_group_meet_on_both_sides_of_the_end(
    cut: int, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = 2
    whole = Whole(monkeypatch, FEW, ranks)
    hidden, residual = whole.inputs(is_first=False)
    before = [cache.clone() for cache in whole.begin("vec")]
    own, contexts = given(whole)
    kept, steps = [], []
    for rank, sums in enumerate(shared(ranks, native.STEP_TOKENS * decoder_parts.HIDDEN)):
        kernel = StreamingLinear(native, level_of(level))
        kernel.sums = sums
        model = whole.part(rank)
        made = DecoderLayers(known_layers(model, linears(model), kernel), kernel)
        mine = [
            (metadata, module, cache[:, rank : rank + 1].contiguous(), places)
            for (metadata, module, _, places), cache in zip(contexts, before, strict=True)
        ]
        assert made._decode_step is not None
        kept.append(made)
        in_one = partial(made._decode_step._run, [own], mine[:1], mine, hidden, residual)
        steps.append((in_one, partial(CutStep(made, cut), own, mine, hidden, residual)))
    # Each step writes the same keys and values; ranks have to be in step with each other before
    # and behind those that are cut.
    expected = together([in_one for in_one, _ in steps])
    for which in (1, 1, 0):
        found = together([step[which] for step in steps])
        for one, other in zip(found, expected, strict=True):
            assert all(map(torch.equal, one, other))


def test_the_last_layer_still_has_no_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Requests(monkeypatch, [40]).made()
    attention, block = made._layers[0]
    assert attention.scores is not None
    layer = attention.rotation, attention.scores.native(native), block.native
    with pytest.raises(ValueError, match="each but the last with the next one"):
        native.DecoderLayers(first=made._input.native, layers=[layer], ends_attended=True)
    with pytest.raises(ValueError, match="at least one layer"):
        native.DecoderLayers(first=made._input.native, layers=[], ends_attended=True)

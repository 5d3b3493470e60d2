"""LoRA adapters of requests are added inside the native calls as vLLM's own modules add them."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

import decoder_parts  # noqa: E402
import paged_steps  # noqa: E402
from adapted_layers import adapt, adapted, choose, load, punica, unload  # noqa: E402
from decoder_parts import (  # noqa: E402
    HEAD,
    HIDDEN,
    attends,
    computed,
    fuse_model,
    known_layers,
    layers_of,
    linears,
    model,
)
from native_module import LEVELS, TESTED, level_of, native, needs_native  # noqa: E402
from paged_steps import Conversation, Steps  # noqa: E402
from test_decode_step import CLOSE, Requests, kernel_of  # noqa: E402
from test_rank_sums import Whole, shared, together  # noqa: E402
from vllm import _custom_ops as ops  # noqa: E402
from vllm.lora import layers as lora_layers  # noqa: E402
from vllm.lora.ops.torch_ops import lora_ops  # noqa: E402
from vllm.lora.punica_wrapper import punica_cpu  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402

from ray_hetero.compat import patching  # noqa: E402
from ray_hetero.compat.models import lora  # noqa: E402
from ray_hetero.kernels.layers import decode_step, fusible_layers  # noqa: E402
from ray_hetero.kernels.layers.adapters import adapters_of  # noqa: E402
from ray_hetero.kernels.layers.decoder_layers import DecoderLayers  # noqa: E402
from ray_hetero.kernels.layers.structures import Calls  # noqa: E402
from ray_hetero.kernels.linear.streaming_linear import StreamingLinear  # noqa: E402
from ray_hetero.offload.prefill import offload_gpu  # noqa: E402
from ray_hetero.supported import is_since  # noqa: E402

current_platform.import_kernels()
pytestmark = needs_native

MIXED = [0, -1, 1, 1, -1, 0, 2]
"""Slots of a step's tokens: three adapters, and requests without."""
BEST = LEVELS[-1] if LEVELS else ""


@pytest.fixture(autouse=True)
def contexts(contexts: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The same with vLLM's operators mended."""
    for operators in (lora_ops, punica_cpu):
        monkeypatch.setattr(operators, "bgmv_shrink", operators.bgmv_shrink)
    lora.leave_tokens_without_adapter()
    return contexts


def slots_of(tokens: int) -> list[int]:
    return [MIXED[token % len(MIXED)] for token in range(tokens)]


@pytest.mark.parametrize(
    ("tokens", "rank", "level"),
    [*((7, 16, level) for level in TESTED), (1, 8, BEST), (5, 1, BEST), (40, 32, BEST)],
)
def test_layers_add_what_vllms_modules_add(
    tokens: int, rank: int, level: str, contexts: dict[str, Any]
) -> None:
    expect_vllms("llama", tokens, rank, level, contexts)


@pytest.mark.parametrize("family", ["qwen2", "gemma2", "granite", "opt", "falcon-7b", "mixtral"])
def test_layers_of_other_families_do(
    family: str, contexts: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder_parts.be_alone(monkeypatch)
    expect_vllms(family, 7, 8, BEST, contexts)


def expect_vllms(family: str, tokens: int, rank: int, level: str, contexts: dict[str, Any]) -> None:
    """Fused layers give what vLLM's give, with adapters that come and go."""
    torch.manual_seed(tokens + rank)
    decoder, wrapper = model(2, family=family), punica()
    adapt(decoder, wrapper, slots=3, rank=rank)
    modules, layers = list(adapted(decoder)), layers_of(decoder)
    for number, layer in enumerate(layers):
        contexts[f"layers.{number}"] = "metadata", attends(layer), "cache", "slots"
    kernel = kernel_of(level)
    given = linears(decoder)
    (calls,) = {layer.calls for layer in known_layers(decoder, given, kernel)}
    for slot in range(3):
        load(modules, slot, rank=max(1, rank // (1 + slot % 2)), seed=slot)
    fused = model(0, family=family)
    fused.__dict__ = decoder.__dict__.copy()
    fused._modules = {name: torch.nn.ModuleList(list(one)) if isinstance(one, torch.nn.ModuleList)
                      else one for name, one in decoder._modules.items()}  # fmt: skip
    names = {name for name, one in fused.named_modules() if hasattr(one, "lora_a_stacked")}
    assert fuse_model(torch.nn.Sequential(fused), given, kernel) == 2
    # vLLM looks for them there.
    found_again = {name for name, one in fused.named_modules() if hasattr(one, "lora_a_stacked")}
    assert found_again == names
    assert len(names) >= 4
    hidden = torch.randn(tokens, HIDDEN).bfloat16()

    def outputs(layers: list[Any], slots: list[int]) -> Any:
        choose(wrapper, slots)
        return computed(layers, calls, torch.arange(tokens), hidden.clone())

    def expect(slots: list[int]) -> Any:
        expected, found = (outputs(one, slots) for one in (layers, layers_of(fused)))
        assert float((found - expected).norm(dim=1).max() / expected.norm(dim=1).min()) < 2**-5
        return found

    plain, mixed = expect([-1] * tokens), expect(slots_of(tokens))
    has = torch.tensor(slots_of(tokens)) >= 0
    assert torch.equal(mixed[~has], plain[~has])
    apart = (mixed - plain).norm(dim=1) / plain.norm(dim=1)
    assert float(apart[has].min()) > 2**-4
    # One is replaced, another one is taken away.
    load(modules, 0, rank=rank, seed=7)
    replaced = expect(slots_of(tokens))
    assert not torch.equal(replaced[0], mixed[0])
    unload(modules, 0)
    assert torch.equal(expect([0] * tokens), plain)


def test_adapters_are_rounded_as_vllm_rounds_them() -> None:
    # Small integers, whose sums are exact in float32 in any order.
    tokens, rank = 6, 8
    decoder, wrapper = model(1), punica()
    adapt(decoder, wrapper, slots=2, rank=rank)
    for module in adapted(decoder):
        module.base_layer.matrix = torch.randint(-3, 4, module.base_layer.matrix.shape).bfloat16()
        for stacked in (*module.lora_a_stacked, *module.lora_b_stacked):
            stacked.copy_(torch.randint(-3, 4, stacked.shape))
    choose(wrapper, [0, -1, 1, 1, -1, 0])
    module = layers_of(decoder)[0].mlp.gate_up_proj
    x = torch.randint(-9, 10, (tokens, HIDDEN)).bfloat16()
    expected, _ = module(x)
    y, _ = module.base_layer(x)
    adapters = adapters_of(module, module.base_layer.matrix.shape, native)
    assert adapters is not None
    assert not isinstance(adapters, str)
    adapters.add(x, y)
    assert torch.equal(y, expected)


@pytest.mark.parametrize("level", TESTED)
@pytest.mark.parametrize("rank", [8, 16])
def test_a_decode_step_adds_them(rank: int, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # The third request verifies three drafts.
    step = Requests(monkeypatch, [300, 1, 64, 33], rows=[1, 1, 4, 1])
    wrapper = punica()
    adapt(step.decoder, wrapper, slots=3, rank=rank)
    modules = list(adapted(step.decoder))
    for slot in range(3):
        load(modules, slot, rank=rank, seed=slot)
    layers, (hidden, residual) = step.made(level), step.inputs(is_first=False)

    def outputs(slots: list[int], native_step: bool) -> Any:
        choose(wrapper, slots)
        step.begin("vec")
        if native_step:
            return step.decoded(layers, hidden, residual)
        return layers.one_by_one(step.positions, hidden, residual)

    plain = outputs([-1] * step.tokens, native_step=True)
    for slots in ([0, -1, 2, 2, 2, 2, 1], [-1, -1, -1, 0, -1, -1, -1], [1] * step.tokens):
        found, expected = (outputs(slots, native_step=is_native) for is_native in (True, False))
        assert all(
            distance(*both).max() < paged_steps.CLOSE for both in zip(found, expected, strict=True)
        )
        without = torch.tensor(slots) < 0
        assert torch.equal(found[0][without & (torch.arange(7) < 2)],
                           plain[0][without & (torch.arange(7) < 2)])  # fmt: skip
        assert (distance(found[0], plain[0])[~without] > 2 * paged_steps.CLOSE).all()


@pytest.mark.parametrize("level", ["software_tiles", BEST])
def test_a_step_of_many_requests_adds_them(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    step, wrapper = Requests(monkeypatch, [1 + 3 * number for number in range(40)]), punica()
    adapt(step.decoder, wrapper, slots=3, rank=8)
    for slot in range(3):
        load(list(adapted(step.decoder)), slot, rank=8, seed=slot)
    choose(wrapper, slots_of(step.tokens))
    layers, (hidden, residual) = step.made(level), step.inputs(is_first=False)
    step.begin("vec")
    expected = layers.one_by_one(step.positions, hidden, residual)
    step.begin("vec")
    found = step.decoded(layers, hidden, residual)
    assert found is not None
    assert all(
        distance(*both).max() < paged_steps.CLOSE for both in zip(found, expected, strict=True)
    )


def distance(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """How far rows are from others, relative to the length of these."""
    return (one.float() - other.float()).norm(dim=1) / other.float().norm(dim=1)


@pytest.mark.parametrize("level", TESTED)
@pytest.mark.parametrize("count", [2, 3])
def test_ranks_of_a_group_add_their_parts(
    count: int, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Whole(monkeypatch, [300, 1, 64], count)
    wrapper, slots = punica(), [1, -1, 0]
    ranks = [whole.part(own) for own in range(count)]
    adapt(whole.decoder, wrapper, slots=2, rank=8)
    for own, rank in enumerate(ranks):
        adapt(rank, wrapper, slots=2, rank=8)
        for module in adapted(rank):
            module.tp_rank, module.output_ids = own, (own,) * module.n_slices
    for slot in range(2):
        for decoder in (whole.decoder, *ranks):
            load(list(adapted(decoder)), slot, rank=8, seed=slot)
    choose(wrapper, slots)
    hidden, residual = whole.inputs(is_first=False)
    caches = whole.begin("vec")
    alone = whole.made(level)
    assert alone.decode_step is not None
    contexts = [whole.contexts[layer.self_attn.attn.layer_name] for layer in whole.layers]
    before = [cache.clone() for cache in caches]
    requests = decode_step.StepRequests(whole.positions, whole.slots, whole.lengths, whole.blocks)
    of_tokens = torch.tensor(slots)
    expected = alone.decode_step.run(
        [requests], contexts[:1], contexts, hidden, residual, of_tokens
    )
    without = alone.decode_step.run([requests], contexts[:1], contexts, hidden, residual)
    assert not torch.allclose(expected[0].float(), without[0].float(), **CLOSE)
    calls, kept = [], []
    for own, sums in enumerate(shared(count, native.STEP_TOKENS * HIDDEN)):
        kernel = StreamingLinear(native, level_of(level))
        kernel.sums = sums
        made = DecoderLayers(known_layers(ranks[own], linears(ranks[own]), kernel), kernel)
        mine = [
            (metadata, module, cache[:, own : own + 1].contiguous(), places)
            for (metadata, module, _, places), cache in zip(contexts, before, strict=True)
        ]
        assert made.decode_step is not None
        kept.append((made, mine))
        calls.append(
            partial(made.decode_step.run, [requests], mine[:1], mine, hidden, residual, of_tokens)
        )
    for y, total in together(calls):
        torch.testing.assert_close(y.float(), expected[0].float(), **CLOSE)
        torch.testing.assert_close(total.float(), expected[1].float(), **CLOSE)


@pytest.mark.parametrize("least", [8, 1 << 20], ids=["with a GPU for prompts", "without"])
def test_chunks_of_prompts_and_decoding_requests_have_them(
    least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrapper = punica()

    def made(*args: Any, **parts: Any) -> Any:
        decoder = model(*args, **parts)
        adapt(decoder, wrapper, slots=2, rank=8)
        for slot in range(2):
            load(list(adapted(decoder)), slot, rank=8, seed=slot, scale=0.25)
        return decoder

    monkeypatch.setattr(paged_steps, "model", made)
    monkeypatch.setattr(offload_gpu, "LEAST_BYTES", 1)
    steps = Steps(monkeypatch, least=least)
    for cache in steps.caches:
        cache.zero_()  # vLLM's kernels multiply what was never written with zeros
    one, other, third = (steps.request(tokens) for tokens in (90, 60, 40))
    slot_of = {one: 0, other: 1, third: -1}

    def check(*parts: tuple[Conversation, int, int]) -> None:
        positions, hidden = steps.begin(parts)
        for metadata, *_ in steps.contexts.values():
            metadata.scheduler_metadata = ops.cpu_attn_get_scheduler_metadata(
                num_reqs=len(parts), num_heads=steps.heads, num_kv_heads=steps.kv_heads,
                head_dim=HEAD, seq_lens=metadata.seq_lens, dtype=torch.bfloat16,
                query_start_loc=metadata.query_start_loc, causal=True, sliding_window_size=-1,
                isa="vec", enable_kv_split=True,
            )  # fmt: skip
        choose(wrapper, [slot_of[one] for one, begin, end in parts for _ in range(begin, end)])
        y, total = steps.made(positions, hidden, None)
        expected = []
        for one, begin, end in parts:
            choose(wrapper, [slot_of[one]] * len(one.inputs))
            expected.append(steps.expected(one)[begin:end])
        wanted = torch.cat(expected)
        apart = (y.float() + total.float() - wanted).norm(dim=1) / wanted.norm(dim=1)
        assert float(apart.max()) < paged_steps.CLOSE

    # Two prompts; chunks beside decoding; a prompt without an adapter alone; decoding; drafts.
    check((one, 0, 50), (other, 0, 59))
    check((one, 50, 86), (other, 59, 60))
    check((third, 0, 36))
    check((one, 86, 87), (third, 36, 37))
    check((one, 87, 90), (third, 37, 40))


def test_adapters_that_are_not_known_are_left_to_vllm_and_named() -> None:
    decoder = model(1)
    adapt(decoder, punica(), slots=2, rank=8)
    (layer,), kernel, given = layers_of(decoder), kernel_of(BEST), linears(decoder)
    down = layer.mlp.down_proj
    down.__class__ = lora_layers.RowParallelLinearWithShardedLoRA
    why = fusible_layers.layer_of(decoder, layer, given, kernel)
    assert why == "adapters are added in another way (RowParallelLinearWithShardedLoRA)"
    down.__class__ = lora_layers.RowParallelLinearWithLoRA
    halves = tuple(one.half() for one in down.lora_a_stacked)
    stacked, down.lora_a_stacked = down.lora_a_stacked, halves
    why = fusible_layers.layer_of(decoder, layer, given, kernel)
    assert why == "adapters are torch.float16, expected torch.bfloat16 (--lora-dtype)"
    down.lora_a_stacked = stacked
    assert not isinstance(fusible_layers.layer_of(decoder, layer, given, kernel), str)
    assert fusible_layers.layer_of(decoder, layer, given, kernel).calls is Calls.RESIDUAL


def test_slots_that_there_are_not_are_refused() -> None:
    decoder, wrapper = model(1), punica()
    adapt(decoder, wrapper, slots=2, rank=8)
    kernel = kernel_of(BEST)
    made = DecoderLayers(known_layers(decoder, linears(decoder), kernel), kernel)
    ((_, block),) = made._layers
    attended, residual = torch.randn(2, 6 * HEAD).bfloat16(), torch.randn(2, HIDDEN).bfloat16()
    choose(wrapper, [-1, 2])
    with pytest.raises(ValueError, match=r"a slot of adapters below 2, got 2 for request 1"):
        block(attended, residual)
    # Once more with those that there are.
    choose(wrapper, [-1, 1])
    block(attended, residual)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [({"slots": 0}, "at least one slot"), ({"slices": []}, "one slice"),
     ({"slices": [(0, 0, 24)]}, "outputs in multiples of 16, got 24")],
)  # fmt: skip
def test_sizes_are_checked(sizes: dict[str, Any], message: str) -> None:
    given = {"slots": 1, "rank": 8, "k": 64, "slices": [(0, 0, 64)]} | sizes
    with pytest.raises(ValueError, match=message):
        native.Adapters(**given)


def test_stock_operators_add_the_last_adapter_to_tokens_without_one() -> None:
    # Since 0.33 they do not: with 0.32, the patch can go.
    stock = getattr(lora_ops.bgmv_shrink, patching.STOCK, lora_ops.bgmv_shrink)
    weights, inputs = torch.ones(2, 1, 4, 8).bfloat16(), torch.ones(3, 8).bfloat16()
    indices = torch.tensor([0, -1, 1])
    theirs, ours = torch.zeros(2, 3, 4)
    stock(inputs, weights, theirs, indices)
    lora_ops.bgmv_shrink(inputs, weights, ours, indices)
    assert theirs[1].tolist() == [0.0 if is_since("0.33") else 8.0] * 4
    assert ours[1].tolist() == [0.0] * 4
    assert torch.equal(ours[[0, 2]], theirs[[0, 2]])

"""A decode step in one native call gives what layers one by one do, with vLLM's attention."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

import decoder_parts  # noqa: E402
from decoder_parts import (  # noqa: E402
    FAMILIES,
    HEAD,
    HIDDEN,
    POSITIONS,
    attends,
    known_layers,
    layers_of,
    linears,
    model,
)
from native_module import BETWEEN_PRODUCTS, LEVELS, level_of, native, needs_native  # noqa: E402
from recorded_events import StepTrace  # noqa: E402
from vllm import _custom_ops as ops  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402
from vllm.v1.attention.backends import cpu_attn  # noqa: E402

from ray_hetero.kernels.layers import attention as attention_module  # noqa: E402
from ray_hetero.kernels.layers import decode_step, decoder_layers, layer_tokens  # noqa: E402
from ray_hetero.kernels.layers.decoder_layers import DecoderLayers  # noqa: E402
from ray_hetero.kernels.layers.layer_tokens import LayerTokens  # noqa: E402
from ray_hetero.kernels.linear.streaming_linear import StreamingLinear  # noqa: E402
from ray_hetero.kernels.step_route import Reason  # noqa: E402
from ray_hetero.kernels.step_trace import Event, followed  # noqa: E402
from ray_hetero.offload.decode import column_pieces  # noqa: E402
from ray_hetero.offload.decode.mlp_columns import columns_of  # noqa: E402
from ray_hetero.offload.decode.share_choice import Share, Shares  # noqa: E402
from ray_hetero.offload.decode.shared_decode import SharedDecode  # noqa: E402
from ray_hetero.offload.prefill import offload_gpu  # noqa: E402
from ray_hetero.offload.prefill.offload_gpu import OffloadGpu  # noqa: E402

current_platform.import_kernels()
pytestmark = needs_native

LAYERS = 2
HAS_TILES = hasattr(torch.ops._C, "weight_packed_linear")
"""Whether this build of vLLM lays keys and values out for AMX; those for AVX2 do not."""
IN_PARTS = {"mixtral", "qwen2_moe", "qwen3_moe", "glm4_moe", "gpt_oss"}
"""Models whose layers are one operator each."""
WITH_RESIDUAL = ("llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3", "glm4")
"""Models that hand a residual on from layer to layer."""
CLOSE = {"rtol": 2**-5, "atol": 2**-4}


def kernel_of(level: str) -> StreamingLinear:
    kernel = StreamingLinear(native, level_of(level))
    kernel.dtype = decoder_parts.DTYPE
    return kernel


class Requests:
    """Layers with caches in which requests of some lengths are, and the tokens of a step.

    Args:
        lengths: tokens of each request, with those that come.
        block: tokens of a block.
        rows: tokens of each request that come.
        layers: how many.
        parts: more arguments of `decoder_parts.model`.

    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, lengths: list[int], *, block: int = 32,
        heads: int = 6, kv_heads: int = 2, impl: dict[str, Any] | None = None,
        rows: list[int] | None = None, layers: int = LAYERS, **parts: Any,
    ) -> None:  # fmt: skip
        torch.manual_seed(sum(lengths) + block)
        self.lengths = torch.tensor(lengths, dtype=torch.int32)
        self.rows = torch.tensor(rows or [1] * len(lengths), dtype=torch.int32)
        self.starts = torch.cat([torch.zeros(1, dtype=torch.int32), self.rows.cumsum(0).int()])
        request = torch.arange(len(lengths)).repeat_interleave(self.rows)
        self.tokens = len(request)
        self.positions = torch.cat(
            [torch.arange(length - count, length)
             for length, count in zip(lengths, self.rows.tolist(), strict=True)]
        )  # fmt: skip
        most = -(-max(lengths) // block)
        self.blocks = torch.randperm(len(lengths) * most).int().view(len(lengths), most)
        places = self.blocks.long()[request, self.positions // block]
        self.slots = places * block + self.positions % block
        self.shape = (self.blocks.numel(), kv_heads, block, 2 * HEAD)
        self.keys, self.values = torch.randn(
            2, layers, self.blocks.numel() * block, kv_heads, HEAD
        ).to(decoder_parts.DTYPE)
        # Some tokens count for much: a part that is lost, or weighted wrongly, would show.
        self.keys *= 2
        self.decoder = model(layers, heads=heads, kv_heads=kv_heads, **parts)
        self.trace = StepTrace()
        """Events of the last native step."""
        # Filled when a step begins.
        self.contexts: dict[str, Any] = {}
        given = {"alibi_slopes": None, "sliding_window": None, "kv_cache_dtype": "auto"}
        given |= impl or {}
        config = SimpleNamespace(model_config=SimpleNamespace(dtype=decoder_parts.DTYPE))
        monkeypatch.setattr(cpu_attn, "get_current_vllm_config", lambda: config)
        for layer in self.layers:
            attends(layer).impl = cpu_attn.CPUAttentionBackendImpl(
                heads, HEAD, 0.2, kv_heads, **given
            )
        for module in (attention_module, decoder_layers):
            monkeypatch.setattr(module, "get_attention_context", self.contexts.__getitem__)
        self.heads, self.kv_heads = heads, kv_heads

    @property
    def layers(self) -> list[Any]:
        return layers_of(self.decoder)

    def made(self, level: str = LEVELS[-1] if LEVELS else "") -> DecoderLayers:
        given = linears(self.decoder)
        kernel = kernel_of(level)
        return DecoderLayers(known_layers(self.decoder, given, kernel), kernel)

    def decoded(self, layers: DecoderLayers, hidden: Any, residual: Any) -> Any:
        """Results of the native step of layers for the step that has begun."""
        self.trace.clear()
        with followed(self.trace):
            found = layers(self.positions, hidden, residual)
        ((_, *tokens),) = self.trace.of(Event.LAYERS)
        return found if tokens == [self.tokens, 0, 0] else None

    def cache(self, layer: int, isa: str) -> Any:
        """What the requests have written before."""
        cache = torch.zeros(self.shape, dtype=decoder_parts.DTYPE)
        blocks, kv_heads, block, _ = self.shape
        keys, values = cache.view(blocks, kv_heads, 2 * block, HEAD).chunk(2, dim=2)
        if isa == "amx" and not HAS_TILES:
            by_block = [
                x.view(blocks, block, kv_heads, HEAD).transpose(1, 2)
                for x in (self.keys[layer], self.values[layer])
            ]
            keys.copy_(as_tiles(*by_block)[0].view_as(keys))
            values.copy_(as_tiles(*by_block)[1].view_as(values))
            return cache
        slots = torch.arange(blocks * block)
        ops.cpu_attn_reshape_and_cache(
            self.keys[layer], self.values[layer], keys, values, slots, isa
        )
        return cache

    def begin(self, isa: str, **metadata: Any) -> list[Any]:
        """Let vLLM's forward context be that of a step; gives the caches."""
        plan = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=len(self.lengths), num_heads=self.heads, num_kv_heads=self.kv_heads,
            head_dim=HEAD, seq_lens=self.lengths, dtype=decoder_parts.DTYPE,
            query_start_loc=self.starts, causal=True, sliding_window_size=-1, isa="vec",
            enable_kv_split=True,
        )  # fmt: skip
        described = {
            "num_actual_tokens": self.tokens, "max_query_len": int(self.rows.max()),
            "query_start_loc": self.starts,
            "max_seq_len": int(self.lengths.max()), "seq_lens": self.lengths,
            "block_table": self.blocks, "slot_mapping": self.slots, "scheduler_metadata": plan,
        } | metadata  # fmt: skip
        made = cpu_attn.CPUAttentionMetadata(**described)
        caches = [self.cache(number, isa) for number in range(len(self.keys))]
        for cache, layer in zip(caches, self.layers, strict=True):
            attention = attends(layer)
            attention.isa, attention._k_scale_float, attention._v_scale_float = isa, 1.0, 1.0
            self.contexts[attention.layer_name] = made, attention, cache, self.slots
        return caches

    def inputs(self, *, is_first: bool) -> tuple[Any, Any]:
        dtype = decoder_parts.DTYPE
        residual = None if is_first else torch.randn(self.tokens, HIDDEN).to(dtype)
        return torch.randn(self.tokens, HIDDEN).to(dtype), residual


def expect_the_same(
    requests: Requests, *, isa: str = "vec", is_first: bool = True,
    level: str = LEVELS[-1] if LEVELS else "", atol: float = CLOSE["atol"],
) -> None:  # fmt: skip
    layers, (hidden, residual) = requests.made(level), requests.inputs(is_first=is_first)
    theirs = requests.begin("vec")
    expected = layers.one_by_one(requests.positions, hidden, residual)
    ours = requests.begin(isa)
    kept = hidden.clone(), None if residual is None else residual.clone()
    found = requests.decoded(layers, hidden, residual)
    assert found is not None
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.float(), other.float(), rtol=CLOSE["rtol"], atol=atol)
    assert torch.equal(hidden, kept[0])
    assert residual is None or torch.equal(residual, kept[1])
    for mine, vllms in zip(ours, theirs, strict=True):
        torch.testing.assert_close(
            unpacked(mine, isa).float(), unpacked(vllms, "vec").float(), **CLOSE
        )


def as_tiles(keys: Any, values: Any) -> tuple[Any, Any]:
    """Keys and values [blocks, heads, tokens, size] as they lie in blocks for AMX."""
    blocks, heads, block, size = keys.shape
    keys = keys.reshape(blocks, heads, block // 16, 16, size // 2, 2).permute(0, 1, 2, 4, 3, 5)
    values = values.reshape(blocks, heads, block // 2, 2, size // 16, 16).permute(0, 1, 4, 2, 5, 3)
    return keys.contiguous(), values.contiguous()


def unpacked(cache: Any, isa: str) -> Any:
    """[keys or values, blocks, heads, tokens, size]."""
    blocks, heads, block, _ = cache.shape
    keys, values = cache.view(blocks, heads, 2, block * HEAD).unbind(2)
    if isa == "vec":
        keys = keys.view(blocks, heads, HEAD, block).transpose(2, 3)
        return torch.stack([keys, values.view(blocks, heads, block, HEAD)])
    keys = keys.view(blocks, heads, block // 16, HEAD // 2, 16, 2).permute(0, 1, 2, 4, 3, 5)
    values = values.view(blocks, heads, HEAD // 16, block // 2, 16, 2).permute(0, 1, 3, 5, 2, 4)
    return torch.stack([x.reshape(blocks, heads, block, HEAD) for x in (keys, values)])


LENGTHS = [[1], [33], [128, 129], [300, 1, 64, 512]]
LONG = [5, POSITIONS - 17]
"""The second is cut into parts of more than one chunk."""


@pytest.mark.parametrize("isa", ["vec", "amx"])
@pytest.mark.parametrize("block", [32, 128])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_a_step_is_what_layers_are_one_by_one(
    lengths: list[int], block: int, isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expect_the_same(Requests(monkeypatch, lengths, block=block), isa=isa)


@pytest.mark.parametrize("level", BETWEEN_PRODUCTS)
@pytest.mark.parametrize("isa", ["vec", "amx"])
@pytest.mark.parametrize("lengths", [[33], [300, 1, 64, 512, *range(120, 136)]], ids=str)
def test_so_it_is_at_each_level(
    lengths: list[int], isa: str, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expect_the_same(Requests(monkeypatch, lengths), isa=isa, level=level)


@pytest.mark.parametrize("isa", ["vec", "amx"])
def test_long_requests_are_too(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expect_the_same(Requests(monkeypatch, LONG, block=128), isa=isa)


@pytest.mark.parametrize("isa", ["vec", "amx"])
@pytest.mark.parametrize(
    "rows", [[4, 4], [1, 8], [2, 16, 1], [16, 16]], ids=lambda rows: "-".join(map(str, rows))
)
def test_requests_that_verify_drafts_have_several_tokens(
    rows: list[int], isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Drafts begin in one block and end in the next one.
    lengths = [130, 513, 40][: len(rows)]
    expect_the_same(Requests(monkeypatch, lengths, block=128, rows=rows), isa=isa)


TOGETHER = [1284, 60, 1100]
"""The first and the last are so long that their drafts are attended together, the last part of the
first one begins behind the first of its drafts."""


@pytest.mark.parametrize("level", BETWEEN_PRODUCTS)
@pytest.mark.parametrize("isa", ["vec", "amx"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (10, 1)])
def test_drafts_of_a_long_request_read_it_together(
    heads: int, kv_heads: int, isa: str, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = Requests(
        monkeypatch, TOGETHER, block=128, rows=[8, 2, 5], heads=heads, kv_heads=kv_heads
    )
    expect_the_same(requests, isa=isa, level=level)


@pytest.mark.parametrize("isa", ["vec", "amx"])
def test_what_is_not_written_is_not_read_together(
    isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = Requests(monkeypatch, TOGETHER[:1], block=128, rows=[4])
    layers, (hidden, residual) = requests.made(), requests.inputs(is_first=True)
    requests.begin(isa)
    expected = requests.decoded(layers, hidden, residual)
    kept = int(requests.slots[-1])
    requests.slots[-1] = -1
    for cache in requests.begin(isa):
        unwritten = cache[kept // 128].view(requests.kv_heads, 2, 128, HEAD)
        poisoned = torch.zeros(1, 128, requests.kv_heads, HEAD, dtype=torch.bool)
        poisoned[0, kept % 128] = True
        if isa == "vec":
            by_key = poisoned[0].permute(1, 2, 0).reshape(requests.kv_heads, 128, HEAD)
            by_value = poisoned[0].transpose(0, 1)
        else:
            by_key, by_value = (
                one.reshape(requests.kv_heads, 128, HEAD)
                for one in as_tiles(*[poisoned.transpose(1, 2)] * 2)
            )
        unwritten[:, 0][by_key] = torch.nan
        unwritten[:, 1][by_value] = torch.nan
    found = requests.decoded(layers, hidden, residual)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one[:3].float(), other[:3].float(), **CLOSE)


def expect_rows_apart(
    monkeypatch: pytest.MonkeyPatch, heads: tuple[int, int], isa: str, level: str, left: float
) -> None:
    """Check that a token which is not finite reaches no row but those that come behind it."""
    rows = [8, 2, 5]
    requests = Requests(
        monkeypatch, TOGETHER, block=128, rows=rows, heads=heads[0], kv_heads=heads[1]
    )
    layers, (hidden, residual) = requests.made(level), requests.inputs(is_first=True)
    requests.begin(isa)
    expected = requests.decoded(layers, hidden, residual)
    assert expected is not None
    begins, request = requests.starts.tolist(), torch.arange(3).repeat_interleave(requests.rows)
    # In the first token of a part, in one behind it, and in the last one.
    for bad in (begins[0] + 4, begins[0] + 5, begins[1], begins[2] + 1, begins[3] - 1):
        spoilt = hidden.clone()
        spoilt[bad] = left
        requests.begin(isa)
        found = requests.decoded(layers, spoilt, residual)
        assert found is not None
        at = torch.arange(requests.tokens)
        others = (request != request[bad]) | (at < bad)
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one[others], other[others])
        # Whoever attends to it learns that.
        assert not found[0][~others].isfinite().any()


@pytest.mark.parametrize("level", BETWEEN_PRODUCTS)
@pytest.mark.parametrize("isa", ["vec", "amx"])
@pytest.mark.parametrize("left", [float("nan"), float("inf")])
@pytest.mark.parametrize("heads", [(6, 2), (10, 1), (4, 4)], ids=str)
def test_a_token_that_is_not_finite_stays_with_those_behind_it(
    heads: tuple[int, int], left: float, isa: str, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expect_rows_apart(monkeypatch, heads, isa, level, left)


def with_a_block_of_another(requests: Requests) -> Requests:
    """The first request begins with the block that the last one fills in this step."""
    requests.blocks[0, 0] = requests.blocks[-1, 0]
    return requests


@pytest.mark.parametrize("level", BETWEEN_PRODUCTS)
@pytest.mark.parametrize("isa", ["vec", "amx"])
def test_what_another_request_writes_is_read(
    isa: str, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = with_a_block_of_another(Requests(monkeypatch, [40, 200, 32]))
    expect_the_same(requests, isa=isa, level=level)


@pytest.mark.parametrize("isa", ["vec", "amx"])
def test_who_writes_a_key_does_not_matter(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = Requests(monkeypatch, [40, 200, 1500, 32])
    layers, (hidden, residual) = requests.made(), requests.inputs(is_first=False)
    found, written = [], []
    for _ in range(2):
        written.append(requests.begin(isa))
        found.append(requests.decoded(layers, hidden, residual))
        # Now keys have to be written before anybody attends to them.
        with_a_block_of_another(requests)
    for apart, shared in zip(*found, strict=True):
        assert torch.equal(apart[1:], shared[1:])
        assert not torch.equal(apart[0], shared[0])
    # In the second layer that request has another key.
    assert torch.equal(written[0][0], written[1][0])


@pytest.mark.parametrize("isa", ["vec", "amx"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (10, 1), (4, 2), (8, 1), (20, 2)])
def test_heads_of_keys_may_have_any_number_of_heads_of_queries(
    heads: int, kv_heads: int, isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expect_the_same(Requests(monkeypatch, [200, 40], heads=heads, kv_heads=kv_heads), isa=isa)


@pytest.mark.parametrize("rotated", [HEAD, HEAD // 4])
@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - IN_PARTS))
def test_layers_of_other_models(family: str, rotated: int, monkeypatch: pytest.MonkeyPatch) -> None:
    is_first = family not in WITH_RESIDUAL
    kv_heads = 6 if family == "opt" else 2
    requests = Requests(monkeypatch, [200, 40], family=family, rotated=rotated, kv_heads=kv_heads)
    # Sums are as large as 8, where neighbours in bf16 are 2^-5 apart.
    expect_the_same(requests, is_first=is_first, atol=2**-3)


@pytest.mark.parametrize("level", BETWEEN_PRODUCTS)
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_attentions_in_front_of_experts(
    family: str, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = Requests(monkeypatch, [200, 40], family=family)
    hidden, residual = requests.inputs(is_first=False)
    layer, _ = known_layers(requests.decoder, linears(requests.decoder), kernel_of(level))
    layers = DecoderLayers([layer], kernel_of(level))
    requests.begin("vec")
    expected = layers.one_by_one(requests.positions, hidden, residual)
    requests.begin("vec")
    found = requests.decoded(layers, hidden, residual)
    assert found is not None
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.float(), other.float(), **CLOSE)


SCORES: dict[str, dict[str, Any]] = {
    "window": {"sliding_window": 20},
    "window of a token": {"sliding_window": 1},
    "window of spans": {"sliding_window": 64},
    "long window": {"sliding_window": 257},
    "soft cap": {"logits_soft_cap": 2.5},
    "both": {"sliding_window": 40, "logits_soft_cap": 5.0},
    "sinks": {"sinks": torch.linspace(-1, 4, 6)},
    "sinks and a window": {"sinks": torch.linspace(4, -1, 6), "sliding_window": 130},
}


@pytest.mark.parametrize("isa", ["vec", "amx"])
@pytest.mark.parametrize("scores", SCORES)
def test_attentions_with_windows_soft_caps_and_sinks(
    scores: str, isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expect_the_same(Requests(monkeypatch, [300, 1, 2000, 64], impl=SCORES[scores]), isa=isa)


@pytest.mark.parametrize("level", BETWEEN_PRODUCTS)
@pytest.mark.parametrize("scores", SCORES)
def test_so_they_are_at_each_level(
    scores: str, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expect_the_same(Requests(monkeypatch, [300, 40], impl=SCORES[scores]), level=level)


@pytest.mark.parametrize("isa", ["vec", "amx"])
def test_drafts_see_their_own_windows(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = Requests(monkeypatch, [130, 513], rows=[4, 8], impl={"sliding_window": 33})
    expect_the_same(requests, isa=isa)


def share(requests: Requests, layers: DecoderLayers, parts: int) -> None:
    """Have columns of the MLPs computed by the pretended GPU."""
    given, kernel = linears(requests.decoder), kernel_of(LEVELS[-1])
    known = known_layers(requests.decoder, given, kernel)
    gpu = OffloadGpu(torch.device("cpu"), 64)
    for linear in given.values():
        gpu.add(linear.weight)
    gpu.take()
    columns = columns_of(known, gpu, kernel)
    assert columns is not None
    shares = Shares((Share(1, parts),))
    layers.shared = SharedDecode(known, kernel, columns, shares)


@pytest.mark.parametrize("parts", [0, 8, 16])
def test_layers_with_blocks_of_their_own(parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload_gpu, "LEAST_BYTES", 1)
    monkeypatch.setattr(column_pieces, "LEAST_COLUMNS", 64)
    requests = Requests(monkeypatch, [300, 64, 90])
    attends(requests.layers[1]).impl.sliding_window = 50
    layers, (hidden, residual) = requests.made(), requests.inputs(is_first=False)
    if parts:
        share(requests, layers, parts)

    def begin() -> None:
        """The second layer has other blocks; those before its window are nobody's."""
        requests.begin("vec")
        first, own = (attends(layer).layer_name for layer in requests.layers)
        metadata, module, cache, _ = requests.contexts[own]
        blocks = requests.blocks.flip(1)
        at = requests.positions
        slots = blocks.long()[torch.arange(3), at // 32] * 32 + at % 32
        for row, length in enumerate(requests.lengths.tolist()):
            blocks[row, : (length - 50) // 32 if length > 50 else 0] = 0
        changed = dataclasses.replace(metadata, block_table=blocks, slot_mapping=slots)
        requests.contexts[own] = changed, module, cache, slots
        assert requests.contexts[first][0] is not changed

    begin()
    expected = layers.one_by_one(requests.positions, hidden, residual)
    begin()
    found = requests.decoded(layers, hidden, residual)
    assert found is not None
    if parts:
        assert requests.trace.of(Event.SHARE) == [(parts,)]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.float(), other.float(), **CLOSE)


def expect_the_same_by_any_threads(
    requests: Requests, layers: DecoderLayers, hidden: Any, residual: Any, *, isa: str = "vec"
) -> Any:
    """Check that a step gives the same bits whatever the number of threads; what it gives."""
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            requests.begin(isa)
            found.append(requests.decoded(layers, hidden, residual))
    finally:
        torch.set_num_threads(before)
    for one in found[1:]:
        assert all(map(torch.equal, found[0], one))
    return found[0]


@pytest.mark.parametrize("isa", ["vec", "amx"])
@pytest.mark.parametrize("rows", [[2, 1, 4], [1, 1, 1]], ids=["drafts", "apart"])
def test_the_result_does_not_depend_on_threads(
    rows: list[int], isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = Requests(monkeypatch, [300, *LONG], rows=rows)
    inputs = requests.inputs(is_first=False)
    expect_the_same_by_any_threads(requests, requests.made(), *inputs, isa=isa)


@pytest.mark.parametrize("level", BETWEEN_PRODUCTS)
@pytest.mark.parametrize("isa", ["vec", "amx"])
@pytest.mark.parametrize("lengths", [[1, 31, 33], [96, 130, 17, 2]], ids=str)
def test_what_others_have_left_in_a_block_does_not_matter(
    lengths: list[int], isa: str, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = Requests(monkeypatch, lengths)
    layers, (hidden, residual) = requests.made(level), requests.inputs(is_first=True)
    found = []
    for left in (0.0, float("nan"), float("inf")):
        # All but what the requests have written before.
        slots = torch.ones(requests.blocks.numel() * 32, dtype=torch.bool)
        for blocks, length in zip(requests.blocks, lengths, strict=True):
            at = torch.arange(length - 1)
            slots[blocks.long()[at // 32] * 32 + at % 32] = False
        requests.keys[:, slots], requests.values[:, slots] = left, left
        requests.begin(isa)
        found.append(requests.decoded(layers, hidden, residual))
        assert found[-1] is not None
        assert all(bool(one.isfinite().all()) for one in found[-1])
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lengths": [0, 41]}, "a length from 1 to 64, got 0 for request 0"),
        ({"lengths": [40, 65]}, "a length from 1 to 64, got 65 for request 1"),
        ({"slots": [3, 128]}, "a slot below 128, got 128 for request 1"),
        ({"blocks": [[0, 1], [2, 4]]}, "a block from 0 on, below 4, got 4 for request 1"),
        ({"blocks": [[-1, 1], [2, 3]]}, "a block from 0 on, below 4, got -1 for request 0"),
    ],
)
def test_what_is_not_in_the_cache_is_refused(change: dict[str, Any], message: str) -> None:
    given = {"lengths": [40, 41], "slots": [3, -1], "blocks": [[0, 1], [2, 3]]} | change
    lengths, blocks = (torch.tensor(given[name]).int() for name in ("lengths", "blocks"))
    slots, positions = torch.tensor(given["slots"]), torch.tensor([39, 40])
    with pytest.raises(ValueError, match=message):
        native.Requests(
            m=2, positions=positions.data_ptr(), slots=slots.data_ptr(),
            lengths=lengths.data_ptr(), blocks=blocks.data_ptr(), most_blocks=2, block=32,
            cache_blocks=4, tiles=False,
        )  # fmt: skip


def test_a_block_that_is_not_needed_may_be_any() -> None:
    lengths, blocks = torch.tensor([32]).int(), torch.tensor([[0, -1]]).int()
    one = torch.zeros(1).long()
    assert native.Requests(
        m=1, positions=one.data_ptr(), slots=one.data_ptr(), lengths=lengths.data_ptr(),
        blocks=blocks.data_ptr(), most_blocks=2, block=32, cache_blocks=1, tiles=False,
    )  # fmt: skip


def test_a_position_that_no_angle_is_known_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = Requests(monkeypatch, [40])
    layers, (hidden, residual) = requests.made(), requests.inputs(is_first=True)
    requests.begin("vec")
    with pytest.raises(ValueError, match=f"below {POSITIONS}, got {POSITIONS} for request 0"):
        layers(torch.tensor([POSITIONS]), hidden, residual)


def test_a_token_without_a_place_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = Requests(monkeypatch, [40, 41])
    requests.slots[1] = -1
    layers, (hidden, residual) = requests.made(), requests.inputs(is_first=True)
    caches, before = requests.begin("vec"), [requests.cache(i, "vec") for i in range(LAYERS)]
    assert requests.decoded(layers, hidden, residual) is not None
    for cache, untouched in zip(caches, before, strict=True):
        changed = (unpacked(cache, "vec") != unpacked(untouched, "vec")).any(-1).any(2)
        block, token = divmod(int(requests.slots[0]), 32)
        assert changed.nonzero().tolist() == [[part, block, token] for part in (0, 1)]


@pytest.mark.parametrize(
    ("change", "instead"),
    [
        ({"max_query_len": 17}, None),
        ({"num_actual_tokens": 1}, Reason.UNKNOWN_ATTENTION),
        ({"dynamic_causal": torch.ones(2)}, Reason.UNKNOWN_ATTENTION),
        ({"seq_lens": torch.tensor([40, 41])}, Reason.UNKNOWN_ATTENTION),
        ({"causal": False}, Reason.UNKNOWN_ATTENTION),
    ],
    ids=lambda change: next(iter(change or {"": ""})) if isinstance(change, dict) else "",
)
def test_another_step_is_computedone_by_one(
    change: dict[str, Any], instead: Reason | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = Requests(monkeypatch, [40, 41])
    layers, (hidden, residual) = requests.made(), requests.inputs(is_first=True)
    requests.begin("vec", **change)
    monkeypatch.setattr(layers, "one_by_one", lambda *given: given)
    layer_tokens.take()
    layers(requests.positions, hidden, residual)
    counted = LayerTokens(by_operators=2 * LAYERS, instead=instead)
    assert layer_tokens.take() == counted


def test_a_dummy_run_and_more_tokens_than_a_step_are_too(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = Requests(monkeypatch, [40] * (native.STEP_TOKENS + 1))
    layers, (hidden, residual) = requests.made(), requests.inputs(is_first=True)
    requests.begin("vec")
    monkeypatch.setattr(layers, "one_by_one", lambda *given: given)
    layer_tokens.take()
    layers(requests.positions, hidden, residual)
    assert layer_tokens.take() == LayerTokens(by_operators=(native.STEP_TOKENS + 1) * LAYERS)
    for name, (_, attention, cache, _) in requests.contexts.items():
        requests.contexts[name] = None, attention, cache, None
    layers(requests.positions[:1], hidden[:1], residual)
    assert layer_tokens.take().by_operators == LAYERS


@pytest.mark.parametrize(
    "impl",
    [
        {"alibi_slopes": [0.5] * 6}, {"kv_cache_dtype": "fp8"},
    ],
    ids=lambda impl: next(iter(impl)),
)  # fmt: skip
def test_an_attention_that_does_more_is_vllms(
    impl: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Requests(monkeypatch, [40], impl=impl).made().decode_step is None


def test_shapes_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = Requests(monkeypatch, [40])
    layers = requests.made()
    first = layers._input.native
    attention, block = layers._layers[0]
    scores = native.Scores(scale=1.0, window=None, soft_cap=0.0, sinks=0)
    with pytest.raises(ValueError, match="each but the last with the next one"):
        native.DecoderLayers(first=first, layers=[(attention.rotation, scores, block.native)])
    with pytest.raises(ValueError, match="at least one layer"):
        native.DecoderLayers(first=first, layers=[])
    some = SimpleNamespace(m=1, positions=0, slots=0, lengths=0, blocks=0, most_blocks=1, block=32,
                           cache_blocks=1, tiles=False)  # fmt: skip
    for change, message in (({"m": 129}, "1 to 128 requests"), ({"block": 16}, "multiples of 32")):
        with pytest.raises(ValueError, match=message):
            native.Requests(**(vars(some) | change))


def test_strides_in_which_things_overlap_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = Requests(monkeypatch, [40, 41])
    layers, (hidden, residual) = requests.made(), requests.inputs(is_first=True)
    attention = layers._layers[0][0]
    heads = (requests.heads + requests.kv_heads) * HEAD
    with pytest.raises(ValueError, match=f"a stride of at least {heads} elements, got {HEAD}"):
        attention.rotation.run(
            hidden.data_ptr(), HEAD, requests.positions.data_ptr(), 2, native.levels()[-1]
        )
    of_head = 2 * 32 * HEAD
    for strides in ((of_head - 1, of_head), (of_head, of_head - 1)):
        with monkeypatch.context() as patched:
            patched.setattr(decode_step, "address_of", lambda cache, number, by=strides: (
                cache.data_ptr(), *by, number
            ))  # fmt: skip
            requests.begin("vec")
            with pytest.raises(ValueError, match=f"strides of a cache of at least {of_head}"):
                requests.decoded(layers, hidden, residual)  # type: ignore[misc]

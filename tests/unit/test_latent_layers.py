"""A layer with multi-head latent attention in one native call gives what vLLM's own layer does, and
what a reference in float32 does, whose attention makes keys and values of all heads."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from decoder_parts import Product, bare, class_of, linears, mlp, parameter, rms_norm  # noqa: E402
from native_module import BETWEEN_PRODUCTS, LEVELS, level_of, native, needs_native  # noqa: E402
from vllm.model_executor.layers.attention import MLAAttention  # noqa: E402
from vllm.model_executor.layers.attention.mla_attention import (  # noqa: E402
    MLACommonDecodeMetadata,
    MLACommonMetadata,
    MLACommonPrefillMetadata,
)
from vllm.model_executor.layers.mla import MultiHeadLatentAttentionWrapper  # noqa: E402
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding  # noqa: E402
from vllm.model_executor.layers.rotary_embedding.deepseek_scaling_rope import (  # noqa: E402
    DeepseekScalingRotaryEmbedding,
)
from vllm.platforms import current_platform  # noqa: E402
from vllm.v1.attention.backends.mla.amx_mla import AMXMLAImpl  # noqa: E402
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl  # noqa: E402

from ray_hetero.kernels import latent_fusion, latent_layers, layer_fusion, layer_tokens  # noqa: E402
from ray_hetero.kernels.latent_layers import LatentLayer  # noqa: E402
from ray_hetero.kernels.streaming_linear import StreamingLinear  # noqa: E402
from ray_hetero.weight_formats.base import pack  # noqa: E402

current_platform.import_kernels()
pytestmark = needs_native

HIDDEN = 256
LATENT, ROTATED, PLAIN, VALUE = 512, 64, 64, 32
"""Those of a token in the cache are what vLLM's kernels for CPUs know."""
POSITIONS = 4096
EPSILON = 1e-6
CLOSE = {"rtol": 2**-5, "atol": 2**-4}
BEST = LEVELS[-1] if LEVELS else ""


def rotary() -> Any:
    """A rotation of neighbours, with scaled cosines and sines."""
    made = bare(
        DeepseekScalingRotaryEmbedding, head_size=ROTATED, rotary_dim=ROTATED,
        max_position_embeddings=POSITIONS // 4, base=10000.0, is_neox_style=False,
        scaling_factor=4, beta_fast=32, beta_slow=1, mscale=1.2, use_flashinfer=False,
    )  # fmt: skip
    made.register_buffer("cos_sin_cache", made._compute_cos_sin_cache().bfloat16())
    return made


def attend(heads: int, halves: tuple[Any, Any], *, has_tiles: bool) -> Any:
    """vLLM's attention, whose weights are loaded.

    Args:
        heads: of it.
        halves: [heads, plain, latent] and [heads, values, latent].
        has_tiles: whether it is that of vLLM's backend for AMX.

    """
    keys, values = halves
    impl = bare_impl(
        AMXMLAImpl if has_tiles else CPUMLAImpl, num_heads=heads, head_size=LATENT + ROTATED,
        scale=0.1, kv_lora_rank=LATENT, qk_nope_head_dim=PLAIN, qk_rope_head_dim=ROTATED,
        v_head_dim=VALUE, dcp_world_size=1, is_sparse=False, kv_cache_dtype="auto",
    )  # fmt: skip
    made = bare(
        MLAAttention, impl=impl, num_heads=heads, head_size=LATENT + ROTATED,
        layer_name="layers.0", kv_lora_rank=LATENT, qk_nope_head_dim=PLAIN,
        qk_rope_head_dim=ROTATED, v_head_dim=VALUE, kv_cache_dtype="auto", use_pcp=False,
        q_pad_num_heads=None, non_causal_multi_token_decode=False, sliding_window=None,
        is_aiter_triton_fp4_bmm_enabled=False, is_aiter_triton_fp8_bmm_enabled=False,
        is_amx_bmm_enabled=has_tiles, hisparse_cache=None, dcp_manager=None,
    )  # fmt: skip
    if has_tiles:
        packed = (pack(one.reshape(-1, one.shape[2])) for one in (keys.transpose(1, 2), values))
        impl._w_uk_packed = next(packed).view(heads, LATENT, PLAIN)
        impl._w_uv_packed = next(packed).view(heads, VALUE, LATENT)
        impl._w_scale = None
    else:
        made.W_UK_T, made.W_UV = keys, values.transpose(1, 2)
    return made


def bare_impl(cls: Any, **parts: Any) -> Any:
    made = cls.__new__(cls)
    for key, value in parts.items():
        setattr(made, key, value)
    return made


def decoder(
    heads: int, *, query_latent: int | None, has_tiles: bool = False, **parts: Any
) -> tuple[Any, Any]:
    """A model of one layer of vLLM's classes, and the weight of `kv_b_proj`."""
    kv_b = torch.randn(heads, PLAIN + VALUE, LATENT).mul_(LATENT**-0.5).bfloat16()
    if query_latent is None:
        parts |= {
            "fused_qkv_a_proj": None, "q_a_layernorm": None, "q_b_proj": None,
            "kv_a_proj_with_mqa": Product(LATENT + ROTATED, HIDDEN),
            "q_proj": Product(heads * (PLAIN + ROTATED), HIDDEN),
        }  # fmt: skip
    else:
        parts |= {
            "fused_qkv_a_proj": Product(query_latent + LATENT + ROTATED, HIDDEN),
            "q_a_layernorm": rms_norm(query_latent),
            "q_b_proj": Product(heads * (PLAIN + ROTATED), query_latent),
            "kv_a_proj_with_mqa": None, "q_proj": None,
        }  # fmt: skip
    own = {"indexer": None, "is_sparse": False, "g_proj": None, "dcp_q_replicate": False}
    wrapper = bare(
        MultiHeadLatentAttentionWrapper, num_heads=heads, q_lora_rank=query_latent,
        kv_lora_rank=LATENT, qk_rope_head_dim=ROTATED, qk_nope_head_dim=PLAIN,
        qk_head_dim=PLAIN + ROTATED, v_head_dim=VALUE, fuse_qkv_rmsnorm=False, skip_topk=False,
        kv_a_layernorm=rms_norm(LATENT), rotary_emb=rotary(),
        o_proj=Product(HIDDEN, heads * VALUE),
        mla_attn=attend(heads, (kv_b[:, :PLAIN], kv_b[:, PLAIN:]), has_tiles=has_tiles),
        **(own | parts),
    )  # fmt: skip
    layer = bare(
        class_of("DeepseekV2DecoderLayer"), use_mha=False, use_sequence_parallel_moe=False,
        routed_scaling_factor=1.0, layer_idx=0,
        self_attn=bare(class_of("DeepseekV2MLAAttention"), mla_attn=wrapper),
        mlp=mlp("LlamaMLP"), input_layernorm=rms_norm(HIDDEN),
        post_attention_layernorm=rms_norm(HIDDEN),
    )  # fmt: skip
    model = bare(
        class_of("DeepseekV2Model"), config=SimpleNamespace(), start_layer=0, end_layer=1,
        layers=torch.nn.ModuleList([layer]),
    )  # fmt: skip
    return model, kv_b


class Step:
    """A layer with a cache in which requests of some lengths are, and the tokens of a step.

    Args:
        lengths: tokens of each request, with those that come.
        block: tokens of a block.
        rows: tokens of each request that come; one of each if nothing says it.
        heads: of the attention.
        parts: more arguments of `decoder`.

    """

    def __init__(
        self, lengths: list[int], *, block: int = 128, rows: list[int] | None = None,
        heads: int = 4, query_latent: int | None = 96, **parts: Any,
    ) -> None:  # fmt: skip
        torch.manual_seed(sum(lengths) + block)
        rows = rows or [1] * len(lengths)
        self.model, self.kv_b = decoder(heads, query_latent=query_latent, **parts)
        self.layer = self.model.layers[0]
        self.wrapper = self.layer.self_attn.mla_attn
        self.heads = heads
        self.lengths = torch.tensor(lengths, dtype=torch.int32)
        request = torch.arange(len(lengths)).repeat_interleave(torch.tensor(rows))
        self.tokens = len(request)
        self.positions = torch.cat(
            [torch.arange(n - count, n) for n, count in zip(lengths, rows, strict=True)]
        )
        most = -(-max(lengths) // block)
        self.blocks = torch.randperm(len(lengths) * most).int().view(len(lengths), most)
        places = self.blocks.long()[request, self.positions // block]
        self.slots = places * block + self.positions % block
        self.request = request
        self.cache = torch.randn(self.blocks.numel(), block, LATENT + ROTATED).bfloat16()
        # Some tokens count for much: a part that is lost, or weighted wrongly, would show.
        self.cache[..., LATENT:] *= 2
        used = torch.zeros(self.blocks.numel() * block, dtype=torch.bool)
        for number, length in enumerate(lengths):
            at = torch.arange(length)
            used[self.blocks.long()[number, at // block] * block + at % block] = True
        # What no request has written may be anything.
        self.cache.view(-1, LATENT + ROTATED)[~used] = torch.nan
        starts = torch.tensor([0, *torch.tensor(rows).cumsum(0).tolist()], dtype=torch.int32)
        decodes = 0
        while decodes < len(rows) and rows[decodes] == 1:
            decodes += 1
        first = int(starts[decodes])
        self.metadata = MLACommonMetadata(
            num_reqs=len(lengths), max_query_len=max(rows), max_seq_len=max(lengths),
            num_actual_tokens=self.tokens, query_start_loc=starts, slot_mapping=self.slots,
            num_decodes=decodes, num_decode_tokens=first, num_prefills=len(rows) - decodes,
            decode=MLACommonDecodeMetadata(
                self.blocks[:decodes], self.lengths[:decodes], None
            ) if decodes else None,
            prefill=MLACommonPrefillMetadata(
                self.blocks[decodes:], starts[decodes:] - first, max(rows)
            ) if decodes < len(rows) else None,
        )  # fmt: skip
        self.hidden = torch.randn(self.tokens, HIDDEN).bfloat16()
        self.residual = torch.randn(self.tokens, HIDDEN).bfloat16()

    @property
    def context(self) -> Any:
        """What vLLM's forward context gives."""
        return self.metadata, self.wrapper.mla_attn, self.cache, self.slots

    def made(self, level: str = BEST) -> LatentLayer:
        kernel = StreamingLinear(native, level_of(level))
        found = latent_fusion.latent_layer_of(self.model, self.layer, linears(self.model), kernel)
        assert isinstance(found, tuple), found
        assert found[1] is self.layer.mlp
        return found[0]

    def reference(self, residual: Any) -> tuple[Any, Any, Any]:
        """What the perceptron is given, the residual, and what the tokens add to the cache.

        In float32 from the products on, with keys and values of all heads.
        """
        total = self.hidden.float() if residual is None else self.hidden.float() + residual.float()
        wrapper = self.wrapper
        x = normed(total, self.layer.input_layernorm)
        if wrapper.q_lora_rank is None:
            latents, queries = times(wrapper.kv_a_proj_with_mqa, x), times(wrapper.q_proj, x)
        else:
            down = times(wrapper.fused_qkv_a_proj, x)
            queries = times(
                wrapper.q_b_proj,
                normed(down[:, : wrapper.q_lora_rank], wrapper.q_a_layernorm),
            )
            latents = down[:, wrapper.q_lora_rank :]
        queries = queries.view(self.tokens, self.heads, PLAIN + ROTATED)
        new = torch.cat(
            [normed(latents[:, :LATENT], wrapper.kv_a_layernorm),
             self.turned(latents[:, None, LATENT:])[:, 0]], dim=1,
        )  # fmt: skip
        queries = torch.cat([queries[..., :PLAIN], self.turned(queries[..., PLAIN:])], dim=-1)
        written = self.cache.float().view(-1, LATENT + ROTATED).clone()
        written[self.slots] = new
        block = self.cache.shape[1]
        values = torch.empty(self.tokens, self.heads, VALUE)
        for token in range(self.tokens):
            at = torch.arange(int(self.positions[token]) + 1)
            of = self.blocks.long()[self.request[token]]
            seen = written[of[at // block] * block + at % block]
            of_heads = torch.einsum("tl,hol->hto", seen[:, :LATENT], self.kv_b.float())
            keys = torch.cat(
                [of_heads[..., :PLAIN],
                 seen[:, LATENT:].expand(self.heads, -1, -1)], dim=-1,
            )  # fmt: skip
            scores = torch.einsum("htd,hd->ht", keys, queries[token]) * 0.1
            values[token] = torch.einsum("ht,htv->hv", scores.softmax(-1), of_heads[..., PLAIN:])
        total = total + times(wrapper.o_proj, values.view(self.tokens, -1))
        return normed(total, self.layer.post_attention_layernorm), total, new

    def turned(self, x: Any) -> Any:
        """[tokens, heads, rotated] by positions; neighbours turn together."""
        cos, sin = self.wrapper.rotary_emb.cos_sin_cache[self.positions].float().chunk(2, dim=-1)
        cos, sin = cos[:, None], sin[:, None]
        left, right = x[..., ::2], x[..., 1::2]
        pairs = torch.stack([left * cos - right * sin, right * cos + left * sin], dim=-1)
        return pairs.flatten(-2)


def times(product: Product, x: Any) -> Any:
    return x @ product.matrix.float().T


def normed(x: Any, norm: Any) -> Any:
    return torch.nn.functional.rms_norm(
        x, x.shape[-1:], norm.weight.data.float(), norm.variance_epsilon
    )


@pytest.fixture(autouse=True)
def contexts(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What vLLM's forward context gives, by name of a layer."""
    found: dict[str, Any] = {}
    monkeypatch.setattr(latent_layers, "get_attention_context", found.__getitem__)
    latent_layers._step.clear()
    before = len(latent_layers._layers)
    yield found
    del latent_layers._layers[before:]


def expect_the_reference(
    step: Step, contexts: dict[str, Any], *, level: str = BEST, is_first: bool = False
) -> None:
    residual = None if is_first else step.residual
    expected, total, new = step.reference(residual)
    before = step.cache.clone()
    contexts["layers.0"] = step.context
    kept = step.hidden.clone(), step.residual.clone()
    layer = step.made(level)
    layer_tokens.take()
    found = layer(step.positions, step.hidden, residual)
    assert layer_tokens.take().native == step.tokens
    torch.testing.assert_close(found[0].float(), expected, rtol=2**-4, atol=2**-4)
    torch.testing.assert_close(found[1].float(), total, **CLOSE)
    apart = (found[0].float() - expected).norm() / expected.norm()
    assert float(apart) < 2**-6
    assert torch.equal(step.hidden, kept[0])
    assert torch.equal(step.residual, kept[1])
    cached, others = (one.view(-1, LATENT + ROTATED).clone() for one in (step.cache, before))
    torch.testing.assert_close(cached[step.slots].float(), new, **CLOSE)
    cached[step.slots] = others[step.slots]
    assert torch.equal(cached.nan_to_num(), others.nan_to_num())


LENGTHS = [[1], [17], [128, 129], [300, 1, 64, 512]]


@pytest.mark.parametrize("level", BETWEEN_PRODUCTS)
@pytest.mark.parametrize("query_latent", [96, None])
@pytest.mark.parametrize("lengths", [[33], [300, 1, 64, 512, *range(120, 126)]], ids=str)
def test_a_layer_is_the_reference_at_each_level(
    lengths: list[int], query_latent: int | None, level: str, contexts: dict[str, Any]
) -> None:
    expect_the_reference(Step(lengths, query_latent=query_latent), contexts, level=level)


@pytest.mark.parametrize("block", [16, 32, 128])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_it_is_with_blocks_of_any_size(
    lengths: list[int], block: int, contexts: dict[str, Any]
) -> None:
    expect_the_reference(Step(lengths, block=block), contexts, is_first=True)


@pytest.mark.parametrize("level", BETWEEN_PRODUCTS)
@pytest.mark.parametrize("heads", [1, 16, 20, 40])
def test_it_is_with_any_number_of_heads(heads: int, level: str, contexts: dict[str, Any]) -> None:
    expect_the_reference(Step([200, 40], heads=heads), contexts, level=level)


@pytest.mark.parametrize("level", BETWEEN_PRODUCTS)
def test_long_requests_are_cut_into_parts(level: str, contexts: dict[str, Any]) -> None:
    expect_the_reference(Step([5, POSITIONS - 17]), contexts, level=level)


@pytest.mark.parametrize("tokens", [33, 70, 128])
def test_steps_may_have_many_tokens(tokens: int, contexts: dict[str, Any]) -> None:
    expect_the_reference(Step([20 + 3 * number for number in range(tokens)]), contexts)


@pytest.mark.parametrize("level", BETWEEN_PRODUCTS)
@pytest.mark.parametrize(
    ("lengths", "rows"),
    [([130, 40], [4, 4]), ([60, 1284, 1100], [1, 8, 5]), ([40, 16, 16], [1, 16, 3])],
    ids=["short", "together", "beside short prompts"],
)
def test_requests_may_have_several_tokens(
    lengths: list[int], rows: list[int], level: str, contexts: dict[str, Any]
) -> None:
    expect_the_reference(Step(lengths, rows=rows), contexts, level=level)


@pytest.mark.skipif("amx" not in LEVELS, reason="needs AMX for vLLM's own kernels")
@pytest.mark.parametrize("has_tiles", [True, False], ids=["AMX_MLA", "CPU_MLA"])
@pytest.mark.parametrize("heads", [4, 32])
def test_it_is_what_vllms_own_layer_does(
    heads: int, has_tiles: bool, contexts: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    block = 128 if has_tiles else 16
    step = Step([300, 33, 512, 64], heads=heads, has_tiles=has_tiles, block=block)
    step.cache = step.cache.nan_to_num()
    contexts["layers.0"] = step.context
    attention = step.wrapper.mla_attn
    theirs = step.cache.clone()
    if has_tiles:
        offsets = torch.arange(block, dtype=torch.int32)
        rows = step.blocks.unsqueeze(-1) * block + offsets
        decode = step.metadata.decode
        decode.req_to_token = rows.reshape(len(rows), -1).contiguous()
        decode.seq_lens_i64 = step.lengths.long()
        decode.req_pool_indices = torch.arange(len(rows))
        decode.num_kv_splits = 1

    def attended(q: Any, latents: Any, rotated: Any, **_: Any) -> Any:
        attention.impl.do_kv_cache_update(latents, rotated, theirs, step.slots, "auto", None)
        output = q.new_empty(len(q), heads * VALUE)
        return attention.forward_impl(q, latents, rotated, theirs, step.metadata, output=output)

    monkeypatch.setattr(attention, "forward", attended)
    expected, total = step.layer(step.positions, step.hidden.clone(), step.residual.clone())
    layer = step.made()
    given, found = layer(step.positions, step.hidden, step.residual)
    torch.testing.assert_close(found.float(), total.float(), **CLOSE)
    torch.testing.assert_close(
        step.layer.mlp(given).float(), expected.float(), rtol=2**-4, atol=2**-4
    )
    torch.testing.assert_close(step.cache.float(), theirs.float(), **CLOSE)


def test_the_same_bits_come_of_any_number_of_threads(contexts: dict[str, Any]) -> None:
    step = Step([1200, 40, 300], heads=20)
    contexts["layers.0"] = step.context
    layer, found = step.made(), []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(layer(step.positions, step.hidden, step.residual))
    finally:
        torch.set_num_threads(before)
    for one in found[1:]:
        assert all(map(torch.equal, one, found[0]))


def test_a_token_without_a_slot_is_not_cached(contexts: dict[str, Any]) -> None:
    step = Step([40, 50])
    before = step.cache.clone()
    step.slots[1] = -1
    contexts["layers.0"] = step.context
    step.made()(step.positions, step.hidden, step.residual)
    changed = (step.cache != before) & ~(step.cache.isnan() & before.isnan())
    rows = changed.view(-1, LATENT + ROTATED).any(1).nonzero().flatten()
    assert rows.tolist() == [int(step.slots[0])]


def test_other_steps_are_vllms(contexts: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step([40, 30], rows=[1, 17])
    step.cache = step.cache.nan_to_num()
    contexts["layers.0"] = step.context
    seen = []

    def attended(positions: Any, hidden: Any, scaling: Any) -> Any:
        seen.append((positions, scaling))
        return hidden * 0.5

    monkeypatch.setattr(step.layer.self_attn, "forward", attended)
    expected = step.layer(step.positions, step.hidden.clone(), step.residual.clone())
    layer = step.made()
    layer_tokens.take()
    kept = step.hidden.clone(), step.residual.clone()
    given, total = layer(step.positions, step.hidden, step.residual)
    assert layer_tokens.take().by_operators == 18
    assert len(seen) == 2
    found = step.layer.mlp(given), total
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.float(), other.float(), **CLOSE)
    assert torch.equal(step.hidden, kept[0])
    assert torch.equal(step.residual, kept[1])
    contexts["layers.0"] = None, *step.context[1:]
    first, total = layer(step.positions, step.hidden, None)
    assert torch.equal(step.hidden, kept[0])
    assert first.shape == total.shape


def test_layers_of_a_model_become_operators(contexts: dict[str, Any]) -> None:
    step = Step([40, 50])
    contexts["layers.0"] = step.context
    expected = step.made()(step.positions, step.hidden, step.residual)
    kernel = StreamingLinear(native)
    model = torch.nn.Sequential(step.model)
    assert layer_fusion.fuse(model, linears(step.model), kernel) == 1
    (one,) = step.model.layers
    assert type(one).__name__ == "LatentAttentionRun"
    assert one.mlp is step.layer.mlp
    hidden, total = one(step.positions, step.hidden, step.residual, None)
    assert torch.equal(total, expected[1])
    assert torch.equal(hidden, step.layer.mlp(expected[0]))


WRONG: dict[str, tuple[str, Any]] = {
    "it is sparse": ("sparse", lambda step: setattr(step.wrapper, "is_sparse", True)),
    "it has a gate": ("gate", lambda step: setattr(step.wrapper, "g_proj", rms_norm(32))),
    "other latents": (
        "fp8", lambda step: setattr(step.wrapper.mla_attn, "kv_cache_dtype", "fp8")
    ),
    "quantised heads": (
        "kv_b_proj",
        lambda step: setattr(
            step.wrapper.mla_attn, "W_UK_T",
            step.wrapper.mla_attn.W_UK_T.to(torch.float8_e4m3fn),
        ),
    ),
    "another backend": (
        "another one", lambda step: setattr(step.wrapper.mla_attn, "impl", SimpleNamespace())
    ),
    "tensor-parallel ranks": (
        "tensor-parallel", lambda step: setattr(step.wrapper.o_proj, "tp_size", 2)
    ),
    "another norm": (
        "norm", lambda step: setattr(step.layer, "input_layernorm", parameter_norm())
    ),
    "an operator that turns wrongly": ("all heads", lambda step: turn_wrongly(step.wrapper)),
    "a drafter": ("drafter", lambda step: setattr(step.model, "aux_hidden_state_layers", (1,))),
}  # fmt: skip


def turn_wrongly(wrapper: Any) -> None:
    other = bare(
        RotaryEmbedding, head_size=ROTATED, rotary_dim=ROTATED, is_neox_style=False
    )  # fmt: skip
    other.register_buffer("cos_sin_cache", wrapper.rotary_emb.cos_sin_cache)
    other._forward_method = other.forward_cpu
    wrapper.rotary_emb = other


@pytest.mark.skipif(not hasattr(torch.ops._C, "rotary_embedding"), reason="needs vLLM's operator")
def test_vllms_operator_does_not_turn_all_heads() -> None:
    step = Step([40, 50])
    turn_wrongly(step.wrapper)
    queries = torch.randn(step.tokens, 4, ROTATED).bfloat16()
    expected = step.turned(queries.float())
    keys = torch.randn(step.tokens, 1, ROTATED).bfloat16()
    found, _ = step.wrapper.rotary_emb._forward_method(step.positions, queries.clone(), keys)
    # When this is no longer so, such layers need not be left to vLLM.
    assert not torch.allclose(found.float(), expected, **CLOSE)


def parameter_norm() -> Any:
    made = torch.nn.Module()
    made.weight = parameter(torch.ones(HIDDEN))
    return made


@pytest.mark.parametrize("name", WRONG)
def test_what_is_not_known_is_left_to_vllm_with_a_line(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    step = Step([40])
    why, change = WRONG[name]
    change(step)
    layer = step.layer
    with caplog.at_level("INFO"):
        fused = layer_fusion.fuse(
            torch.nn.Sequential(step.model), linears(step.model), StreamingLinear(native)
        )
    assert fused == 0
    assert list(step.model.layers) == [layer]
    (line,) = [one.message for one in caplog.records if "operator by operator" in one.message]
    assert "DeepseekV2DecoderLayer" in line
    assert why in line


def test_requests_and_layers_that_do_not_fit_are_refused() -> None:
    step = Step([40])
    parts = step.made().parts
    with pytest.raises(ValueError, match="fit together"):
        native.LatentLayer(**described(parts) | {"shape": (5, LATENT, ROTATED, PLAIN, VALUE)})
    with pytest.raises(ValueError, match="multiples of 32"):
        native.LatentLayer(**described(parts) | {"shape": (4, 500, ROTATED, PLAIN, VALUE)})
    layer = step.made()
    positions = torch.tensor([POSITIONS])
    requests = native.Requests(
        m=1, positions=positions.data_ptr(), slots=step.slots.data_ptr(),
        lengths=step.lengths.data_ptr(), blocks=step.blocks.data_ptr(),
        most_blocks=step.blocks.stride(0), block=128, cache_blocks=len(step.cache),
        tiles=False, are_latents=True,
    )  # fmt: skip
    given = {
        "requests": requests, "cache": (step.cache.data_ptr(), step.cache.stride(0), 576),
        "hidden": step.hidden.data_ptr(), "residual": 0, "y": step.hidden.data_ptr(),
        "sum": step.hidden.data_ptr(), "level": level_of(BEST),
    }  # fmt: skip
    with pytest.raises(ValueError, match="a position"):
        layer._native.run(**given)


def described(parts: Any) -> dict[str, Any]:
    """What the native module is given for a layer."""
    given: dict[str, Any] = {}

    class Taken:
        Rotation = staticmethod(native.Rotation)
        PostAttention = staticmethod(native.PostAttention)

        @staticmethod
        def LatentLayer(**those: Any) -> None:  # noqa: N802
            given.update(those)

    parts.native(Taken)
    return given

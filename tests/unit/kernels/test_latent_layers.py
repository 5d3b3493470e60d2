"""A layer with multi-head latent attention in one native call gives what vLLM's own layer does, and
what a reference in float32 does, whose attention makes keys and values of all heads."""

from __future__ import annotations

import copy
import socket
import time
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

import torch.distributed as dist  # noqa: E402
from decoder_parts import Product, bare, class_of, fuse_model, linears, mlp, parameter, rms_norm  # noqa: E402
from group_steps import Threads, sums_of  # noqa: E402
from native_module import (  # noqa: E402
    BETWEEN_PRODUCTS,
    LEVELS,
    TESTED,
    level_of,
    native,
    needs_native,
)
from vllm.model_executor.layers.attention import MLAAttention  # noqa: E402
from vllm.model_executor.layers.attention.mla_attention import (  # noqa: E402
    MLACommonDecodeMetadata,
    MLACommonMetadata,
    MLACommonPrefillMetadata,
)
from vllm.model_executor.layers.mla import MultiHeadLatentAttentionWrapper  # noqa: E402
from vllm.model_executor.layers.quantization.fp8 import Fp8LinearMethod  # noqa: E402
from vllm.model_executor.layers.quantization.utils.quant_utils import (  # noqa: E402
    get_and_maybe_dequant_weights,
)
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding  # noqa: E402
from vllm.model_executor.layers.rotary_embedding.deepseek_scaling_rope import (  # noqa: E402
    DeepseekScalingRotaryEmbedding,
)
from vllm.platforms import current_platform  # noqa: E402
from vllm.v1.attention.backends.mla.amx_mla import AMXMLAImpl  # noqa: E402
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl  # noqa: E402

from ray_hetero.compat.models import latent_attention  # noqa: E402
from ray_hetero.errors import UnsupportedError  # noqa: E402
from ray_hetero.kernels.formats.base import pack  # noqa: E402
from ray_hetero.kernels.formats.fp8 import Fp8Weight  # noqa: E402
from ray_hetero.kernels.layers import latent_heads, latent_layers, layer_tokens  # noqa: E402
from ray_hetero.kernels.layers.kinds import LayerOperator, operator_of  # noqa: E402
from ray_hetero.kernels.layers.latent_heads import LatentShape  # noqa: E402
from ray_hetero.kernels.linear.quantised_linear import BlockFloats, StreamedBlockFloats  # noqa: E402
from ray_hetero.kernels.linear.streaming_linear import StreamingLinear  # noqa: E402

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


def in_blocks(weight: Any, rows: int, columns: int, *, are_powers: bool = False) -> BlockFloats:
    """A weight in FP8 with scales for blocks, of which some are much larger than others.

    Args:
        weight: [N, K].
        rows: of a block.
        columns: of a block.
        are_powers: whether scales are powers of two, which take a byte.

    """
    outputs, inputs = weight.shape
    of_blocks = torch.rand(-(-outputs // rows), -(-inputs // columns)).add_(0.1).mul_(2**-7)
    if are_powers:
        of_blocks = torch.exp2(of_blocks.log2().round())
    scales = of_blocks.repeat_interleave(rows, 0)[:outputs]
    scales = scales.repeat_interleave(columns, 1)[:, :inputs]
    floats = (weight / scales).clamp_(-448, 448).to(torch.float8_e4m3fn)
    if are_powers:
        of_blocks = of_blocks.to(torch.float8_e8m0fnu).view(torch.uint8)
    return BlockFloats(floats, of_blocks, rows, columns)


def exact(blocks: BlockFloats) -> Any:
    """The weight [N, K] that blocks say, in float32."""
    outputs, inputs = blocks.weight.shape
    scales = blocks.scales
    if scales.dtype == torch.uint8:
        scales = scales.view(torch.float8_e8m0fnu)
    by_weight = scales.float().repeat_interleave(blocks.rows, 0)[:outputs]
    return blocks.weight.float() * by_weight.repeat_interleave(blocks.columns, 1)[:, :inputs]


def load(layer: Any, blocks: BlockFloats) -> StreamedBlockFloats:
    """Let a layer be `kv_b_proj` of a checkpoint in FP8; what computes it."""
    layer.weight, layer.weight_scale_inv = (
        torch.nn.Parameter(one, requires_grad=False) for one in (blocks.weight, blocks.scales)
    )
    layer.weight_block_size = [blocks.rows, blocks.columns]
    layer._cpu_skip_gemm_dispatch = True
    layer.quant_method = bare_impl(
        Fp8LinearMethod, use_marlin=False, use_deep_gemm=False, block_quant=True
    )
    kernel = bare_impl(
        StreamedBlockFloats,
        weight_group_shape=SimpleNamespace(row=blocks.rows, col=blocks.columns),
    )
    kernel.process_weights_after_loading(layer)
    return kernel


def attend(
    heads: int, kv_b: Any, *, has_tiles: bool, blocks: BlockFloats | None = None
) -> Any:  # fmt: skip
    """vLLM's attention, whose weights are loaded.

    Args:
        heads: of it.
        kv_b: [heads, plain and values, latent], bf16.
        has_tiles: whether it is that of vLLM's backend for AMX.
        blocks: how the checkpoint has that, if it is quantised.

    """
    keys, values = kv_b[:, :PLAIN], kv_b[:, PLAIN:]
    layer = torch.nn.Module()
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
        is_amx_bmm_enabled=has_tiles, hisparse_cache=None, dcp_manager=None, kv_b_proj=layer,
    )  # fmt: skip
    if blocks is not None:
        load(layer, blocks)
    if has_tiles and blocks is not None:
        impl.kv_b_proj = layer
        impl.process_weights_after_loading(torch.bfloat16)
        assert impl._w_uk_packed.dtype == torch.bfloat16
    elif has_tiles:
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
    heads: int, *, query_latent: int | None, has_tiles: bool = False,
    block: tuple[int, int] | None = None, **parts: Any,
) -> tuple[Any, Any]:  # fmt: skip
    """A model of one layer of vLLM's classes, and the weight of `kv_b_proj`.

    Args:
        heads: of the attention.
        query_latent: elements of the latent of queries, if they have one.
        has_tiles: whether the attention is that of vLLM's backend for AMX.
        block: rows and columns that share a scale of `kv_b_proj`, which is quantised then.
        parts: other attributes of the attention.

    """
    kv_b = torch.randn(heads, PLAIN + VALUE, LATENT).mul_(LATENT**-0.5)
    blocks = None
    if block is not None:
        blocks = in_blocks(kv_b.view(-1, LATENT), *block)
        kv_b = exact(blocks).view(kv_b.shape)
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
        mla_attn=attend(heads, kv_b.bfloat16(), has_tiles=has_tiles, blocks=blocks),
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
    return model, kv_b.bfloat16() if block is None else kv_b


class Step:
    """A layer with a cache in which requests of some lengths are, and the tokens of a step.

    Args:
        lengths: tokens of each request, with those that come.
        block: tokens of a block.
        rows: tokens of each request that come; one of each if nothing says it.
        heads: of the attention.
        query_latent: elements of the latent of queries, if they have one.
        block_of_weights: `block` of `decoder`.
        parts: more arguments of it.

    """

    def __init__(
        self, lengths: list[int], *, block: int = 128, rows: list[int] | None = None,
        heads: int = 4, query_latent: int | None = 96,
        block_of_weights: tuple[int, int] | None = None, **parts: Any,
    ) -> None:  # fmt: skip
        torch.manual_seed(sum(lengths) + block)
        rows = rows or [1] * len(lengths)
        self.model, self.kv_b = decoder(
            heads, query_latent=query_latent, block=block_of_weights, **parts
        )
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

    def made(self, level: str = BEST) -> LayerOperator:
        kernel = StreamingLinear(native, level_of(level))
        found = operator_of(self.model, self.layer, linears(self.model), kernel)
        assert isinstance(found, LayerOperator), found
        assert found.rest is self.layer.mlp
        return found

    def reference(self, residual: Any) -> tuple[Any, Any, Any]:
        """What the MLP is given, the residual, and what the tokens add to the cache.

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
def contexts(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What vLLM's forward context gives, by name of a layer."""
    found: dict[str, Any] = {}
    monkeypatch.setattr(latent_layers, "get_attention_context", found.__getitem__)
    return found


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


@pytest.mark.parametrize("level", TESTED)
@pytest.mark.parametrize(
    ("block", "tokens"), [((128, 128), 1), ((128, 128), 40), ((32, 128), 5), ((64, 36), 5)], ids=str
)
def test_weights_of_heads_may_be_a_checkpoints_floats(
    block: tuple[int, int], tokens: int, level: str, contexts: dict[str, Any]
) -> None:
    lengths = [20 + 3 * number for number in range(tokens)]
    step = Step(lengths, block_of_weights=block)
    parts = step.made(level).parts
    assert (parts.to_latent.name, parts.from_latent.name) == ("fp8", "fp8")
    assert not hasattr(step.wrapper.mla_attn.kv_b_proj, "checkpoint_blocks")
    expect_the_reference(Step(lengths, block_of_weights=block), contexts, level=level)


SHAPES = {
    "as published": LatentShape(4, 512, 64, 128, 128),
    "heads in one block": LatentShape(5, 512, 64, 32, 32),
    "keys and values in one block": LatentShape(2, 256, 64, 96, 160),
    "other sizes": LatentShape(3, 96, 64, 64, 96),
}


@pytest.mark.parametrize("are_powers", [False, True])
@pytest.mark.parametrize("block", [(128, 128), (64, 32), (32, 128), (8, 36)], ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_weights_of_heads_are_those_of_the_checkpoint_bit_by_bit(
    name: str, block: tuple[int, int], are_powers: bool
) -> None:
    shape = SHAPES[name]
    rows = shape.heads * (shape.plain + shape.value)
    blocks = in_blocks(
        torch.randn(rows, shape.latent).mul_(0.1), *block, are_powers=are_powers
    )  # fmt: skip
    plain = exact(blocks).bfloat16().view(shape.heads, -1, shape.latent)
    assert torch.equal(plain.view(rows, -1), Fp8Weight.expanded(blocks.codes))
    keys, values = latent_heads.head_codes(blocks, shape)
    expected = plain[:, : shape.plain].transpose(1, 2).reshape(-1, shape.plain)
    for codes, weight in ((keys, expected), (values, plain[:, shape.plain :].reshape(
        -1, shape.latent
    ))):  # fmt: skip
        assert torch.equal(Fp8Weight.expanded(codes), weight)
        held = Fp8Weight.stored(codes, native)
        for level in LEVELS:
            assert torch.equal(held.packed(native, level_of(level)), pack(weight))


def test_scales_of_large_blocks_are_shared_by_outputs() -> None:
    shape = SHAPES["as published"]
    blocks = in_blocks(torch.randn(4 * 256, 512), 128, 128)
    keys, values = latent_heads.head_codes(blocks, shape)
    assert keys.layout.is_uniform
    assert values.layout.is_uniform
    assert (keys.group, keys.groups, values.group) == (128, 1, 128)


def test_a_damaged_checkpoint_is_named() -> None:
    step = Step([40], block_of_weights=(128, 128))
    layer = step.wrapper.mla_attn.kv_b_proj
    layer.checkpoint_blocks.weight.view(torch.uint8)[3, 5] = 0x7F
    with pytest.raises(UnsupportedError, match=r"layers\.0, kv_b_proj: fp8: 1 of .* are NaN"):
        step.made()


@pytest.mark.parametrize("are_powers", [False, True])
def test_vllm_is_given_the_same_weights_in_bf16(are_powers: bool) -> None:
    blocks = in_blocks(torch.randn(384, 512).mul_(0.1), 128, 128, are_powers=are_powers)
    layer = torch.nn.Module()
    kernel = load(layer, blocks)
    kept = layer.checkpoint_blocks
    assert torch.equal(kept.weight.view(torch.uint8), blocks.weight.view(torch.uint8))
    assert torch.equal(kept.scales, blocks.scales)
    plain = exact(blocks).bfloat16()
    assert torch.equal(get_and_maybe_dequant_weights(layer, torch.bfloat16), plain)
    x = torch.randn(3, 512).bfloat16()
    expected = torch.nn.functional.linear(x, plain)
    assert torch.equal(kernel.apply_weights(layer, x), expected)


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


@pytest.mark.parametrize("level", BETWEEN_PRODUCTS)
@pytest.mark.parametrize("left", [float("nan"), float("inf")])
@pytest.mark.parametrize("heads", [1, 4, 20])
def test_a_token_that_is_not_finite_stays_with_those_behind_it(
    heads: int, left: float, level: str, contexts: dict[str, Any]
) -> None:
    # The second request's last part has drafts only; the rows of one head are lanes of one block.
    step = Step([60, 1284, 1100], rows=[1, 8, 5], heads=heads)
    cache = step.cache.clone()
    contexts["layers.0"] = step.context
    layer = step.made(level)
    expected = layer(step.positions, step.hidden, step.residual)
    at = torch.arange(step.tokens)
    for bad in (4, 5, 8, 10, 13):
        spoilt = step.hidden.clone()
        spoilt[bad] = left
        step.cache.copy_(cache)
        found = layer(step.positions, spoilt, step.residual)
        others = (step.request != step.request[bad]) | (at < bad)
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one[others], other[others])
        assert not found[0][~others].isfinite().any()


@pytest.mark.skipif("amx" not in LEVELS, reason="needs AMX for vLLM's own kernels")
@pytest.mark.parametrize("has_tiles", [True, False], ids=["AMX_MLA", "CPU_MLA"])
@pytest.mark.parametrize("heads", [4, 32])
@pytest.mark.parametrize("of_weights", [None, (128, 128)], ids=["bf16", "fp8"])
def test_it_is_what_vllms_own_layer_does(
    of_weights: tuple[int, int] | None, heads: int, has_tiles: bool, contexts: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    block = 128 if has_tiles else 16
    step = Step(
        [300, 33, 512, 64], heads=heads, has_tiles=has_tiles, block=block,
        block_of_weights=of_weights,
    )  # fmt: skip
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


def rank_of(whole: Step, own: int, sums: Any) -> Step:
    """A rank's part of a layer, some of its heads, with a cache of its own.

    Args:
        whole: the layer.
        own: place of the rank in its group.
        sums: of the rank with the others.

    """
    part = copy.copy(whole)
    part.model = copy.deepcopy(whole.model)
    part.layer = part.model.layers[0]
    part.wrapper = wrapper = part.layer.self_attn.mla_attn
    part.heads = wrapper.num_heads = whole.heads // sums.size
    kv_b = whole.kv_b.chunk(sums.size)[own]
    wrapper.mla_attn = attend(part.heads, kv_b, has_tiles=False)
    wrapper.mla_attn.layer_name = f"{own}.0"
    wrapper.q_b_proj.matrix = wrapper.q_b_proj.matrix.chunk(sums.size)[own].contiguous()
    wrapper.o_proj.matrix = wrapper.o_proj.matrix.chunk(sums.size, 1)[own].contiguous()
    wrapper.q_b_proj.tp_size = wrapper.o_proj.tp_size = sums.size
    wrapper.o_proj.reduce_results = wrapper.o_proj.input_is_parallel = True
    part.cache = whole.cache.clone()
    return part


def layer_of_rank(part: Step, sums: Any) -> LayerOperator:
    kernel = StreamingLinear(native, level_of(BEST))
    kernel.sums = sums
    found = operator_of(part.model, part.layer, linears(part.model), kernel)
    assert isinstance(found, LayerOperator), found
    return found


@pytest.mark.parametrize("count", [2, 3])
def test_the_ranks_of_a_group_have_some_heads_each(
    count: int, contexts: dict[str, Any]
) -> None:  # fmt: skip
    step = Step([300, 33, 512], heads=12)
    expected, total, new = step.reference(step.residual)
    sums = sums_of(count)
    parts = [rank_of(step, own, one) for own, one in enumerate(sums)]
    contexts.update({f"{own}.0": part.context for own, part in enumerate(parts)})
    layers = [layer_of_rank(part, one) for part, one in zip(parts, sums, strict=True)]
    # One step after the other, without anything between them that the ranks wait for.
    scales = (1.0, 0.5, -1.0, 0.25, 2.0)

    def run(own: int) -> list[Any]:
        given = []
        for number, scale in enumerate(scales):
            if number % count == own:
                time.sleep(0.02)
            given.append(layers[own](step.positions, step.hidden * scale, step.residual * scale))
        return given

    found = Threads(count).run([lambda own=own: run(own) for own in range(count)])
    for one in found:
        if isinstance(one, Exception):
            raise one
    for other in found[1:]:
        for mine, theirs in zip(found[0], other, strict=True):
            assert all(map(torch.equal, mine, theirs))
    # What is normed is the same for all positive scales, and what is cached is the last step's.
    for scale, (given, residual) in zip(scales, found[0], strict=True):
        if scale == 1:
            torch.testing.assert_close(given.float(), expected, rtol=2**-4, atol=2**-4)
            torch.testing.assert_close(residual.float(), total, **CLOSE)
    for part in parts:
        cached = part.cache.view(-1, LATENT + ROTATED)[step.slots]
        torch.testing.assert_close(cached.float(), new, **CLOSE)


def test_a_rank_that_is_missing_is_named(contexts: dict[str, Any]) -> None:
    step = Step([40], heads=4)
    sums = sums_of(2)
    part = rank_of(step, 0, sums[0])
    contexts["0.0"] = part.context
    layer = layer_of_rank(part, sums[0])
    for connection in sums[1].connections:
        if connection is not None:
            connection.shutdown(socket.SHUT_RDWR)
    with pytest.raises(
        dist.DistError, match="rank 5, of the same tensor-parallel group, has ended"
    ):
        layer(step.positions, step.hidden, step.residual)


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
    assert fuse_model(model, linears(step.model), kernel) == 1
    (one,) = step.model.layers
    assert type(one).__name__ == "ResidualAttention"
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
    "a drafter": ("drafter", lambda step: setattr(step.model, "aux_hidden_state_layers", (1,))),
}  # fmt: skip


@pytest.mark.skipif(not hasattr(torch.ops._C, "rotary_embedding"), reason="needs vLLM's operator")
def test_all_heads_are_rotated(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step([40, 50])
    other = bare(RotaryEmbedding, head_size=ROTATED, rotary_dim=ROTATED, is_neox_style=False)
    other.register_buffer("cos_sin_cache", step.wrapper.rotary_emb.cos_sin_cache)
    queries = torch.randn(step.tokens, 4, ROTATED).bfloat16()
    keys = torch.randn(step.tokens, 1, ROTATED).bfloat16()
    expected = step.turned(queries.float()), step.turned(keys.float())
    stock, _ = other.forward_cpu(step.positions, queries.clone(), keys.clone())
    # When this is no longer so, the patch can go.
    assert not torch.allclose(stock.float(), expected[0], **CLOSE)
    monkeypatch.setattr(RotaryEmbedding, "forward_cpu", RotaryEmbedding.forward_cpu)
    latent_attention.turn_all_heads()
    found = other.forward_cpu(step.positions, queries.clone(), keys.clone())
    for one, right in zip(found, expected, strict=True):
        assert torch.allclose(one.float(), right, **CLOSE)
    # Queries of attention without latents still go to the operator, which rotates them in place.
    flat = queries.flatten(1).clone()
    assert other.forward_cpu(step.positions, flat, keys.flatten(1).clone())[0] is flat
    assert torch.allclose(flat.view_as(queries).float(), expected[0], **CLOSE)


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
        fused = fuse_model(
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
        layer.native.run(**given)


def described(parts: Any) -> dict[str, Any]:
    """Arguments of the native module's layer."""
    given: dict[str, Any] = {}

    class Taken:
        Rotation = staticmethod(native.Rotation)
        PostAttention = staticmethod(native.PostAttention)

        @staticmethod
        def LatentLayer(**those: Any) -> None:  # noqa: N802
            given.update(those)

    parts.native(Taken)
    return given

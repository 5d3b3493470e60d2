"""Decoder layers of a CPU rank as one operator.

vLLM runs a layer as a dozen operators, compiled or not.  In a decode step each of them has little
to do, and most of what it costs is to call it: Python and instructions that the weights have driven
out of the caches since the layer before.  Here all layers of a stage that follow one another are
one operator.  A decode step is one native call (decode_step.py); the prompts of a step of many
tokens are computed by a GPU, where one is borrowed, while the cores decode the rest of the step
(gpu_layers.py); any other step calls what is left of each layer: vLLM's kernels of the attention,
and all that lies between two attentions (post_attention.py).

The attentions' own modules stay what they are, and vLLM finds them where it has registered them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.attention.attention import get_attention_context
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.utils.torch_utils import direct_register_custom_op

from placement.units import GIB
from ray_hetero.compat.custom_ops import vllm_ops
from ray_hetero.errors import UnsupportedError
from ray_hetero.kernels import decode_step, gpu_layers
from ray_hetero.kernels.decode_step import DecodeStep
from ray_hetero.kernels.gpu_layers import AttentionMemory, AttentionShape, Caches, GpuLayers
from ray_hetero.kernels.gpu_prefill import BorrowedGpu
from ray_hetero.kernels.post_attention import (
    Beginning,
    BetweenAttentions,
    Linear,
    Norm,
    Parts,
    add_and_norm,
)
from ray_hetero.kernels.step_rows import StepRows, one_prompt, step_rows
from ray_hetero.kernels.streaming_linear import StreamingLinear
from ray_hetero.log import logger

MODELS = {"LlamaModel", "Qwen2Model", "Qwen3Model"}
LAYERS = {"LlamaDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"}
ATTENTIONS = {"LlamaAttention", "Qwen2Attention", "Qwen3Attention"}
PERCEPTRONS = {"LlamaMLP", "Qwen2MLP"}
"""Classes of vLLM whose forward does what is done here, see tests/unit/test_decoder_layers.py;
their subclasses may do something else."""

HEAD_MULTIPLE = 16
"""Of a head's size, and of half of what is rotated of it; a vector's."""

PROMPT_TOKENS = 16
"""Of a request, from which its attention is worth sending its cached keys to a GPU: for fewer
queries reading them where they are takes less time."""

Memories = dict[AttentionShape, AttentionMemory | None]
"""What was made of each shape; None where there was no room."""

_library = torch.library.Library("ray_hetero", "FRAGMENT")
_runs: list[DecoderLayers] = []
"""Of this process, by the number that the operator is called with."""


class Attention:
    """From queries, keys and values to what the output projection multiplies.

    Args:
        module: vLLM's, of a known class.
        kernel: what computes linear layers.

    """

    def __init__(self, module: Any, kernel: StreamingLinear) -> None:
        self.name: str = module.attn.layer_name
        self.scale = decode_step.known_scale(module.attn)
        self._sizes = [module.q_size, module.kv_size, module.kv_size]
        self._head = int(module.attn.head_size)
        self.shape = AttentionShape(
            module.q_size // self._head, module.kv_size // self._head, self._head
        )
        self.cos_sin = module.rotary_emb.cos_sin_cache.to(torch.bfloat16).contiguous()
        """[positions, rotated elements of a head]: cosines, then sines."""
        self.norms = [norm for norm in map(as_norm, _head_norms(module)) if norm is not None]
        """Of heads of queries and of keys; none in most models."""
        self._level = kernel.level
        self.rotation = kernel.native.Rotation(
            heads=self.shape.heads,
            kv_heads=self.shape.kv_heads,
            size=self._head,
            cos_sin=self.cos_sin.data_ptr(),
            positions=self.cos_sin.shape[0],
            rotated=self.cos_sin.shape[1],
            query_norm=self.norms[0].native if self.norms else None,
            key_norm=self.norms[1].native if self.norms else None,
        )

    def __call__(self, positions: torch.Tensor, stacked: torch.Tensor) -> torch.Tensor:
        """Write keys and values into the cache, and attend.

        Args:
            positions: [M], int64.
            stacked: [M, queries + keys + values], bf16; normalised and rotated in place.

        Returns:
            [M, queries], bf16.

        """
        tokens, stride = len(stacked), stacked.stride(0)
        self.rotation.run(stacked.data_ptr(), stride, positions.data_ptr(), tokens, self._level)
        queries, keys, values = stacked.split(self._sizes, dim=-1)
        metadata, attention, cache, slots = get_attention_context(self.name)
        if metadata is None:
            # A dummy run; vLLM attends to nothing either.
            return torch.zeros_like(queries, memory_format=torch.contiguous_format)
        queries, keys, values = (x.view(len(x), -1, self._head) for x in (queries, keys, values))
        if slots is not None:
            attention.impl.do_kv_cache_update(attention, keys, values, cache, slots)
        attended = torch.empty_like(queries, memory_format=torch.contiguous_format)
        attention.impl.forward(attention, queries, keys, values, cache, metadata, attended)
        return attended.view(tokens, -1)


@dataclass(frozen=True, eq=False)
class Layer:
    """The parts of a decoder layer."""

    beginning: Beginning
    attention: Attention
    parts: Parts
    """Behind the attention, as if no layer followed."""


class DecoderLayers:
    """Computes layers that follow one another.

    Args:
        layers: at least one.
        kernel: what computes linear layers.
        memory: for attention on the GPU that computes prompts, if it computes whole layers.

    """

    def __init__(
        self, layers: Sequence[Layer], kernel: StreamingLinear,
        memory: AttentionMemory | None = None,
    ) -> None:  # fmt: skip
        self._kernel = kernel
        self._beginning = layers[0].beginning
        following = [*(layer.beginning for layer in layers[1:]), None]
        self._layers = [
            (layer.attention, BetweenAttentions(replace(layer.parts, next=begins), kernel))
            for layer, begins in zip(layers, following, strict=True)
        ]
        self._decode_step = (
            DecodeStep(self._beginning, self._layers, kernel)
            if all(attention.scale is not None for attention, _ in self._layers)
            else None
        )
        self._on_gpu: GpuLayers | None = None
        if memory is not None:
            assert kernel.prompts is not None
            self._on_gpu = GpuLayers(layers, kernel.prompts.gpu, memory)

    def __call__(
        self, positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As a decoder layer of vLLM does, for all of them.

        Args:
            positions: [M].
            hidden: [M, N], bf16.
            residual: [M, N], bf16; None at the beginning of a model.

        Returns:
            [M, N], which is still to be added to the residual, and it.

        """
        positions = positions.to(torch.int64).contiguous()
        step = self._decode_step and self._decode_step(positions, hidden, residual)
        if step is None and self._on_gpu is not None:
            try:
                step = self._with_gpu(self._on_gpu, positions, hidden, residual)
            except torch.OutOfMemoryError as error:
                logger.warning(
                    "the GPU that computes this rank's prompts has run out of memory (%s): from "
                    "now on it computes their linear layers only, and prompts of thousands of "
                    "tokens take several times as long. Lower gpu.memory_utilization or "
                    "--max-num-batched-tokens.",
                    str(error).splitlines()[0],
                )
                self._on_gpu = None
        return step or self._layer_by_layer(positions, hidden, residual)

    def _with_gpu(
        self, on_gpu: GpuLayers, positions: torch.Tensor, hidden: torch.Tensor,
        residual: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor] | None:  # fmt: skip
        """Prompts on the GPU and decoding requests on the cores; None if the step is another."""
        assert self._kernel.prompts is not None
        tokens, least = len(positions), self._kernel.prompts.from_tokens
        if tokens < least or not on_gpu.suits(tokens):
            return None
        contexts = [get_attention_context(attention.name) for attention, _ in self._layers]
        caches: Caches | None = None
        if contexts[0][0] is None:
            # A dummy run, for which vLLM attends to nothing; the GPU makes ready what it needs.
            rows = one_prompt(tokens)
        elif (found := self._divided(contexts, tokens)) is None or found.tokens < least:
            return None
        else:
            rows = found
            _, modules, kept, slots = zip(*contexts, strict=True)
            caches = Caches(modules, kept, slots[0][:tokens][rows.rows])
        if all(cache.numel() for _, _, cache, _ in contexts):
            on_gpu.memory.uploads.lock([cache for _, _, cache, _ in contexts])
        decoded: list[tuple[torch.Tensor, torch.Tensor]] = []

        def decode() -> None:
            if len(rows.decoding):
                assert self._decode_step is not None
                decoded.append(
                    self._decode_step.decode(rows, contexts, positions, hidden, residual)
                )

        y, total = on_gpu(positions, hidden, residual, rows, caches, decode)
        if not decoded:
            return y, total
        whole = torch.empty_like(hidden, memory_format=torch.contiguous_format)
        sums = torch.empty_like(whole)
        for into, prompts, others in zip((whole, sums), (y, total), decoded[0], strict=True):
            into[rows.rows] = prompts
            into[rows.decoding_rows] = others
        return whole, sums

    def _divided(self, contexts: Sequence[Any], tokens: int) -> StepRows | None:
        """Who computes which rows of a step; None if it is none that a GPU computes."""
        metadata, first, cache, slots = contexts[0]
        if (
            slots is None
            or metadata.num_actual_tokens != tokens
            or metadata.max_query_len < PROMPT_TOKENS
            or not metadata.causal
            or metadata.dynamic_causal is not None
            or slots.dtype != torch.int64
            or not gpu_layers.is_known(cache, first.isa)
            or any(one is not metadata or other.stride() != cache.stride()
                   for one, _, other, _ in contexts)
        ):  # fmt: skip
            return None
        can_decode = self._decode_step is not None and decode_step.is_known(cache, first.isa)
        return step_rows(
            metadata.query_start_loc.tolist(), metadata.seq_lens.tolist(), metadata.block_table,
            cache.shape[2], self._kernel.few_tokens if can_decode else 0,
        )  # fmt: skip

    def _layer_by_layer(
        self, positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        norm, stacked = self._beginning.norm, self._beginning.stacked
        if residual is None:
            total = hidden.contiguous()
            x = torch.empty_like(total)
            vllm_ops.rms_norm(x, total, norm.weight, norm.epsilon)
        else:
            x, total = (one.clone(memory_format=torch.contiguous_format)
                        for one in (hidden, residual))  # fmt: skip
            add_and_norm(x, total, norm)
        x = self._kernel.compute(x, stacked.weight, stacked.bias)
        for attention, between in self._layers:
            x, total = between(attention(positions, x), total)
        return x, total


def _decoder_layers(
    positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None, run: int
) -> tuple[torch.Tensor, torch.Tensor]:
    return _runs[run](positions, hidden, residual)


def _shapes(
    positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None, run: int
) -> tuple[torch.Tensor, torch.Tensor]:
    x, total = (torch.empty_like(hidden, memory_format=torch.contiguous_format) for _ in range(2))
    return x, total


direct_register_custom_op(
    "decoder_layers",
    _decoder_layers,
    fake_impl=_shapes,
    target_lib=_library,
    dispatch_key="CPU",
)


class _Run(nn.Module):  # type: ignore[misc]
    """In the place of the first of some layers."""

    def __init__(self, run: int) -> None:
        super().__init__()
        self.run = run

    def forward(
        self, positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        result: tuple[torch.Tensor, torch.Tensor] = torch.ops.ray_hetero.decoder_layers(
            positions, hidden, residual, self.run
        )
        return result


class _Done(nn.Module):  # type: ignore[misc]
    """In the place of the others."""

    def forward(
        self, positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return hidden, residual


def fuse(model: nn.Module, linears: Mapping[nn.Module, Linear], kernel: StreamingLinear) -> int:
    """Fuse what can be fused of a model whose weights are loaded.

    Args:
        model: vLLM's.
        linears: its linear layers that the kernel computes.
        kernel: what computes them.

    Returns:
        How many layers were fused.

    """
    count = 0
    memories: Memories = {}
    for decoder in model.modules():
        # Hidden states that are wanted from between layers are not there any more.
        wanted = getattr(decoder, "aux_hidden_state_layers", ())
        if type(decoder).__name__ in MODELS and not wanted:
            for numbers, layers in _following(decoder, linears, kernel):
                memory = _memory(layers, kernel, memories)
                _runs.append(DecoderLayers(layers, kernel, memory))
                first, *others = numbers
                decoder.layers[first] = _Run(len(_runs) - 1)
                for other in others:
                    decoder.layers[other] = _Done()
                count += len(layers)
    return count


def _memory(
    layers: Sequence[Layer], kernel: StreamingLinear, made: Memories
) -> AttentionMemory | None:
    """What attention on the GPU needs, if a GPU computes these layers and has room for it."""
    many, shape = kernel.prompts, gpu_layers.shape_of(layers)
    if many is None or shape is None or not _has_weights(layers, many.gpu):
        return None
    if kernel.sums is not None:
        return None  # it would have to wait for the other ranks twice a layer
    if shape in made:
        return made[shape]
    try:
        memory = made[shape] = AttentionMemory(many.gpu, shape, many.cores)
    except UnsupportedError as error:
        made[shape] = None
        logger.warning("%s", error)
        return None
    logger.info(
        "prompts are computed by the GPU in whole layers, their attention too, which takes %.1f "
        "GiB more of its memory (cpu.prefill_on_gpu); requests that decode meanwhile stay on the "
        "cores",
        memory.gpu_bytes / GIB,
    )
    return memory


def _has_weights(layers: Sequence[Layer], gpu: BorrowedGpu) -> bool:
    linears = [linear for layer in layers
               for linear in (layer.beginning.stacked, *layer.parts.linears)]  # fmt: skip
    return all(gpu.suits(linear.weight.data, 1) for linear in linears)


def _following(
    decoder: Any, linears: Mapping[nn.Module, Linear], kernel: StreamingLinear
) -> Iterator[tuple[list[int], list[Layer]]]:
    """Layers without another kind between them, each with its number in the model."""
    found = [(number, _layer(decoder.layers[number], linears, kernel))
             for number in range(decoder.start_layer, decoder.end_layer)]  # fmt: skip
    for is_known, some in itertools.groupby(found, lambda one: one[1] is not None):
        if is_known:
            numbers, layers = zip(*some, strict=True)
            yield list(numbers), list(layers)


def _layer(
    layer: Any, linears: Mapping[nn.Module, Linear], kernel: StreamingLinear
) -> Layer | None:
    """The parts of a layer that is one of those known here."""
    if not (
        type(layer).__name__ in LAYERS
        and type(layer.self_attn).__name__ in ATTENTIONS
        and type(layer.mlp).__name__ in PERCEPTRONS
        and type(layer.mlp.act_fn).__name__ == "SiluAndMul"
        and _attends_as_known(layer.self_attn)
    ):
        return None
    attention, perceptron = layer.self_attn, layer.mlp
    own = [attention.qkv_proj, attention.o_proj, perceptron.gate_up_proj, perceptron.down_proj]
    norms = [as_norm(norm) for norm in (layer.input_layernorm, layer.post_attention_layernorm)]
    if None in norms or any(one not in linears for one in own) or not _adds_as_known(own, kernel):
        return None
    input_norm, norm = norms
    assert input_norm is not None
    assert norm is not None
    stacked, output, gate_up, down = (linears[one] for one in own)
    if kernel.sums is not None and not kernel.sums.is_first:
        output, down = (replace(one, bias=None) for one in (output, down))
    return Layer(
        Beginning(input_norm, stacked),
        Attention(attention, kernel),
        Parts(output, norm, gate_up, down),
    )


def _adds_as_known(linears: Sequence[Any], kernel: StreamingLinear) -> bool:
    """Whether native calls can add up what the ranks of a group compute with these layers."""
    if kernel.sums is None:
        return all(one.tp_size == 1 for one in linears)
    _, output, _, down = linears
    return all(one.tp_size == kernel.sums.size for one in linears) and all(
        one.reduce_results and one.input_is_parallel for one in (output, down)
    )


def _attends_as_known(module: Any) -> bool:
    attention, rotary = module.attn, module.rotary_emb
    return (
        type(attention).__name__ == "Attention"
        and attention.query_quant is None
        and attention.kv_sharing_target_layer_name is None
        and attention.head_size_v == attention.head_size
        and not attention.attn_backend.forward_includes_kv_cache_update
        and not getattr(module, "qk_norm", False)
        and not getattr(module, "dual_chunk_attention_config", None)
        and type(rotary).forward_native is RotaryEmbedding.forward_native
        and rotary.is_neox_style
        and attention.head_size % HEAD_MULTIPLE == 0
        and rotary.cos_sin_cache.shape[1] % (2 * HEAD_MULTIPLE) == 0
        and all(as_norm(norm) is not None for norm in _head_norms(module))
    )


def _head_norms(module: Any) -> list[Any]:
    return [getattr(module, name) for name in ("q_norm", "k_norm") if hasattr(module, name)]


def as_norm(norm: Any) -> Norm | None:
    """A norm of vLLM's, if it is one of those known here."""
    if type(norm).__name__ != "RMSNorm" or not norm.has_weight:
        return None
    weight = norm.weight.data
    if norm.variance_size_override is not None or weight.dtype != torch.bfloat16:
        return None
    return Norm(weight, float(norm.variance_epsilon))

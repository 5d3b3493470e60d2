"""Decoder layers of a CPU rank as one operator.

vLLM runs a layer as a dozen operators, compiled or not.  In a decode step each of them has little
to do, and most of what it costs is to call it: Python and instructions that the weights have driven
out of the caches since the layer before.  Here all layers of a stage that follow one another are
one operator.  A decode step is one native call (decode_step.py); the prompts of a step of many
tokens are computed by a prompt GPU, where there is one, while the cores decode the rest of the step
(gpu_layers.py; for the ranks of a group group_layers.py); any other step calls what is left of each
layer: vLLM's kernels of the attention, and all that lies between two attentions
(post_attention.py).

The attentions' own modules stay what they are, and vLLM finds them where it has registered them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from vllm.model_executor.layers.attention.attention import get_attention_context
from vllm.utils.torch_utils import direct_register_custom_op

from ray_hetero.kernels.layers import decode_step, layer_tokens
from ray_hetero.kernels.layers.decode_step import DecodeStep
from ray_hetero.kernels.layers.kv_layouts import Caches, can_be_copied
from ray_hetero.kernels.layers.layer import Layer
from ray_hetero.kernels.layers.layer_parts import adapters_in, product
from ray_hetero.kernels.layers.post_attention import PostAttentionBlock, add_and_norm, norm
from ray_hetero.kernels.layers.protocols import (
    LayersOnGpu,
    SharesDecode,
    StageRows,
    Threshold,
)
from ray_hetero.kernels.layers.step_rows import PROMPT_TOKENS, StepRows, one_prompt, step_rows
from ray_hetero.kernels.linear.streaming_linear import StreamingLinear
from ray_hetero.log import logger

WEIGHTS_FOR_SENT = 16
"""Weights of the layers for each element of the keys and values that a GPU is sent so that the
cores need not decode beside it: the link takes a tenth longer for these then."""

_library = torch.library.Library("ray_hetero", "FRAGMENT")
_runs: list[DecoderLayers] = []
"""Runs of layers of this process, by the number that the operator is called with."""


class DecoderLayers:
    """Computes layers that follow one another.

    Args:
        layers: at least one.
        kernel: what computes linear layers.
        on_gpu: a GPU that computes whole layers in large steps, for this rank or for its group.
        many: holder of the number of tokens from which it computes a step.

    """

    def __init__(
        self, layers: Sequence[Layer], kernel: StreamingLinear,
        on_gpu: LayersOnGpu | None = None, many: Threshold | None = None,
    ) -> None:  # fmt: skip
        self._kernel = kernel
        self.output: StageRows | None = None
        """Output of the stage, which stays on that GPU, if these are the stage's last layers."""
        self._input = layers[0].input
        following = [*(layer.input for layer in layers[1:]), None]
        self._layers = [
            (layer.attention, PostAttentionBlock(replace(layer.parts, next=begins), kernel))
            for layer, begins in zip(layers, following, strict=True)
        ]
        parts = [linear for _, block in self._layers for linear in block.parts.linears]
        self._adapters = adapters_in([self._input.qkv, *parts])
        self._decode_step = (
            DecodeStep(self._input, self._layers, kernel, self._adapters)
            if all(attention.scores is not None for attention, _ in self._layers)
            else None
        )
        self._on_gpu, self._many = on_gpu, many
        self._most_sent = most_sent(layers)

    @property
    def shared(self) -> SharesDecode | None:
        """Decode steps with a GPU's help; None where the cores compute all of them."""
        return None if self._decode_step is None else self._decode_step.shared

    @shared.setter
    def shared(self, shared: SharesDecode | None) -> None:
        assert self._decode_step is not None
        self._decode_step.shared = shared

    @property
    def gpu(self) -> Any:
        """The GPU that computes whole layers in large steps; None if this process has none."""
        return None if self._on_gpu is None else self._on_gpu.gpu

    def fetch_ahead(self, tokens: int) -> None:
        """Prefetch weights for the GPU's part of a decode step, before that is called.

        Args:
            tokens: of the step, in which no request has more than it may decode.

        Raises:
            RuntimeError: what CUDA says, but that memory has run out: the step learns of that.
            TimeoutError: ordering the GPU's work takes too long.

        """
        if self.shared is not None and self._adapters is None:
            self.shared.fetch(tokens)

    def __call__(
        self, positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute all layers as vLLM's decoder layers do.

        Args:
            positions: [M].
            hidden: [M, N], bf16.
            residual: [M, N], bf16; None at the beginning of a model.

        Returns:
            [M, N], which is still to be added to the residual, and it.

        """
        positions = positions.to(torch.int64).contiguous()
        step = self._decode_step(positions, hidden, residual) if self._decode_step else None
        if step is None and self._on_gpu is not None:
            try:
                step = self._with_gpu(self._on_gpu, positions, hidden, residual)
            except torch.OutOfMemoryError as error:
                logger.warning(
                    "the GPU that computes this rank's prompts has run out of memory (%s): from "
                    "now on %s. Lower gpu.memory_utilization or --max-num-batched-tokens.",
                    str(error).splitlines()[0],
                    self._on_gpu.instead,
                )
                self._on_gpu = None
            if step is not None and self.shared is not None:
                self.shared.interrupt()
        if step is None:
            layer_tokens.count(len(self._layers), by_operators=len(positions))
            step = self._layer_by_layer(positions, hidden, residual)
        return step

    def _with_gpu(
        self, on_gpu: LayersOnGpu, positions: torch.Tensor, hidden: torch.Tensor,
        residual: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor] | None:  # fmt: skip
        """Prompts on the GPU and decoding requests on the cores; None if the step is another."""
        assert self._many is not None
        tokens, least = len(positions), self._many.from_tokens
        if tokens < least or not on_gpu.suits(tokens):
            return None
        if self._adapters is not None and self._adapters.slots(tokens) is not None:
            return None  # they are not on the GPU
        contexts = [get_attention_context(attention.name) for attention, _ in self._layers]
        own: tuple[Any, Any] | None = None
        if contexts[0][0] is None:
            # A dummy run, for which vLLM attends to nothing; the GPU makes ready what it needs.
            rows = one_prompt(tokens)
        elif (found := self._divided(contexts, tokens)) is None or found.tokens < least:
            return None
        else:
            rows = found
            slots = contexts[0][3][:tokens][rows.rows]
            own = tuple(module for _, module, _, _ in contexts), slots
        kept = tuple(cache for _, _, cache, _ in contexts)
        if all(cache.numel() for cache in kept) and not on_gpu.reaches(kept):
            self._on_gpu = None
            return None
        caches = None if own is None else Caches(own[0], kept, own[1], on_gpu.others)
        decoded: list[tuple[torch.Tensor, torch.Tensor]] = []

        def decode() -> None:
            if len(rows.decoding):
                assert self._decode_step is not None
                decoded.append(
                    self._decode_step.decode(rows, contexts, positions, hidden, residual)
                )

        output = self.output
        if output is not None and caches is not None and output.may_take(tokens):
            on_gpu(positions, hidden, residual, rows, caches, decode, output)
            for others in decoded:
                output.put(tokens, rows.decoding_rows, *others)
            results = output.finish(hidden, on_gpu.finish)
        else:
            prompts = on_gpu(positions, hidden, residual, rows, caches, decode)
            results = self._whole(hidden, rows, prompts, decoded)
            if output is not None:
                output.note(*results)
        by_cores = tokens - rows.tokens
        layer_tokens.count(len(self._layers), native=by_cores, on_gpu=rows.tokens)
        return results

    @staticmethod
    def _whole(
        hidden: torch.Tensor, rows: StepRows, prompts: tuple[torch.Tensor, torch.Tensor],
        decoded: Sequence[tuple[torch.Tensor, torch.Tensor]],
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """A step's results, of which the cores have decoded some."""
        if not decoded:
            return prompts
        whole = torch.empty_like(hidden, memory_format=torch.contiguous_format)
        sums = torch.empty_like(whole)
        for into, computed, others in zip((whole, sums), prompts, decoded[0], strict=True):
            into[rows.rows] = computed
            into[rows.decoding_rows] = others
        return whole, sums

    def _divided(self, contexts: Sequence[Any], tokens: int) -> StepRows | None:
        """Division of a step's rows between cores and GPU; None if the GPU computes none."""
        metadata, first, cache, slots = contexts[0]
        if (
            slots is None
            or metadata.num_actual_tokens != tokens
            or metadata.max_query_len < PROMPT_TOKENS
            or not metadata.causal
            or metadata.dynamic_causal is not None
            or slots.dtype != torch.int64
            or not can_be_copied(cache, first.isa)
            or any(one is not metadata or other.stride() != cache.stride()
                   for one, _, other, _ in contexts)
        ):  # fmt: skip
            return None
        can_decode = self._decode_step is not None and decode_step.is_known(cache, first.isa)
        return step_rows(
            metadata.query_start_loc.tolist(), metadata.seq_lens.tolist(), metadata.block_table,
            cache.shape[2], self._kernel.step_tokens if can_decode else 0, self._most_sent,
        )  # fmt: skip

    def _layer_by_layer(
        self, positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        how, qkv = self._input.norm, self._input.qkv
        if residual is None:
            total = hidden.contiguous()
            x = norm(total, how)
        else:
            x, total = (one.clone(memory_format=torch.contiguous_format)
                        for one in (hidden, residual))  # fmt: skip
            x = add_and_norm(x, total, how)
        x = product(self._kernel, x, qkv)
        for attention, behind in self._layers:
            x, total = behind(attention(positions, x), total)
        return x, total


def most_sent(layers: Sequence[Layer]) -> int:
    """Cached tokens whose keys and values cross the link rather than that the cores decode.

    The same on all ranks of a group, whose parts of a layer are alike in shape.
    """
    weights = sum(
        math.prod(linear.weight.shape)
        for layer in layers
        for linear in (layer.input.qkv, *layer.parts.linears)
    )
    return weights // (WEIGHTS_FOR_SENT * sum(2 * layer.attention.shape.keys for layer in layers))


def _decoder_layers(
    positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None, run: int
) -> tuple[torch.Tensor, torch.Tensor]:
    return _runs[run](positions, hidden, residual)


def _shapes(
    positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None, run: int
) -> tuple[torch.Tensor, torch.Tensor]:
    x, total = (torch.empty_like(hidden, memory_format=torch.contiguous_format) for _ in range(2))
    return x, total


def registered() -> Sequence[DecoderLayers]:
    """All runs of layers of this process."""
    return _runs


def register(layers: DecoderLayers) -> int:
    """Register layers with the operator; returns the number that it is called with."""
    _runs.append(layers)
    return len(_runs) - 1


direct_register_custom_op(
    "decoder_layers",
    _decoder_layers,
    fake_impl=_shapes,
    target_lib=_library,
    dispatch_key="CPU",
)

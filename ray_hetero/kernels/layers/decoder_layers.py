"""Decoder layers of a CPU rank as one operator.

vLLM runs a layer as a dozen operators, compiled or not.  In a decode step each of them has little
to do, and most of what it costs is to call it: Python and instructions that the weights have driven
out of the caches since the layer before.  Here all layers of a stage that follow one another are
one operator, and the step's route (step_route.py) says how it is computed.  A decode step is one
native call (decode_step.py); the prompts of a step of many tokens are computed by a prompt GPU,
where there is one, while the cores decode the rest of the step (gpu_layers.py; for the ranks of a
group group_layers.py); any other step calls what is left of each layer: vLLM's kernels of the
attention, and all that lies between two attentions (post_attention.py).

The attentions' own modules stay what they are, and vLLM finds them where it has registered them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from vllm.model_executor.layers.attention.attention import get_attention_context

from ray_hetero.kernels import step_trace
from ray_hetero.kernels.layers import decode_step, layer_tokens
from ray_hetero.kernels.layers.decode_step import DecodeStep
from ray_hetero.kernels.layers.kv_layouts import Caches, can_be_copied
from ray_hetero.kernels.layers.layer import Layer
from ray_hetero.kernels.layers.layer_parts import adapters_in, product
from ray_hetero.kernels.layers.post_attention import PostAttentionBlock, input_norm
from ray_hetero.kernels.layers.protocols import (
    LayersOnGpu,
    SharesDecode,
    StageRows,
)
from ray_hetero.kernels.layers.step_rows import StepRows, one_prompt, step_rows
from ray_hetero.kernels.linear.streaming_linear import StreamingLinear
from ray_hetero.kernels.step_route import Place, Reason
from ray_hetero.kernels.step_trace import Event
from ray_hetero.log import logger

WEIGHTS_FOR_SENT = 16
"""Weights of the layers for each element of the keys and values that a GPU is sent so that the
cores need not decode beside it: the link takes a tenth longer for these then."""


class DecoderLayers:
    """Computes layers that follow one another.

    Args:
        layers: at least one.
        kernel: what computes linear layers.
        on_gpu: a GPU that computes whole layers in large steps, for this rank or for its group.

    """

    def __init__(
        self, layers: Sequence[Layer], kernel: StreamingLinear,
        on_gpu: LayersOnGpu | None = None,
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
        self.decode_step = (
            DecodeStep(self._input, self._layers, kernel, self._adapters)
            if all(attention.scores is not None for attention, _ in self._layers)
            else None
        )
        """Native decode steps; None where an attention does more than they know."""
        self._names = [attention.name for attention, _ in self._layers]
        self._on_gpu = on_gpu
        self._most_sent = most_sent(layers)

    @property
    def shared(self) -> SharesDecode | None:
        """Decode steps with a GPU's help; None where the cores compute all of them."""
        return None if self.decode_step is None else self.decode_step.shared

    @shared.setter
    def shared(self, shared: SharesDecode | None) -> None:
        assert self.decode_step is not None
        self.decode_step.shared = shared

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
        contexts, tokens, longest, step = [], len(positions), None, None
        if self.decode_step is not None or self._on_gpu is not None:
            contexts = [get_attention_context(name) for name in self._names]
            metadata = contexts[0][0]
            longest = None if metadata is None else metadata.max_query_len  # None in a dummy run
        route = self._kernel.route_of(tokens, longest)
        step_trace.note(Event.ROUTE, route)
        place = route.place
        if place is Place.NATIVE and self.decode_step is not None:
            step = self.decode_step(contexts, positions, hidden, residual)
        elif place is Place.GPU and contexts:
            step = self._with_gpu(contexts, positions, hidden, residual)
        if step is None:
            if place is Place.NATIVE or (place is Place.GPU and not contexts):
                layer_tokens.count_instead(Reason.UNKNOWN_ATTENTION)
            layer_tokens.count(len(self._layers), by_operators=tokens)
            step = self.one_by_one(positions, hidden, residual)
        return step

    def _with_gpu(
        self, contexts: Sequence[Any], positions: torch.Tensor, hidden: torch.Tensor,
        residual: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor] | None:  # fmt: skip
        """Compute a step with the GPU; None, and its reason counted, if that cannot be."""
        rows = self._divided(contexts, len(positions))
        on_gpu = self._on_gpu
        if isinstance(rows, Reason) or on_gpu is None:
            layer_tokens.count_instead(rows if isinstance(rows, Reason) else Reason.NO_ROOM)
            return None
        kept = tuple(cache for _, _, cache, _ in contexts)
        if all(cache.numel() for cache in kept) and not on_gpu.reaches(kept):
            self._on_gpu = None
            layer_tokens.count_instead(Reason.NO_ROOM)
            return None
        try:
            step = self._prompts(on_gpu, rows, contexts, positions, hidden, residual)
        except torch.OutOfMemoryError as error:
            logger.warning(
                "the GPU that computes this rank's prompts has run out of memory (%s): from "
                "now on %s. Lower gpu.memory_utilization or --max-num-batched-tokens.",
                str(error).splitlines()[0],
                on_gpu.instead,
            )
            self._on_gpu = None
            layer_tokens.count_instead(Reason.NO_ROOM)
            return None
        if self.shared is not None:
            self.shared.interrupt()
        return step

    def _prompts(
        self, on_gpu: LayersOnGpu, rows: StepRows, contexts: Sequence[Any],
        positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Compute a step's prompts on the GPU, and decoding requests on the cores."""
        tokens = len(positions)
        caches = None
        if contexts[0][0] is not None:
            caches = Caches(
                tuple(module for _, module, _, _ in contexts),
                tuple(cache for _, _, cache, _ in contexts),
                contexts[0][3][:tokens][rows.rows],
                on_gpu.others,
            )
        decoded: list[tuple[torch.Tensor, torch.Tensor]] = []

        def decode() -> None:
            if len(rows.decoding):
                assert self.decode_step is not None
                decoded.append(self.decode_step.decode(rows, contexts, positions, hidden, residual))

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

    def _divided(self, contexts: Sequence[Any], tokens: int) -> StepRows | Reason:
        """Division of a step's rows between cores and GPU; why not, if the GPU computes none."""
        if self._adapters is not None and self._adapters.slots(tokens) is not None:
            return Reason.ADAPTERS  # they are not on the GPU
        metadata, first, cache, slots = contexts[0]
        if metadata is None:
            return one_prompt(tokens)  # a dummy run: the GPU makes ready what it needs
        if (
            slots is None
            or metadata.num_actual_tokens != tokens
            or not metadata.causal
            or metadata.dynamic_causal is not None
            or slots.dtype != torch.int64
            or not can_be_copied(cache, first.isa)
            or any(one is not metadata or other.stride() != cache.stride()
                   for one, _, other, _ in contexts)
        ):  # fmt: skip
            return Reason.UNKNOWN_ATTENTION
        limits = self._kernel.limits
        can_decode = self.decode_step is not None and decode_step.is_known(cache, first.isa)
        rows = step_rows(
            metadata.query_start_loc.tolist(), metadata.seq_lens.tolist(), metadata.block_table,
            cache.shape[2], limits.native_tokens if can_decode else 0, self._most_sent,
        )  # fmt: skip
        return rows if limits.is_for_gpu(rows.tokens) else Reason.MOSTLY_DECODING

    def one_by_one(
        self, positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the layers by single operators; arguments and result as of a call."""
        x, total = input_norm(hidden, residual, self._input.norm)
        x = product(self._kernel, x, self._input.qkv)
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

"""Which decoder layers of a model become one operator, once its weights are loaded.

A structure says what a layer's parts are (structures/); here each of them is looked at, and layers
whose parts are all known here take the place of vLLM's (decoder_layers.py).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.activation import SiluAndMul

from placement.units import GIB
from ray_hetero.errors import UnsupportedError
from ray_hetero.kernels import attention, gpu_layers
from ray_hetero.kernels.attention import Attention, as_norm
from ray_hetero.kernels.decoder_layers import DecoderLayers, Layer, register
from ray_hetero.kernels.gpu_layers import AttentionMemory, AttentionShape
from ray_hetero.kernels.gpu_prefill import GpuPrefill
from ray_hetero.kernels.layer_parts import Linear, PostAttention, QkvInput
from ray_hetero.kernels.rank_sums import RankSums
from ray_hetero.kernels.streaming_linear import StreamingLinear
from ray_hetero.kernels.structures import STRUCTURES, LayerModules, Structure
from ray_hetero.log import logger

Linears = Mapping[nn.Module, Linear]
"""Linear layers that the kernel computes, by vLLM's module."""
Memories = dict[AttentionShape, AttentionMemory | None]
"""What was made of each shape; None where there was no room."""


class FusedRun(nn.Module):  # type: ignore[misc]
    """Replaces the first layer of a fused run and computes all of it."""

    def __init__(self, run: int) -> None:
        super().__init__()
        self.run = run

    def forward(
        self, positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As a decoder layer of vLLM does, for all layers of the run."""
        result: tuple[torch.Tensor, torch.Tensor] = torch.ops.ray_hetero.decoder_layers(
            positions, hidden, residual, self.run
        )
        return result


class FusedAlready(nn.Module):  # type: ignore[misc]
    """Replaces each other layer of a fused run and hands on what it is given."""

    def forward(
        self, positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What it is given, without the positions."""
        return hidden, residual


def fuse(model: nn.Module, linears: Linears, kernel: StreamingLinear) -> int:
    """Fuse what can be fused of a model whose weights are loaded, and log what cannot.

    Args:
        model: vLLM's.
        linears: its linear layers that the kernel computes.
        kernel: what computes them.

    Returns:
        How many layers were fused.

    """
    count = 0
    memories: Memories = {}
    left: Counter[str] = Counter()
    for decoder in model.modules():
        if (own := _layers_of(decoder)) is None:
            continue
        found = [_layer(decoder, layer, linears, kernel) for layer in own]
        left.update(
            f"{type(layer).__name__}: {why}"
            for layer, why in zip(own, found, strict=True)
            if isinstance(why, str)
        )
        for first, layers in _following(found):
            memory = _memory(layers, kernel, memories)
            run = FusedRun(register(DecoderLayers(layers, kernel, memory)))
            begin = decoder.start_layer + first
            for number in range(begin, begin + len(layers)):
                decoder.layers[number] = run if number == begin else FusedAlready()
            count += len(layers)
    for why, layers_left in left.items():
        logger.info(
            "%d decoder layers are computed operator by operator (cpu.fuse_layers); %s",
            layers_left, why,
        )  # fmt: skip
    return count


def _layers_of(decoder: Any) -> list[Any] | None:
    """The layers of this stage, if a module is a model that has decoder layers."""
    if not all(hasattr(decoder, name) for name in ("layers", "start_layer", "end_layer")):
        return None
    return list(decoder.layers)[decoder.start_layer : decoder.end_layer]


def _following(found: Sequence[Layer | str]) -> Iterator[tuple[int, list[Layer]]]:
    """Layers without another kind between them, with the place of the first."""
    for _, some in itertools.groupby(enumerate(found), lambda one: isinstance(one[1], Layer)):
        numbered = [(place, layer) for place, layer in some if isinstance(layer, Layer)]
        if numbered:
            yield numbered[0][0], [layer for _, layer in numbered]


def _layer(decoder: Any, layer: Any, linears: Linears, kernel: StreamingLinear) -> Layer | str:
    """The parts of a layer of a model, or why it is left to vLLM."""
    structure = next((one for one in STRUCTURES if one.is_model(decoder)), None)
    if structure is None:
        return f"models of the class {type(decoder).__name__} are not known"
    # Hidden states that are wanted from between layers would not be there any more.
    if getattr(decoder, "aux_hidden_state_layers", ()):
        return "a drafter reads hidden states between layers"
    return layer_of(structure, layer, linears, kernel)


def layer_of(
    structure: Structure, layer: Any, linears: Linears, kernel: StreamingLinear
) -> Layer | str:
    """The parts of a layer, or why it is left to vLLM."""
    modules = structure.modules(layer)
    if modules is None:
        return "the layer, or a part of it, computes something else than those that are known"
    why = _why_unsuited(modules, linears) or _why_not_added(modules, kernel.sums)
    if why := why or attention.why_unsuited(modules):
        return why
    input_norm, norm = as_norm(modules.input_norm), as_norm(modules.norm)
    assert input_norm is not None
    assert norm is not None
    qkv, output, gate_up, down = (linears[one] for one in modules.linears)
    if kernel.sums is not None and not kernel.sums.is_first:
        output, down = (replace(one, bias=None) for one in (output, down))
    return Layer(
        QkvInput(input_norm, qkv),
        Attention(modules, kernel),
        PostAttention(output, norm, gate_up, down),
    )


def _why_unsuited(modules: LayerModules, linears: Linears) -> str:
    """Why the products and norms of a layer cannot be computed here; or ""."""
    if any(one not in linears for one in modules.linears):
        return "vLLM's own kernels compute linear layers of it"
    if type(modules.activation) is not SiluAndMul:
        return f"the activation is another one ({type(modules.activation).__name__})"
    for norm in (modules.input_norm, modules.norm):
        if as_norm(norm) is None:
            return f"a norm is another one ({type(norm).__name__})"
    return ""


def _why_not_added(modules: LayerModules, sums: RankSums | None) -> str:
    """Why the ranks of a tensor-parallel group cannot add up in native calls; or ""."""
    size = 1 if sums is None else sums.size
    if any(one.tp_size != size for one in modules.linears):
        return "tensor-parallel ranks add their products up in between"
    added = (modules.output, modules.down)
    if sums is not None and not all(one.reduce_results and one.input_is_parallel for one in added):
        return "tensor-parallel ranks add other products up than those that are known"
    return ""


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


def _has_weights(layers: Sequence[Layer], gpu: GpuPrefill) -> bool:
    linears = [linear for layer in layers
               for linear in (layer.input.qkv, *layer.parts.linears)]  # fmt: skip
    return all(gpu.suits(linear.weight.data, 1) for linear in linears)

"""Puts one operator into the place of decoder layers, once a model's weights are loaded.

Which layers that can be is in fusible_layers.py, what the operator computes in decoder_layers.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn

from placement.units import GIB
from ray_hetero.compat.models.compilation import leave_uncompiled
from ray_hetero.errors import UnsupportedError
from ray_hetero.kernels.layers import decoder_layers
from ray_hetero.kernels.layers.decoder_layers import DecoderLayers
from ray_hetero.kernels.layers.fused_modules import (
    ResidualAttention,
    keep_parts,
    register,
    replacements,
)
from ray_hetero.kernels.layers.fusible_layers import Fusible, Run
from ray_hetero.kernels.layers.layer import Layer
from ray_hetero.kernels.layers.layer_parts import AttentionShape
from ray_hetero.kernels.linear.streaming_linear import StreamingLinear
from ray_hetero.log import logger
from ray_hetero.offload.decode import shared_decode
from ray_hetero.offload.decode.column_channel import MakeColumns
from ray_hetero.offload.decode.mlp_columns import maker_of
from ray_hetero.offload.decode.share_choice import Shares, parts_text
from ray_hetero.offload.decode.shared_decode import SharedDecode
from ray_hetero.offload.group.group_layers import GroupLayers
from ray_hetero.offload.prefill import gpu_layers
from ray_hetero.offload.prefill.embedded_prompts import look_up_for
from ray_hetero.offload.prefill.gpu_layers import AttentionMemory, GpuLayers
from ray_hetero.offload.prefill.offload_gpu import OffloadGpu
from ray_hetero.offload.prefill.stage_output import StageOutput

Memories = dict[AttentionShape, AttentionMemory | None]
"""Memory made for each shape; None where there was no room."""


@dataclass(frozen=True)
class Fused:
    """Result of fusing the layers of a model."""

    layers: int
    is_shared: bool
    """Whether a GPU computes a part of decode steps."""
    first: DecoderLayers | None = None
    """Layers that are called first."""
    output: StageOutput | None = None
    """Memory of a GPU in which the last layers leave results for the next stage."""
    mixers: int = 0
    """Mixers of Mamba 2 that are operators."""


def install(
    found: Fusible, kernel: StreamingLinear, group: Sequence[GroupLayers] | None = None,
    *, sends_alone: bool = False, share: float | Literal["auto"] = 0.0, seat: str = "",
) -> Fused:  # fmt: skip
    """Put operators into the places of layers, and log what is left.

    Args:
        found: of a model.
        kernel: what computes its linear layers.
        group: by run, what computes prompts for all ranks of this one's group, if something does.
        sends_alone: whether no other rank of this stage sends results to the next one.
        share: that a GPU computes of decode steps, see `CpuConfig.decode_gpu_share`.
        seat: of this rank, see `RankSpec.place`.

    """
    memories, mixers = Memories(), _install_mixers(found)
    shares: Shares | None = None
    first: DecoderLayers | None = None
    output: StageOutput | None = None
    whole: list[tuple[GpuLayers | GroupLayers, nn.Module]] = []
    for place, run in enumerate(found.runs):
        of_group = None if group is None else group[place]
        memory = _memory(run.layers, kernel, memories) if of_group is None else None
        on_gpu: GpuLayers | GroupLayers | None = of_group
        if memory is not None:
            on_gpu = GpuLayers(run.layers, kernel.gpu, memory)
        made = DecoderLayers(run.layers, kernel, on_gpu)
        first = first or made
        if of_group is not None:
            shares = of_group.shares
            _share(made, run.layers, kernel, shares, of_group.columns_of)
        elif share and _can_share(run.layers, kernel):
            make = maker_of(run.layers, kernel.gpu, kernel)
            if shares is None:
                shares = shared_decode.shares_of(share, run.layers, kernel, make, place=seat)
            _share(made, run.layers, kernel, shares, make)
        is_sent = sends_alone and place + 1 == len(found.runs) and run.is_last
        if is_sent and made.gpu is not None and made.gpu.device.type == "cuda":
            made.output = output = StageOutput(made.gpu)
        if on_gpu is not None and run.is_whole:
            whole.append((on_gpu, run.decoder))
        _replace(run, made)
    for single in found.single:
        operator = single.operator
        single.layers[single.place] = ResidualAttention(register(operator), operator.rest)
    for caller in found.callers:
        leave_uncompiled(caller)
    for one, decoder in whole:
        look_up_for(kernel, one.gpu, decoder)
    _log(found, has_gpu=kernel.gpu is not None or group is not None)
    layers_fused = sum(len(run.layers) for run in found.runs) + len(found.single)
    return Fused(layers_fused, bool(shares and not shares.is_empty), first, output, mixers)


def install_drafter(found: Fusible, kernel: StreamingLinear) -> int:
    """Put operators of the cores into the places of a draft model's layers; returns how many.

    Args:
        found: of a draft model.
        kernel: what computes its linear layers.

    """
    for run in found.runs:
        _replace(run, DecoderLayers(run.layers, kernel))
    for caller in found.callers:
        leave_uncompiled(caller)
    _log(found, has_gpu=False)
    return sum(len(run.layers) for run in found.runs)


def _replace(run: Run, made: DecoderLayers) -> None:
    """Put what computes the layers of a run into their places."""
    layers = getattr(run.decoder, run.attribute)
    for number, one in enumerate(replacements(run.layers, register(made)), run.begin):
        if run.adapters is not None:
            keep_parts(one, layers[number])
        layers[number] = one


def _log(found: Fusible, *, has_gpu: bool) -> None:
    """Log what the operators of layers add, and which layers have none."""
    adapters = next((run.adapters for run in found.runs if run.adapters is not None), None)
    if adapters is not None:
        logger.info(
            "adapters of requests are added in the same call, up to %d at once, of rank %d and "
            "less (--max-loras, --max-lora-rank)%s",
            adapters.count,
            adapters.rank,
            "; no GPU computes whole layers of prompts with one" if has_gpu else "",
        )
    for why, layers_left in found.left.items():
        logger.info(
            "%d decoder layers are computed operator by operator (cpu.fuse_layers); %s",
            layers_left, why,
        )  # fmt: skip


def _install_mixers(found: Fusible) -> int:
    """Put operators into the places of mixers of Mamba 2, and log what is left; returns how many
    were put."""
    for mixer in found.mixers:
        mixer.install()
    if found.mixers:
        logger.info(
            "%d mixers of Mamba 2 are computed as one operator each (cpu.fuse_layers)",
            len(found.mixers),
        )
    for why, count in found.mixers_left.items():
        logger.info(
            "%d mixers of Mamba 2 are computed operator by operator (cpu.fuse_layers); %s",
            count, why,
        )  # fmt: skip
    return len(found.mixers)


def _memory(
    layers: Sequence[Layer], kernel: StreamingLinear, made: Memories
) -> AttentionMemory | None:
    """Memory for attention on the GPU, if one computes these layers and has room for it."""
    gpu, shape = kernel.gpu, gpu_layers.shape_of(layers)
    if gpu is None or shape is None or not _has_weights(layers, gpu):
        return None
    if kernel.sums is not None:
        return None  # it would have to wait for the other ranks twice a layer, see group_layers.py
    if shape in made:
        return made[shape]
    try:
        memory = made[shape] = AttentionMemory(gpu, shape)
    except UnsupportedError as error:
        made[shape] = None
        logger.warning("%s", error)
        return None
    logger.info(
        "prompts are computed by the GPU in whole layers, their attention too, which takes %.1f "
        "GiB more of its memory (cpu.prefill_on_gpu); requests that decode meanwhile stay on the "
        "cores where they have more than %d cached tokens, all together",
        memory.gpu_bytes / GIB,
        decoder_layers.most_sent(layers),
    )
    return memory


def _can_share(layers: Sequence[Layer], kernel: StreamingLinear) -> bool:
    """Whether a GPU of this rank alone can compute a part of these layers in decode steps."""
    return (
        kernel.gpu is not None
        and kernel.sums is None  # see group_layers.py
        and shared_decode.suits(layers)
        and _has_weights(layers, kernel.gpu)
    )


def _share(
    made: DecoderLayers, layers: Sequence[Layer], kernel: StreamingLinear, shares: Shares,
    make: MakeColumns,
) -> None:  # fmt: skip
    """Share decode steps of layers with the GPU that computes their prompts.

    Args:
        made: what computes the layers.
        layers: its layers.
        kernel: what computes them on the cores.
        shares: of what is given away, none if they are empty.
        make: makes what computes columns of the layers' MLPs.

    """
    columns = None if shares.is_empty else make(len(layers))
    if columns is None:
        return
    made.shared = SharedDecode(layers, kernel, columns, shares)
    logger.info(
        "in decode steps of %d layers the GPU computes up to %s, which it reads over its link "
        "while the cores compute the others (cpu.decode_gpu_share)",
        len(layers),
        parts_text(max(one.columns for one in shares.measured), " of every gate and up"),
    )


def _has_weights(layers: Sequence[Layer], gpu: OffloadGpu) -> bool:
    linears = [linear for layer in layers
               for linear in (layer.input.qkv, *layer.parts.linears)]  # fmt: skip
    return all(gpu.suits(linear.weight.data, 1) for linear in linears)

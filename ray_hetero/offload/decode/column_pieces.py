"""Columns of MLPs that a GPU has in decode steps, and the pieces of their weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ray_hetero.kernels.formats.base import BLOCK
from ray_hetero.offload.weights.read_sequence import ReadSequence
from ray_hetero.offload.weights.weight_pieces import Part, Piece, WeightSlice, WholeWeight

if TYPE_CHECKING:
    import torch

    from ray_hetero.kernels.layers.layer import Layer
    from ray_hetero.kernels.layers.layer_parts import CpuBlocks, PostAttention
    from ray_hetero.offload.prefill.offload_gpu import OffloadGpu

LEAST_COLUMNS = 512
"""Least columns of a rank's MLP that are shared out: of fewer, parts would not be whole blocks."""


@dataclass(frozen=True)
class LayerSlices:
    """The GPU's pieces of a layer, in their order."""

    columns: Sequence[WeightSlice]
    outputs: Sequence[WeightSlice]

    @property
    def all(self) -> list[WeightSlice]:
        """Pieces of both."""
        return [*self.columns, *self.outputs]

    @property
    def column_values(self) -> int:
        """Weights of its columns."""
        return sum(one.piece.values for one in self.columns)


class StepSlices:
    """The GPU's pieces of a step.

    Args:
        layers: pieces of each layer.

    """

    def __init__(self, layers: Sequence[LayerSlices]) -> None:
        self.layers = layers
        self.pieces = [placed.piece for layer in layers for placed in layer.all]
        self.most_values = max(sum(one.piece.values for one in layer.all) for layer in layers)
        """Most weights of a layer."""
        self.order = ReadSequence()


def first_block(kept: CpuBlocks) -> int:
    """The first block of columns that the GPU computes: for outputs it needs all of them."""
    return 0 if kept.outputs else kept.columns


def last_columns(parts: PostAttention, first: int, inner: int, ranks: int) -> WholeWeight:
    """The columns of all ranks' gates from a block on, rank by rank, and then of up.

    Args:
        parts: of a layer, with the weights of all ranks.
        first: block of 32 columns of each rank.
        inner: columns of a rank.
        ranks: of the group.

    """
    assert parts.gate_up is not None
    weight, columns = parts.gate_up.weight, inner - first * BLOCK
    sources = [part.source for part in WholeWeight.parts_of(weight)]
    ends = range(inner, sources[0].shape[0] + 1, inner)
    made = [
        Part(
            source,
            tuple(
                (end - columns, end, (half * ranks + own) * columns)
                for half, end in enumerate(ends)
            ),
        )
        for own, source in enumerate(sources)
    ]
    return WholeWeight(tuple(made), (len(ends) * ranks * columns, weight.shape[1]))


def last_outputs(parts: PostAttention, first: int) -> WholeWeight:
    """The outputs of an MLP from a block of 32 on, of a rank without others."""
    assert parts.down is not None
    (part,) = WholeWeight.parts_of(parts.down.weight)
    outputs, inputs = part.source.shape
    begin = first * BLOCK
    return WholeWeight((Part(part.source, ((begin, outputs, 0),)),), (outputs - begin, inputs))


def expanded_whole(
    gpu: OffloadGpu, pieces: Sequence[WeightSlice], expand: Callable[[Piece, torch.Tensor], None],
    begin: int = 0,
) -> torch.Tensor:  # fmt: skip
    """All values of pieces, [inputs, outputs], until other ones.

    Args:
        gpu: that has them, and room for them behind the products of small steps.
        pieces: of one weight, in the order of its outputs.
        expand: orders the expansion of a piece into memory [outputs, inputs].
        begin: values of others in front of them.

    """
    memory, values = gpu.memory.behind_products[begin:], [one.piece.values for one in pieces]
    for placed, into in zip(pieces, memory[: sum(values)].split(values), strict=True):
        expand(placed.piece, into)
    return memory[: sum(values)].view(-1, pieces[0].piece.inputs).t()


def inner_of(parts: PostAttention) -> int:
    """Columns of an MLP: inputs of its last matrix."""
    assert parts.down is not None
    return parts.down.weight.shape[1]


def are_alike(layers: Sequence[Layer], ranks: int = 1) -> bool:
    """Whether the columns of layers' MLPs can be shared out.

    Args:
        layers: those that `suits`, with the weights of all of these ranks.
        ranks: of the group.

    """
    parts = [layer.parts for layer in layers]
    inner = inner_of(parts[0])
    return inner >= LEAST_COLUMNS * ranks and all(
        one.gate_up is not None and one.gate_up.adapters is None and inner_of(one) == inner
        for one in parts
    )

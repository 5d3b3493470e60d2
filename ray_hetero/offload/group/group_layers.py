"""Whole decoder layers of a tensor-parallel group of CPU ranks on one GPU, in steps of many tokens.

The first rank maps what the others hold of each layer (shared_weights.py) and of its KV cache, and
has the GPU compute the layers as if it held all of them itself (gpu_layers.py): column-parallel
weights are put side by side, the products of row-parallel ones added up, and keys and values of all
heads written into the caches of the ranks that decode with them.  The other ranks decode their part
of the step meanwhile, then wait, and take the same hidden states from memory that all map.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, cast

import torch

from ray_hetero.errors import UnsupportedError
from ray_hetero.kernels.layers.kv_layouts import Caches
from ray_hetero.kernels.layers.layer_parts import AttentionShape, Linear, QkvInput
from ray_hetero.kernels.layers.step_rows import StepRows
from ray_hetero.kernels.linear.streaming_linear import StreamingLinear
from ray_hetero.offload.decode.column_channel import ColumnMemory, MakeColumns
from ray_hetero.offload.decode.column_pieces import inner_of
from ray_hetero.offload.decode.share_choice import Shares
from ray_hetero.offload.group.prompt_group import RESULTS, PromptGroup
from ray_hetero.offload.prefill.gpu_layers import (
    AttentionMemory,
    GpuLayers,
    shape_of,
)
from ray_hetero.offload.prefill.offload_gpu import OffloadGpu, PrefillBytes
from ray_hetero.offload.weights.shared_weights import PAGE, LinkedLinear, SharedWeights
from ray_hetero.offload.weights.weight_pieces import WholeWeight
from ray_hetero.planning.prefill_memory import BF16_BYTES
from ray_hetero.runtime.gpu_memory import lock_pages

if TYPE_CHECKING:
    from ray_hetero.kernels.layers.layer import Layer
    from ray_hetero.offload.prefill.stage_output import StageOutput


@dataclass(frozen=True)
class PromptTerms:
    """Terms that the ranks of a group must share for one GPU to compute their prompts."""

    runs: tuple[int, ...]
    """Layers of each run of layers that follow one another."""
    shape: AttentionShape
    """Shape of each rank's part of an attention."""
    weights: tuple[tuple[int, int], ...]
    """Shapes of each rank's linear layers, in their order."""
    hidden: int
    """Elements of a token's hidden state."""
    inner: int
    """Columns of each rank's part of an MLP."""
    tokens: int
    """Most tokens of a step."""
    from_tokens: int
    """Tokens of a step from which the GPU computes it."""

    @property
    def results_bytes(self) -> int:
        """Bytes of memory for the results of a step."""
        return RESULTS * BF16_BYTES * self.tokens * self.hidden

    def shared_bytes(self, ranks: int) -> tuple[int, ...]:
        """Bytes of memory that all ranks map, in whole pages: of results, and of ranks' columns.

        Args:
            ranks: of the group.

        """
        parts = [self.results_bytes, *[ColumnMemory.bytes_of(self.inner)] * ranks]
        return tuple(-(-nbytes // PAGE) * PAGE for nbytes in parts)


@dataclass(frozen=True, eq=False)
class PromptOffer:
    """Offer of a rank to the GPU that computes its group's prompts."""

    runs: Sequence[Sequence[Layer]]
    """Layers that follow one another."""
    weights: SharedWeights
    """Memory of all of theirs."""
    device: torch.device
    """The GPU, of which only the first rank's counts."""
    tokens: int
    """Most tokens of a step."""
    from_tokens: int
    """Tokens of a step from which the GPU computes it."""
    cores: tuple[int, ...] = ()
    """Logical CPUs of the thread that orders the GPU's work."""
    share: float | Literal["auto"] = 0.0
    """Share of decode steps that the GPU computes: `CpuConfig.decode_gpu_share`."""
    kernel: StreamingLinear | None = None
    """Kernel of decode steps, whose largest size is measured then (threshold.py)."""
    place: str = ""
    """Place of the rank, see `RankSpec.place`."""
    is_auto: bool = False
    """Whether a slow link raises `from_tokens`; the same for all ranks."""

    @property
    def linears(self) -> list[Linear]:
        """Linear layers of all layers, in their order."""
        return [one for run in self.runs for layer in run for one in linears_of(layer)]

    def terms(self) -> PromptTerms | None:
        """Terms that the others must share with this rank; None if its layers do not suit."""
        layers = [layer for run in self.runs for layer in run]
        shape = shape_of(layers) if layers else None
        if (
            shape is None
            or any(layer.mlp is not None for layer in layers)
            or not self.weights.holds(self.linears)
        ):
            return None
        return PromptTerms(
            tuple(len(run) for run in self.runs),
            shape,
            tuple(linear.weight.shape for linear in self.linears),
            layers[0].parts.output.weight.shape[0],
            inner_of(layers[0].parts),
            self.tokens,
            self.from_tokens,
        )


def linears_of(layer: Layer) -> tuple[Linear, Linear, Linear, Linear]:
    """Queries, keys and values; output; gate and up; down."""
    parts = layer.parts
    assert parts.gate_up is not None
    assert parts.down is not None
    return layer.input.qkv, parts.output, parts.gate_up, parts.down


@dataclass(frozen=True, eq=False)
class WholeLayers:
    """The layers of all ranks on the GPU of the first one."""

    runs: Sequence[GpuLayers]
    taken: PrefillBytes

    @classmethod
    def taking(
        cls, offer: PromptOffer, others: Sequence[Sequence[LinkedLinear]], shared: torch.Tensor,
        results: torch.Tensor,
    ) -> WholeLayers:  # fmt: skip
        """Take memory of the GPU for layers of which each rank has a part.

        Args:
            offer: of the first rank.
            others: linear layers of each other rank.
            shared: memory that all ranks map, uint8.
            results: of it what is for results, [2, elements], bf16.

        Raises:
            UnsupportedError: the GPU has too little memory left, or cannot read the host's.

        """
        of_ranks = [iter(one) for one in others]
        runs = [[whole_layer(one, [[next(rank) for _ in linears_of(one)] for rank in of_ranks])
                 for one in run] for run in offer.runs]  # fmt: skip
        gpu = OffloadGpu(offer.device, offer.tokens, offer.cores)
        for run in runs:
            for layer in run:
                for linear in linears_of(layer):
                    gpu.add_whole(cast("WholeWeight", linear.weight))
        first = offer.runs[0][0]
        taken = gpu.take(first.parts.output.weight.shape[0])
        own, ranks = first.attention.shape, 1 + len(others)
        shape = AttentionShape(ranks * own.heads, ranks * own.kv_heads, own.size)
        memory = AttentionMemory(gpu, shape)
        if gpu.device.type == "cuda":
            try:
                lock_pages(shared)
            except RuntimeError as error:
                raise UnsupportedError(
                    f"memory for results cannot be locked: {str(error).splitlines()[0]}"
                ) from None
        made = [GpuLayers(run, gpu, memory, results) for run in runs]
        return cls(made, PrefillBytes(taken.weight_bytes, taken.gpu_bytes + memory.gpu_bytes))


def whole_layer(layer: Layer, others: Sequence[Sequence[LinkedLinear]]) -> Layer:
    """A layer with all ranks' parts of its linear layers.

    Args:
        layer: as the first rank has it.
        others: of each other rank, what `linears_of` gives there.

    """
    shape, parts = layer.attention.shape, layer.parts
    ranks: list[Any] = [linears_of(layer), *others]
    qkv, output, gate_up, down = zip(*ranks, strict=True)
    outputs = gate_up[0].weight.shape[0]
    inner = [outputs // 2] * 2 if parts.is_gated else [outputs]
    return replace(
        layer,
        input=QkvInput(layer.input.norm, _side_by_side(qkv, [shape.queries, *[shape.keys] * 2])),
        parts=replace(
            parts,
            output=_added_up(output),
            gate_up=_side_by_side(gate_up, inner),
            down=_added_up(down),
        ),
    )


def _side_by_side(ranks: Sequence[Any], sizes: Sequence[int]) -> Linear:
    """A column-parallel layer, see `WholeWeight.by_columns`."""
    whole = WholeWeight.by_columns([one.weight for one in ranks], sizes)
    bias = None
    if ranks[0].bias is not None:
        kinds = zip(*(one.bias.split(list(sizes)) for one in ranks), strict=True)
        bias = torch.cat([one for kind in kinds for one in kind])
    return Linear(cast("Any", whole), bias)


def _added_up(ranks: Sequence[Any]) -> Linear:
    """A row-parallel layer, whose bias the first rank has."""
    return Linear(cast("Any", WholeWeight.by_rows([one.weight for one in ranks])), ranks[0].bias)


class GroupLayers:
    """Computes layers that follow one another for all ranks of a group.

    Args:
        group: what the ranks tell each other by.
        layers: of all ranks, on the GPU; None where this rank is not the first.
        tokens: most of a step.
        from_tokens: of a step, from which the GPU computes it.
        shares: of MLPs that it computes in decode steps.
        columns_of: makes what computes columns of MLPs in them.

    """

    instead = "the cores of its group's ranks compute them, several times as long"
    """Consequence of the GPU's running out of memory, for messages."""
    others: tuple[tuple[torch.Tensor, ...], ...] = ()
    """Caches of the other ranks, in the first."""

    def __init__(
        self, group: PromptGroup, layers: GpuLayers | None, *, tokens: int, from_tokens: int,
        shares: Shares, columns_of: MakeColumns,
    ) -> None:  # fmt: skip
        assert (layers is not None) == group.is_first
        self.columns_of = columns_of
        self.shares = shares
        self.from_tokens = from_tokens
        self.tokens = tokens
        """Most tokens of a step."""
        self._group = group
        self._layers = layers
        self._has_caches = False
        self._telling = ExitStack()
        """Telling the others how a step ends that `finish` ends."""

    @property
    def gpu(self) -> OffloadGpu | None:
        """GPU that computes the layers; None where this rank is not the first."""
        return None if self._layers is None else self._layers.gpu

    def reaches(self, caches: Sequence[torch.Tensor]) -> bool:
        """Let the first rank map the others' caches; the same on all ranks."""
        if not self._has_caches:
            found = self._group.caches(caches)
            if found is None:
                return False
            self.others, self._has_caches = found, True
            if self._layers is not None:
                for some in (caches, *found):
                    self._layers.reaches(some)
        return True

    def __call__(
        self,
        positions: torch.Tensor,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        rows: StepRows,
        caches: Caches | None,
        meanwhile: Callable[[], None],
        output: StageOutput | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the layers as `GpuLayers` does, on all ranks at once with the same result.

        With an output, which only the first rank has, the others' results have no values of this
        step: what uses it knows that nobody needs them.

        Raises:
            torch.OutOfMemoryError: the GPU's memory has run out, on all ranks.
            torch.distributed.DistError: another rank has ended, is late or has failed.

        """
        decoding, has_requests = len(rows.decoding), caches is not None
        self._group.begin((len(positions), rows.tokens, decoding, int(has_requests)))
        shape = rows.tokens, hidden.shape[1]
        if self._layers is None:
            meanwhile()
            if self._group.wait():
                # Nobody reads them, and memory that nothing is written to costs nothing.
                return hidden.new_empty(shape), hidden.new_empty(shape)
        else:
            with ExitStack() as telling:
                telling.enter_context(self._group.telling(stays=output is not None))
                found = self._on_first(
                    self._layers, positions, hidden, residual, rows, caches, meanwhile, output
                )
                if not self._layers.is_written:
                    self._telling = telling.pop_all()
            if output is not None:
                return found
        # The next step overwrites them once all ranks have come to it.
        x, total = _copies(self._group.results[:, : shape[0] * shape[1]])
        return x.view(shape), total.view(shape)

    @staticmethod
    def _on_first(
        layers: GpuLayers, positions: torch.Tensor, hidden: torch.Tensor,
        residual: torch.Tensor | None, rows: StepRows, caches: Caches | None,
        meanwhile: Callable[[], None], output: StageOutput | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Compute a step in the first rank, which decodes with the others whatever the GPU does."""
        has_decoded = False

        def decode() -> None:
            nonlocal has_decoded
            has_decoded = True
            meanwhile()

        try:
            return layers(positions, hidden, residual, rows, caches, decode, output)
        except torch.OutOfMemoryError:
            if not has_decoded:
                meanwhile()
            raise

    def finish(self) -> None:
        """Write what is left of keys and values, in the first rank; then the others go on.

        Raises:
            RuntimeError: as `GpuLayers.finish`.
            TimeoutError: the same.
            torch.distributed.DistError: another rank has ended.

        """
        with self._telling:
            if self._layers is not None:
                self._layers.finish()


def _copies(results: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x, total = results
    return x.clone(), total.clone()

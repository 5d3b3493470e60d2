"""The operator that computes decoder layers, and modules in the place of those of vLLM's models.

The first layer of a fused run computes all of it, the others hand on what they are given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import nn

from ray_hetero.kernels.custom_ops import register_op
from ray_hetero.kernels.layers.layer import Layer
from ray_hetero.kernels.layers.post_attention import Results, results_like
from ray_hetero.kernels.layers.structures import Calls

FusedLayers = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], Results]
"""Layers that are computed as one operator, maybe up to an MLP or experts; called as
`DecoderLayers` and `LayerOperator` are."""
_library = torch.library.Library("ray_hetero", "FRAGMENT")
_layers: list[FusedLayers] = []
"""Layers of this process, by the number that the operator is called with."""
Kind = TypeVar("Kind")


def register(layers: FusedLayers) -> int:
    """Register layers with the operator; returns the number that it is called with."""
    _layers.append(layers)
    return len(_layers) - 1


def registered(kind: type[Kind]) -> list[Kind]:
    """Layers of one class that this process has registered."""
    return [one for one in _layers if isinstance(one, kind)]


def _decoder_layers(
    positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None, number: int
) -> Results:
    return _layers[number](positions, hidden, residual)


def _shapes(
    positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None, number: int
) -> Results:
    return results_like(hidden)


register_op(_library, "decoder_layers", _decoder_layers, _shapes)


class FusedRun(nn.Module):  # type: ignore[misc]
    """Replaces a layer of a fused run: the first computes all of it.

    Args:
        number: that the operator is called with; None behind the first layer.

    """

    def __init__(self, number: int | None = None) -> None:
        super().__init__()
        self.number = number

    def _added(
        self, positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None
    ) -> Results:
        result: Results = torch.ops.ray_hetero.decoder_layers(
            positions, hidden, residual, self.number
        )
        return result


class ResidualRun(FusedRun):
    """`Calls.RESIDUAL`; what some models give their layers beside is None in those known."""

    def forward(
        self,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        residual: torch.Tensor | None,
        **nothing: None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute the layers, or hand on what is given."""
        if self.number is None:
            return hidden_states, residual
        return self._added(positions, hidden_states, residual)


class SumRun(FusedRun):
    """`Calls.SUM`."""

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """Compute the layers, or hand on what is given."""
        if self.number is None:
            return hidden_states
        added, residual = self._added(positions, hidden_states, None)
        return residual + added


class SumAndMoreRun(FusedRun):
    """`Calls.SUM_AND_MORE`."""

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> Results:
        """Compute the layers, or hand on what is given."""
        if self.number is None:
            return hidden_states, hidden_states
        added, residual = self._added(positions, hidden_states, None)
        return residual + added, residual


class RunWithoutPositions(FusedRun):
    """`Calls.WITHOUT_POSITIONS`."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Compute the layers, or hand on what is given."""
        if self.number is None:
            return hidden_states
        # Nothing is rotated by them.
        positions = hidden_states.new_zeros(hidden_states.shape[0], dtype=torch.int64)
        added, residual = self._added(positions, hidden_states, None)
        return residual + added


class AttentionRun(FusedRun):
    """Replaces a layer whose MLP, or experts, stay vLLM's module.

    Args:
        number: that the operator is called with, which gives what the module is given.
        mlp: vLLM's module; None where the operator computes all.

    """

    use_attn_reduce_scatter_for_moe = False
    """Attribute that vLLM's model reads of its first layer; see `gated_delta_modules`."""

    def __init__(self, number: int, mlp: nn.Module | None) -> None:
        super().__init__(number)
        self.mlp = mlp

    def _computed(
        self, positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None
    ) -> Results:
        given, total = self._added(positions, hidden, residual)
        return given if self.mlp is None else self.mlp(given), total


class ResidualAttention(AttentionRun):
    """`Calls.RESIDUAL`; nothing scales queries in the models that are known."""

    def forward(
        self,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        residual: torch.Tensor | None,
        scaling: None = None,
    ) -> Results:
        """Compute the layer."""
        return self._computed(positions, hidden_states, residual)


class HiddenFirstAttention(AttentionRun):
    """`Calls.HIDDEN_FIRST`."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        positions: torch.Tensor,
        residual: torch.Tensor | None,
    ) -> Results:
        """Compute the layer."""
        return self._computed(positions, hidden_states, residual)


RUNS: dict[Calls, type[FusedRun]] = {
    Calls.RESIDUAL: ResidualRun,
    Calls.SUM: SumRun,
    Calls.SUM_AND_MORE: SumAndMoreRun,
    Calls.WITHOUT_POSITIONS: RunWithoutPositions,
}
"""Class that takes the place of each layer of a run, by form of the calls."""
WITH_MODULES: dict[Calls, type[AttentionRun]] = {
    Calls.RESIDUAL: ResidualAttention,
    Calls.HIDDEN_FIRST: HiddenFirstAttention,
}
"""Class that takes the place of a layer whose MLP stays vLLM's module, by form of the calls."""


def replacements(layers: Sequence[Layer], number: int) -> Iterator[nn.Module]:
    """Modules in the places of layers that are one operator, by its number."""
    first = layers[0]
    if first.mlp is not None:
        yield WITH_MODULES[first.calls](number, first.mlp)
        return
    kind = RUNS[first.calls]
    yield kind(number)
    yield from (kind() for _ in layers[1:])


def keep_parts(replacement: nn.Module, layer: nn.Module) -> None:
    """Keep the parts of a layer in the module that replaces it, under their former names.

    vLLM looks for the modules that adapters are loaded into in the model, also when it makes
    adapters of zeros for its warm-up; a stage in which it finds none fails.
    """
    own = dict(replacement.named_children())
    for name in own:
        delattr(replacement, name)
    # A module that has two names is found under the first.
    for name, part in (*layer.named_children(), *own.items()):
        replacement.add_module(name, part)

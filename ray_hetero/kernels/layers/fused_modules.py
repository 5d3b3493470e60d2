"""Modules in the place of decoder layers of vLLM's models: they call the operator.

The first layer of a fused run computes all of it, the others hand on what they are given.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ray_hetero.kernels.layers.structures import Calls


class FusedRun(nn.Module):  # type: ignore[misc]
    """Replaces the first layer of a fused run and computes all of it.

    Args:
        run: the number that the operator is called with.

    """

    def __init__(self, run: int) -> None:
        super().__init__()
        self.run = run

    def _added(
        self, positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        result: tuple[torch.Tensor, torch.Tensor] = torch.ops.ray_hetero.decoder_layers(
            positions, hidden, residual, self.run
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
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the layers."""
        return self._added(positions, hidden_states, residual)


class ResidualDone(nn.Module):  # type: ignore[misc]
    """Module of a layer behind a `ResidualRun`, which has already computed it."""

    def forward(
        self,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        residual: torch.Tensor,
        **nothing: None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hand on what is given."""
        return hidden_states, residual


class AttentionRun(FusedRun):
    """Replaces a layer whose MLP, or experts, stay vLLM's module.

    Args:
        run: the number that the operator is called with, which gives what the module is given.
        mlp: vLLM's module.

    """

    def __init__(self, run: int, mlp: nn.Module) -> None:
        super().__init__(run)
        self.mlp = mlp

    def _computed(
        self, positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        given, total = self._added(positions, hidden, residual)
        return self.mlp(given), total


class ResidualAttention(AttentionRun):
    """`Calls.RESIDUAL`."""

    def forward(
        self,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        residual: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the layer."""
        return self._computed(positions, hidden_states, residual)


class HiddenFirstAttention(AttentionRun):
    """`Calls.HIDDEN_FIRST`."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        positions: torch.Tensor,
        residual: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the layer."""
        return self._computed(positions, hidden_states, residual)


class LatentAttentionRun(AttentionRun):
    """`Calls.RESIDUAL`, of a layer with multi-head latent attention."""

    def forward(
        self,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        residual: torch.Tensor | None,
        scaling: None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the layer; nothing scales queries in the models that are known."""
        given, total = torch.ops.ray_hetero.latent_layer(
            positions, hidden_states, residual, self.run
        )
        return self.mlp(given), total


class GatedDeltaRun(AttentionRun):
    """Replaces a layer with a Gated DeltaNet; `mlp` is None where the operator computes it too."""

    use_attn_reduce_scatter_for_moe = False
    """Attribute that vLLM's model reads of its first layer; see `gated_delta_modules`."""

    def forward(
        self,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        residual: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the layer, in which no position counts."""
        given, total = torch.ops.ray_hetero.gated_delta_layer(hidden_states, residual, self.run)
        return given if self.mlp is None else self.mlp(given), total


class SumRun(FusedRun):
    """`Calls.SUM`."""

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """Compute the layers."""
        added, residual = self._added(positions, hidden_states, None)
        return residual + added


class SumDone(nn.Module):  # type: ignore[misc]
    """Module of a layer behind a `SumRun`, which has already computed it."""

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """Hand on what is given."""
        return hidden_states


class SumAndMoreRun(FusedRun):
    """`Calls.SUM_AND_MORE`."""

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the layers."""
        added, residual = self._added(positions, hidden_states, None)
        return residual + added, residual


class SumAndMoreDone(nn.Module):  # type: ignore[misc]
    """Module of a layer behind a `SumAndMoreRun`, which has already computed it."""

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hand on what is given."""
        return hidden_states, hidden_states


class RunWithoutPositions(FusedRun):
    """`Calls.WITHOUT_POSITIONS`."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Compute the layers."""
        # Nothing is rotated by them.
        positions = hidden_states.new_zeros(hidden_states.shape[0], dtype=torch.int64)
        added, residual = self._added(positions, hidden_states, None)
        return residual + added


class DoneWithoutPositions(nn.Module):  # type: ignore[misc]
    """Module of a layer behind a `RunWithoutPositions`, which has already computed it."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Hand on what is given."""
        return hidden_states


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


MODULES: dict[Calls, tuple[type[FusedRun], type[Any]]] = {
    Calls.RESIDUAL: (ResidualRun, ResidualDone),
    Calls.SUM: (SumRun, SumDone),
    Calls.SUM_AND_MORE: (SumAndMoreRun, SumAndMoreDone),
    Calls.WITHOUT_POSITIONS: (RunWithoutPositions, DoneWithoutPositions),
}
"""Classes that take the place of the first layer and of each other one, by form of the calls."""
WITH_MODULES: dict[Calls, type[AttentionRun]] = {
    Calls.RESIDUAL: ResidualAttention,
    Calls.HIDDEN_FIRST: HiddenFirstAttention,
}
"""Class that takes the place of a layer whose MLP stays vLLM's module, by form of the calls."""

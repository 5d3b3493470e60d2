"""What is to be known of a family of decoder layers before they can be computed as one operator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from ray_hetero.compat.decoder_classes import has_forward_of


@dataclass(frozen=True)
class LayerModules:
    """vLLM's modules of a decoder layer, by the part that each of them is."""

    input_norm: Any
    """Before the attention."""
    qkv: Any
    """Queries, keys and values, one behind the other."""
    head_norms: tuple[Any, ...]
    """Of each head's queries and of its keys; none in most models."""
    rotary: Any
    """Turns queries and keys by their positions."""
    attend: Any
    """vLLM's `Attention`."""
    output: Any
    """What the attention's results are multiplied with."""
    norm: Any
    """Before the multi-layer perceptron."""
    gate_up: Any
    """Its gate, and what the gate lets through, one behind the other."""
    activation: Any
    down: Any

    @property
    def linears(self) -> tuple[Any, ...]:
        """Linear layers in the order of their products."""
        return self.qkv, self.output, self.gate_up, self.down


class Structure(Protocol):
    """A family of decoder models whose layers have the same parts in the same order."""

    def is_model(self, model: Any) -> bool:
        """Whether a model of vLLM's hands on to a layer what the one before it gave.

        Its layers are in `layers`, those of this stage from `start_layer` to `end_layer`.
        """

    def modules(self, layer: Any) -> LayerModules | None:
        """The modules of a layer; None if its classes compute something else."""


def is_made_of(layer: Any, names: tuple[str, ...], parts: dict[str, tuple[str, ...]]) -> bool:
    """Whether a layer and its parts compute what known classes do.

    Args:
        layer: of any class.
        names: of its classes, see `has_forward_of`.
        parts: names of classes by attribute of the layer.

    """
    return has_forward_of(layer, *names) and all(
        has_forward_of(getattr(layer, attribute, None), *classes)
        for attribute, classes in parts.items()
    )

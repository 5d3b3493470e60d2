"""Base of the families of decoder layers that are computed as one operator."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ray_hetero.compat.models.decoder_classes import has_forward_of


class Calls(enum.Enum):
    """How a model calls its layers, and what they give."""

    HIDDEN_FIRST = "(hidden, positions, residual) → hidden, still to be added, and residual"
    RESIDUAL = "(positions, hidden, residual) → hidden, still to be added, and residual"
    SUM = "(positions, hidden) → hidden"
    SUM_AND_MORE = "(positions, hidden) → hidden, and what nobody uses"
    WITHOUT_POSITIONS = "(hidden) → hidden"


@dataclass(frozen=True)
class LayerModules:
    """vLLM's modules of a decoder layer, by the part that each of them is."""

    input_norm: Any
    """Norm of the attention's input."""
    qkv: Any
    """Queries, keys and values, one behind the other."""
    head_norms: tuple[Any, ...]
    """Norms of each head's queries and of its keys; none in most models."""
    rotary: Any
    """Rotary embedding of queries and keys by their positions; None where there is none."""
    attend: Any
    """vLLM's `Attention`."""
    output: Any
    """Linear layer that the attention's results are multiplied with."""
    norm: Any
    """Norm of the MLP's input."""
    gate_up: Any = None
    """Gate and what the gate lets through, one behind the other; or the MLP's first layer alone."""
    activation: Any = None
    down: Any = None
    mlp: Any = None
    """Module of vLLM's in place of `gate_up`, `activation` and `down`: experts, or another MLP."""
    output_norm: Any = None
    """Norm of the attention's output before it is added to the residual; None for none."""
    down_norm: Any = None
    """Norm of the MLP's output before it is added to the residual; None for none."""
    multiplier: float = 1.0
    """Factor on what attention and MLP add to the residual."""
    is_parallel: bool = False
    """Whether the MLP's norm is of the residual before the attention is added."""

    @property
    def norms(self) -> tuple[Any, Any, Any, Any]:
        """Norms of tokens: before the attention, before the MLP, and of what each adds."""
        return self.input_norm, self.norm, self.output_norm, self.down_norm

    @property
    def linears(self) -> tuple[Any, ...]:
        """Linear layers in the order of their products."""
        own = (self.qkv, self.output)
        return own if self.mlp is not None else (*own, self.gate_up, self.down)


class Structure(ABC):
    """A family of decoder models whose layers have the same parts in the same order."""

    models: ClassVar[tuple[str, ...]]
    """Classes of models that hand on to a layer what the one before it gave, only."""
    names: ClassVar[tuple[str, ...]]
    """Classes of the layers."""
    parts: ClassVar[Mapping[str, tuple[str, ...]]]
    """Classes of a layer's parts, by attribute of the layer."""
    layers: ClassVar[str] = "layers"
    """Attribute of a model that holds its layers; those of this stage are from `start_layer` to
    `end_layer`."""
    calls: ClassVar[Calls]
    """Form in which a model calls its layers."""

    def is_model(self, model: Any) -> bool:
        """Whether a model of vLLM's is one of this family."""
        return has_forward_of(model, *self.models)

    def modules(self, layer: Any) -> LayerModules | None:
        """The modules of a layer; None if its classes compute something else."""
        return self._modules(layer) if is_made_of(layer, self.names, self.parts) else None

    @abstractmethod
    def _modules(self, layer: Any) -> LayerModules | None:
        """The modules of a layer of the known classes; None for a variant that is not known."""


def is_made_of(layer: Any, names: tuple[str, ...], parts: Mapping[str, tuple[str, ...]]) -> bool:
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


def named_as_llamas(
    layer: Any, attention: Any, *, rotary: Any, gated: Any = None, **others: Any
) -> LayerModules:
    """The modules of a layer whose attributes have the names of Llama's.

    Args:
        layer: with a norm before its attention and one before its MLP.
        attention: of the layer.
        rotary: of the attention; None where nothing turns queries and keys.
        gated: the layer's MLP, if it has a gate and is computed with the layer.
        others: fields of `LayerModules` that Llama's layers do not have, or call otherwise.

    """
    named = {
        "input_norm": layer.input_layernorm,
        "qkv": attention.qkv_proj,
        "head_norms": tuple(
            getattr(attention, name) for name in ("q_norm", "k_norm") if hasattr(attention, name)
        ),
        "rotary": rotary,
        "attend": attention.attn,
        "output": attention.o_proj,
        "norm": layer.post_attention_layernorm,
    }
    if gated is not None:
        named |= {
            "gate_up": gated.gate_up_proj,
            "activation": gated.act_fn,
            "down": gated.down_proj,
        }
    return LayerModules(**(named | others))

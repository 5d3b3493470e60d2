"""Families of decoder layers, a file for each; which of them a model is of."""

from __future__ import annotations

from typing import Any

from ray_hetero.kernels.layers.structures.base import Calls, LayerModules, Structure, is_made_of
from ray_hetero.kernels.layers.structures.experts import Experts, GptOss
from ray_hetero.kernels.layers.structures.falcon import Falcon
from ray_hetero.kernels.layers.structures.gemma import Gemma
from ray_hetero.kernels.layers.structures.granite import Granite, StableLm
from ray_hetero.kernels.layers.structures.llama import Llama
from ray_hetero.kernels.layers.structures.opt import Opt

__all__ = [
    "STRUCTURES", "Calls", "LayerModules", "Structure", "is_made_of", "layers_attribute",
    "structure_of",
]  # fmt: skip

STRUCTURES: tuple[Structure, ...] = (
    Llama(), Gemma(), Granite(), StableLm(), Opt(), Falcon(), Experts(), GptOss(),
)  # fmt: skip


def structure_of(model: Any, layer: Any) -> tuple[Structure, LayerModules] | None:
    """The structure of a layer of a model of vLLM's, and its modules; None if it is not known."""
    for structure in STRUCTURES:
        if structure.is_model(model) and (modules := structure.modules(layer)) is not None:
            return structure, modules
    return None


def layers_attribute(decoder: Any) -> str | None:
    """Attribute of a model that holds its decoder layers; None for another module."""
    known = [one.layers for one in STRUCTURES if one.is_model(decoder)]
    for name in (*known, "layers"):
        if all(hasattr(decoder, one) for one in (name, "start_layer", "end_layer")):
            return name
    return None

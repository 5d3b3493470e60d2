"""Families of decoder layers, a file for each; which of them a model is of."""

from __future__ import annotations

from ray_hetero.kernels.structures.base import LayerModules, Structure
from ray_hetero.kernels.structures.llama import Llama

__all__ = ["STRUCTURES", "LayerModules", "Structure"]

STRUCTURES: tuple[Structure, ...] = (Llama(),)

"""Layers that use what an earlier layer has computed, which must be on the same stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from placement.model.config import Config
from placement.model.undivided import divided, uses_of
from ray_hetero.errors import UnsupportedError


def refuse_divided_layers(config: Mapping[str, Any], layers: Sequence[int]) -> None:
    """Refuse stages that divide a layer from an earlier one whose results it uses.

    Args:
        config: configuration of the language model.
        layers: layers of each stage.

    Raises:
        UnsupportedError: says which layers, and which stages they are on.

    """
    if problem := divided(uses_of(Config(config)), tuple(layers)):
        raise UnsupportedError(problem)

"""A stage whose model has taken other layers than its own is refused."""

from __future__ import annotations

import pytest
from torch import nn
from vllm.model_executor.models.utils import PPMissingLayer

from ray_hetero.compat.stage_layers import check_layers_of_stage
from ray_hetero.errors import UnsupportedError


def stage(*present: int) -> nn.Module:
    """A model of six layers, with the weights of these."""
    model = nn.Module()
    model.layers = nn.ModuleList(
        nn.Linear(2, 2) if at in present else PPMissingLayer() for at in range(6)
    )
    return model


def test_a_stage_with_its_own_layers_is_taken() -> None:
    check_layers_of_stage(stage(2, 3), range(2, 4), 6)
    check_layers_of_stage(stage(*range(6)), range(6), 6)


def test_layers_that_no_stage_or_two_have_are_named() -> None:
    with pytest.raises(UnsupportedError, match="has not taken the weights of layers 3, 4 of its"):
        check_layers_of_stage(stage(2), range(2, 5), 6)
    with pytest.raises(UnsupportedError, match="layers 0, 1, which another stage has too: this"):
        check_layers_of_stage(stage(0, 1, 2, 3), range(2, 4), 6)

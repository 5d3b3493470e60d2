"""Stages that divide layers which belong together are refused."""

from __future__ import annotations

import pytest

from ray_hetero.errors import UnsupportedError
from ray_hetero.preflight.layers_between_stages import refuse_divided_layers

# The last 20 of 35 layers use the caches of layers 13 and 14.
KINDS = (["sliding_attention"] * 4 + ["full_attention"]) * 7
SHARED = {"num_kv_shared_layers": 20, "layer_types": KINDS}
SKIPS = {"bskcn_1": [12, 20], "bskcn_3": [16, 24], "bskcn_2": [20], "bskcn_4": [32]}


def test_keys_and_values_of_another_stage_are_refused() -> None:
    refuse_divided_layers(SHARED, [35])
    refuse_divided_layers(SHARED, [13, 22])
    with pytest.raises(UnsupportedError, match=r"layer 17 .* of layer 13, and stages of 17 \+ 18"):
        refuse_divided_layers(SHARED, [17, 18])
    with pytest.raises(
        UnsupportedError, match=r"layers 13 to 34 on one stage, .* layers: \[13, 22\]"
    ):
        refuse_divided_layers(SHARED, [14, 21])


def test_hidden_states_that_another_stage_has_kept_are_refused() -> None:
    refuse_divided_layers(SKIPS, [12, 36])
    refuse_divided_layers(SKIPS, [33, 15])
    with pytest.raises(UnsupportedError, match="layer 24 of this model uses the kept hidden"):
        refuse_divided_layers(SKIPS, [24, 24])


def test_other_models_may_be_divided_anywhere() -> None:
    refuse_divided_layers({"num_kv_shared_layers": 0, "layer_types": KINDS}, [1, 34])
    refuse_divided_layers({}, [2, 2])

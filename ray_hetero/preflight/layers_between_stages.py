"""Layers that use what an earlier layer has computed, which must be on the same stage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from ray_hetero.errors import UnsupportedError


def refuse_divided_layers(config: Mapping[str, Any], layers: Sequence[int]) -> None:
    """Refuse stages that divide a layer from an earlier one whose results it uses.

    Between stages hidden states are sent, and nothing that single layers keep.

    Args:
        config: configuration of the language model.
        layers: layers of each stage.

    Raises:
        UnsupportedError: says which layers, and which stages they are on.

    """
    ends = list(accumulate(layers))
    uses = list(_uses(config))
    for layer, earlier, what in uses:
        stage, other = (sum(end <= at for end in ends) for at in (layer, earlier))
        if stage != other:
            first, last = min(one for _, one, _ in uses), max(one for one, _, _ in uses)
            split = f", with two stages by layers: [{first}, {ends[-1] - first}]" if first else ""
            raise UnsupportedError(
                f"layer {layer} of this model uses {what} of layer {earlier}, and stages of "
                f"{' + '.join(map(str, layers))} layers have them on stages {stage} and {other}. "
                f"Put layers {first} to {last} on one stage{split}, or write a layout of one stage."
            )


def _uses(config: Mapping[str, Any]) -> Iterator[tuple[int, int, str]]:
    """A layer, the earlier one, and what it uses."""
    shared = config.get("num_kv_shared_layers") or 0
    kinds = config.get("layer_types") or ()
    if shared and kinds:
        first = len(kinds) - shared
        for layer in range(first, len(kinds)):
            same = [at for at in range(first) if kinds[at] == kinds[layer]]
            if same:
                yield layer, same[-1], "keys and values"
    for keeps, uses in (("bskcn_1", "bskcn_3"), ("bskcn_2", "bskcn_4")):
        for layer in config.get(uses) or ():
            before = [at for at in config.get(keeps) or () if at <= layer]
            if before:
                yield layer, before[-1], "the kept hidden states"

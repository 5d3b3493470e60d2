"""Layers that use what an earlier layer has computed, which must be on the same stage.

Between stages hidden states are sent, and nothing that single layers keep.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from placement.model.config import Config


@dataclass(frozen=True)
class Use:
    """A layer that uses what an earlier one keeps."""

    layer: int
    earlier: int
    what: str
    """Name of what is used, in the plural."""


def uses_of(config: Config) -> tuple[Use, ...]:
    """Tensors and caches that layers of a model use of each other.

    Args:
        config: of the decoder.

    Raises:
        UnknownModelError: a key that tells it has a wrong value.

    """
    return (*_shared_caches(config), *_kept_states(config))


def _shared_caches(config: Config) -> Iterator[Use]:
    """Gemma 3n and 4: the last layers use the cache of the last earlier layer of their kind."""
    shared = config.number_or(0, "num_kv_shared_layers", least=0)
    kinds = config.texts("layer_types") if shared else ()
    first = max(0, len(kinds) - shared)
    for layer in range(first, len(kinds)):
        same = [at for at in range(first) if kinds[at] == kinds[layer]]
        if same:
            yield Use(layer, same[-1], "keys and values")


def _kept_states(config: Config) -> Iterator[Use]:
    """Solar: some layers add the hidden states that an earlier one has kept."""
    for keeps, uses in (("bskcn_1", "bskcn_3"), ("bskcn_2", "bskcn_4")):
        if not (config.has(keeps) and config.has(uses)):
            continue
        for layer in config.numbers(uses):
            before = [at for at in config.numbers(keeps) if at <= layer]
            if before:
                yield Use(layer, before[-1], "the kept hidden states")


def barred_cuts(uses: tuple[Use, ...]) -> frozenset[int]:
    """Numbers of the layers that no stage may begin with."""
    return frozenset(at for use in uses for at in range(use.earlier + 1, use.layer + 1))


def divided(uses: tuple[Use, ...], layers: tuple[int, ...]) -> str:
    """Why stages of so many layers do not compute a model; empty where they do."""
    ends = list(accumulate(layers))
    for use in uses:
        stage, other = (sum(end <= at for end in ends) for at in (use.layer, use.earlier))
        if stage != other:
            first, last = min(one.earlier for one in uses), max(one.layer for one in uses)
            split = f", with two stages by layers: [{first}, {ends[-1] - first}]" if first else ""
            return (
                f"layer {use.layer} of this model uses {use.what} of layer {use.earlier}, and "
                f"stages of {' + '.join(map(str, layers))} layers have them on stages {stage} and "
                f"{other}. Put layers {first} to {last} on one stage{split}, or write a layout of "
                "one stage."
            )
    return ""

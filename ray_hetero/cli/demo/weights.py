"""Random weights under which greedy decoding is a fair test.

In a plain random model the two best tokens are often a rounding error apart, and decoding soon
repeats itself.  So each readable token favours one successor, all of them in one cycle, and what
the layers add from the context is large enough to overrule that now and then.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

SUCCESSOR_SHARE = 0.9
"""Share of an output row that is its predecessor's embedding; the rest is noise."""
QUIET = 0.25
"""Factor on the output rows of tokens that are no readable text, so that they rarely win."""
LOGIT_SCALE = 3.0
"""Standard deviation of the logits."""
GAINS = {
    "q_proj": 1.4,
    "k_proj": 1.4,
    "o_proj": 1.5,
    "out_proj": 1.3,
    "down_proj": 1.5,
    "fc2": 1.25,
    "gate": 8.0,  # a router that is sure of its experts
}
"""Standard deviation of a projection's output for unit input; 1 for those not listed."""


def fill(model: Any, seed: int, readable: Sequence[int]) -> None:
    """Overwrite all weights of a `transformers` model.

    Args:
        model: a causal language model; gemma's conventions hold where embeddings are tied.
        seed: each weight depends on this and on its own name only.
        readable: ids of the tokens that may appear in greedy output.

    """
    import torch

    order = torch.from_numpy(_generator(seed, "order").permutation(readable))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = _generator(seed, name).standard_normal(weight.shape, dtype="float32")
            weight.copy_(
                _scaled(name, torch.from_numpy(noise), is_tied=model.config.tie_word_embeddings)
            )
        if model.config.tie_word_embeddings:
            _remember_successors(model, order)
        else:
            _point_to_successors(model, order)
        _quiet(model.get_output_embeddings().weight, readable)


def _generator(seed: int, name: str) -> Any:
    """NumPy's, whose numbers do not depend on the processor's vector width as torch's do."""
    import numpy

    return numpy.random.default_rng(zlib.crc32(f"{seed}/{name}".encode()))


def _scaled(name: str, noise: Any, *, is_tied: bool) -> Any:
    parts = name.split(".")
    layer = parts[-1] if parts[-1] not in ("weight", "bias") else parts[-2]
    fan_in = noise.shape[-1]
    if parts[-1] == "bias":
        return 0.1 * noise
    if "norm" in layer:
        return _norm_mean(name, layer, is_tied=is_tied) + 0.1 * noise
    if layer == "embed_positions":
        return 0.3 * noise
    if layer == "embed_tokens":
        return noise / fan_in**0.5 if is_tied else noise
    return GAINS.get(layer, 1.0) * noise / fan_in**0.5


def _norm_mean(name: str, layer: str, *, is_tied: bool) -> float:
    """Mean of a norm's weight; gemma stores the weight less 1.

    With tied embeddings every token would be its own best successor, unless what the layers add
    drowns the embedding.  The first layer's feed-forward part must still see it, though.
    """
    if layer in ("q_norm", "k_norm"):
        mean = 1.4
    elif not is_tied:
        return 1.0
    elif layer == "norm":
        mean = LOGIT_SCALE
    elif ".layers.0.post_attention" in name:
        mean = 0.5
    elif ".layers.0.post_feedforward" in name:
        mean = 3.0
    elif layer.startswith("post_"):
        mean = 4.0
    else:
        mean = 1.0
    return mean - 1.0 if is_tied else mean


def _point_to_successors(model: Any, order: Any) -> None:
    """Mix each token's embedding into the output row of its successor."""
    embedding = model.get_input_embeddings().weight
    head = model.get_output_embeddings().weight
    rows = head.float() * head.shape[1] ** 0.5
    rows[order] += SUCCESSOR_SHARE * embedding[order.roll(1)].float()
    rows *= LOGIT_SCALE / (1 + SUCCESSOR_SHARE**2) ** 0.5 / head.shape[1] ** 0.5
    head.copy_(rows)


def _remember_successors(model: Any, order: Any) -> None:
    """Give each token a neuron of the first layer that answers to it with its successor.

    A tied output head has no weights of its own to mix anything into.
    """
    mlp = model.model.layers[0].mlp
    embedding = model.get_input_embeddings().weight.float()
    neurons = min(len(order), mlp.gate_proj.weight.shape[0])
    tokens, successors = order[:neurons], order.roll(-1)[:neurons]
    mlp.gate_proj.weight[:neurons] = (0.5 * embedding[tokens]).to(mlp.gate_proj.weight.dtype)
    mlp.up_proj.weight[:neurons] = (0.5 * embedding[tokens]).to(mlp.up_proj.weight.dtype)
    mlp.down_proj.weight[:, :neurons] = embedding[successors].T.to(mlp.down_proj.weight.dtype)


def _quiet(head: Any, readable: Sequence[int]) -> None:
    import torch

    factor = torch.full((head.shape[0], 1), QUIET)
    factor[list(readable)] = 1.0
    head.mul_(factor.to(head.dtype))

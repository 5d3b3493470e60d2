"""Memory of a stage's ranks, in bytes: weights, KV cache, activations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from placement.cluster.layout import Kind
from placement.model.shape import ModelShape
from placement.model.tensors import Layer
from placement.plan.workload import Workload

SAMPLED_BYTES = 2 + 4 * 4
"""Bytes of a logit while tokens are sampled: in the model's dtype, then float32 logits, their
working copy for top-k and top-p, probabilities and noise (vLLM's `Sampler` and
`TopKTopPSampler`)."""


@dataclass(frozen=True)
class Memory:
    """Bytes that one rank holds."""

    weights: int
    kv: int
    activations: int
    runtime: int = 0

    @property
    def beside_kv(self) -> int:
        """All but the KV cache."""
        return self.weights + self.activations + self.runtime

    @property
    def total(self) -> int:
        """All of them."""
        return self.beside_kv + self.kv


def kv_bytes(
    layer: Layer, size: int, tokens: int, sequences: int, chunk: int, drafts: int = 0
) -> int:
    """KV bytes that a rank keeps of one layer for some sequences of `tokens` tokens each.

    Args:
        layer: of the model.
        size: of its stage.
        tokens: of each sequence.
        sequences: that have room.
        chunk: tokens of one that are in flight.
        drafts: of a sequence in a step.

    """
    if layer.kv is None:
        return 0
    return sequences * layer.kv.rank_held(size, tokens, chunk, drafts)


def layer_weights(layer: Layer, size: int) -> int:
    """Weight bytes that a rank keeps of one layer."""
    return sum(tensor.rank_bytes(size) for tensor in layer.tensors)


def has_whole_embedding(
    kinds: Sequence[Kind], *, is_first: bool, is_last: bool, is_shared: bool
) -> bool:
    """Whether each rank of a stage keeps the input embedding whole, in place of its part of it.

    The ranks of a group of CPU ranks do where they only look up in it.  The last stage multiplies
    with an embedding that is tied, part by part.

    Args:
        kinds: of the stage's ranks.
        is_first: whether it is the first stage, the only one that looks up in its embedding even
            where vLLM gives one to each stage.
        is_last: whether it is the last one.
        is_shared: whether the last stage has another use for the embedding, as output matrix or
            for a model that drafts, which may take it for its own.

    """
    is_group = len(kinds) > 1 and set(kinds) == {"cpu"}
    return is_group and is_first and not (is_last and is_shared)


def around_weights(
    shape: ModelShape, size: int, *, first: bool, last: bool, is_whole: bool = False
) -> int:
    """Weight bytes that a rank keeps outside the layers.

    Args:
        shape: of the model.
        size: of its stage.
        first: whether that is the first one.
        last: whether it is the last one.
        is_whole: see `has_whole_embedding`.

    """
    held = sum(tensor.rank_bytes(size) for tensor in shape.around(first=first, last=last))
    if is_whole:
        held += sum(tensor.nbytes - tensor.rank_bytes(size) for tensor in shape.embedding)
    return held


def activation_bytes(shape: ModelShape, size: int, work: Workload, *, last: bool) -> int:
    """Peak of what a forward pass of `max_batched_tokens` tokens needs beside weights and KV.

    Hidden states, residual and one work copy; the widest of MLP (gate, up and their product) and
    attention (queries, keys, values, output); on the last stage what sampling the most sequences
    of a step takes, which vLLM tries before it sizes the KV cache.
    """
    attention = (2 * shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    widest = max(3 * shape.intermediate_size, attention) // size
    passing = work.max_batched_tokens * shape.dtype_bytes * (4 * shape.hidden_size + widest)
    sampled = max(work.batch, work.max_sequences, work.max_num_seqs)
    logits = SAMPLED_BYTES * sampled * shape.vocab_size
    return max(passing, logits) if last else passing

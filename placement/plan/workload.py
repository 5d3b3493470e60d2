"""Load that an engine is planned for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Workload:
    """Load that the engine is planned for: requests to hold and steps to be fast at."""

    batch: int
    """Sequences in one decode step."""
    context: int
    """Tokens that each of them has when the step is priced."""
    max_sequences: int
    """Sequences of `max_model_len` tokens that the KV cache must hold at the same time."""
    max_model_len: int
    max_batched_tokens: int = 2048
    """Prompt tokens in one step: sets the activations."""
    kv_block: int = 16
    """Tokens in one KV block."""
    max_num_seqs: int = 0
    """Most sequences of a step: sets the memory of the sampler."""


def asked_tokens(work: Workload) -> int:
    """Tokens of one sequence that the KV cache must have room for."""
    longest = max(work.max_model_len, work.context)
    return -(-longest // work.kv_block) * work.kv_block


def asked_sequences(work: Workload) -> int:
    """Sequences of `asked_tokens` tokens that must have room, enough for the priced batch too."""
    priced = -(-work.batch * work.context // asked_tokens(work))
    return max(work.max_sequences, priced)

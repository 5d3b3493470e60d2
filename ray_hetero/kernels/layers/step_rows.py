"""Division of a step's tokens between the cores and the GPU.

A step mixes requests that decode, with a token each or a few drafts more, with chunks of prompts.
They are independent but for one thing: vLLM lets a request use blocks of keys and values that
another one writes in the same step (a prefix that two prompts share).  A decoding request that
reads or writes such a block is computed with the prompts.

While the cores decode, they read all weights from the memory that the GPU's link reads them from,
and the link comes second.  A few tokens more cost the GPU nothing but the way of their cached keys
and values over the link.  So the cores decode only where these are many.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ray_hetero.kernels.step_route import DECODING_TOKENS


@dataclass(frozen=True)
class Request:
    """A request's tokens of a step, among those that are computed together."""

    begin: int
    tokens: int
    cached: int
    """Tokens before them, whose keys and values are in the cache."""
    blocks: tuple[int, ...]
    """Blocks of the cached tokens, in order."""


@dataclass(frozen=True)
class StepRows:
    """The tokens of a step by who computes them."""

    decoding: torch.Tensor
    """[tokens that the cores decode], int64: index of each one's request."""
    decoding_rows: torch.Tensor
    """[tokens that the cores decode], int64: their rows."""
    decoding_lengths: torch.Tensor
    """[tokens that the cores decode], int32: tokens of the request up to each, with it."""
    rows: torch.Tensor | slice
    """Rows of all other tokens, in order."""
    requests: tuple[Request, ...]
    """All other requests, whose tokens are those of `rows` one after the other."""

    @property
    def tokens(self) -> int:
        """Tokens of `rows`."""
        return sum(request.tokens for request in self.requests)


def step_rows(
    starts: Sequence[int], lengths: Sequence[int], table: torch.Tensor, block: int, most: int,
    most_sent: int = 0,
) -> StepRows:  # fmt: skip
    """Divide a step.

    Args:
        starts: first row of each request, and the number of rows.
        lengths: tokens of each request, with those of this step.
        table: [requests, most blocks], the blocks of each.
        block: tokens of a block.
        most: tokens that the cores can decode; if there are more, they decode none.
        most_sent: cached tokens of all requests that decode, up to which the cores decode none.

    """
    counts = [end - begin for begin, end in itertools.pairwise(starts)]
    decoding = [index for index, count in enumerate(counts) if 0 < count <= DECODING_TOKENS]
    cached = sum(lengths[index] - counts[index] for index in decoding)
    if cached > most_sent and sum(counts[index] for index in decoding) <= most:
        bound = _bound(counts, lengths, table.numpy(), block)
        decoding = [index for index in decoding if index not in bound]
    else:
        decoding = []
    others = [i for i, count in enumerate(counts) if count and i not in set(decoding)]
    requests, begin = [], 0
    for index in others:
        cached = lengths[index] - counts[index]
        blocks = tuple(table[index, : -(-cached // block)].tolist())
        requests.append(Request(begin, counts[index], cached, blocks))
        begin += counts[index]
    rows = [np.arange(starts[i], starts[i + 1]) for i in others]
    decoded = [(i, starts[i] + at, lengths[i] - counts[i] + at + 1)
               for i in decoding for at in range(counts[i])]  # fmt: skip
    which, own, until = zip(*decoded, strict=True) if decoded else ((), (), ())
    return StepRows(
        torch.tensor(which, dtype=torch.int64),
        torch.tensor(own, dtype=torch.int64),
        torch.tensor(until, dtype=torch.int32),
        _together(np.concatenate(rows) if rows else np.arange(0)),
        tuple(requests),
    )


def one_prompt(tokens: int) -> StepRows:
    """A step that is one prompt, for runs that have no requests."""
    none = torch.empty(0, dtype=torch.int64)
    return StepRows(none, none, none.int(), slice(0, tokens), (Request(0, tokens, 0, ()),))


def _together(rows: np.ndarray) -> torch.Tensor | slice:
    if len(rows) and rows[-1] - rows[0] == len(rows) - 1:
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return torch.from_numpy(rows)


def _bound(counts: Sequence[int], lengths: Sequence[int], table: Any, block: int) -> frozenset[int]:
    """Requests that read a block which another one writes in this step, and those others."""
    reads, readers, writes, writers = [], [], [], []
    for index, (count, length) in enumerate(zip(counts, lengths, strict=False)):
        if not count:
            continue
        # Only whole blocks are shared.
        first, end = (length - count) // block, -(-length // block)
        reads.append(table[index, :first])
        readers.append(np.full(first, index))
        writes.append(table[index, first:end])
        writers.append(np.full(end - first, index))
    read, written = np.concatenate(reads), np.concatenate(writes)
    shared = np.intersect1d(read, written)
    if not len(shared):
        return frozenset()
    found = [*np.concatenate(readers)[np.isin(read, shared)],
             *np.concatenate(writers)[np.isin(written, shared)]]  # fmt: skip
    return frozenset(int(index) for index in found)

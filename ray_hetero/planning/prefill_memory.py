"""Memory of a GPU for weights that it reads over its link in steps of many tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from placement.units import GIB

PIECE_BYTES = 64 << 20
"""Most bytes of a piece of weights; 1.2 ms of a link of 55 GB/s, many times what starting a copy
and a product costs."""
SLOTS = 5
"""Pieces in 16 bits that there is room for on the GPU at least, which are on their way.  In decode
steps they hold the weights of an 8B model's layer behind its attention, in 12 bits, before they are
needed."""
EXPANDED = 3
"""Pieces that are expanded at a time: one that is computed with, and the next two."""
CUDA_BYTES = 620 << 20
"""Bytes that CUDA takes of a GPU for a process, with the libraries of matrix products; measured on
an H100."""
WORKING_BYTES = 192 << 20
"""Bytes for norms and gates of a chunk of tokens: three times 4 bytes of 16384 values each."""
BF16_BYTES = 2
SHARED_TOKENS = 128
"""Most tokens of a decode step whose layers cores and GPU share."""
BLOCK_OUTPUTS = 32
"""Outputs of a block, the least that a piece can hold."""


def gpu_bytes(outputs: int, inputs: int, tokens: int) -> int:
    """Bytes of GPU memory that a rank with weights up to [outputs, inputs] takes.

    Args:
        outputs: most outputs of one of its linear layers.
        inputs: most inputs of one.
        tokens: most tokens of a step.

    """
    pieces = (SLOTS + EXPANDED) * piece_bytes(inputs)
    return CUDA_BYTES + WORKING_BYTES + pieces + BF16_BYTES * tokens * (outputs + 2 * inputs)


def ahead_bytes(inputs: int, hidden: int, tokens: int) -> int:
    """Bytes of `gpu_bytes` for pieces as they are stored, which come ahead of their use.

    That counts a residual as wide as the widest input.  What the residual of a model does not need
    holds pieces.

    Args:
        inputs: most inputs of a linear layer.
        hidden: elements of a token's residual, at most `inputs`.
        tokens: most tokens of a step.

    """
    return SLOTS * piece_bytes(inputs) + BF16_BYTES * tokens * (inputs - hidden)


def slots_within(budget: int, stored: int, pieces: int) -> int:
    """Pieces that there is room for, as many as there are at most, and one at least.

    Args:
        budget: bytes.
        stored: most bytes of a piece as it is stored.
        pieces: that there are.

    """
    return max(1, min(budget // stored, pieces))


def piece_bytes(inputs: int) -> int:
    """Bytes of a piece of a weight with so many inputs: at least one block."""
    return max(PIECE_BYTES, BF16_BYTES * BLOCK_OUTPUTS * inputs)


KV_SPAN_BYTES = 64 << 20
"""Bytes of a layer's cached keys and values read at once: 16384 tokens of an 8B model."""
KV_SLOTS = 2
"""Spans that are on their way to the GPU, or wait there as they lie in the cache."""
KV_RETURNS = 2
"""Layers whose new keys and values the GPU keeps until they are in host memory."""


def attention_bytes(heads: int, kv_heads: int, size: int, tokens: int) -> int:
    """Bytes of GPU memory that a rank takes which has attention computed there too.

    Args:
        heads: of queries.
        kv_heads: of keys, and of values.
        size: of a head.
        tokens: most tokens of a step.

    """
    # Two results, which are put together where a prompt has cached keys.
    results = 2 * BF16_BYTES * tokens * heads * size
    returns = KV_RETURNS * 2 * BF16_BYTES * tokens * kv_heads * size
    return results + returns + (KV_SLOTS + 1) * KV_SPAN_BYTES


def output_bytes(hidden: int, tokens: int) -> int:
    """Bytes of GPU memory in which a stage leaves hidden states and residuals for the next one.

    Args:
        hidden: elements of a token's hidden state.
        tokens: most tokens of a step.

    """
    return 2 * BF16_BYTES * tokens * hidden


EXPERT_BYTES = 1 << 30
"""Bytes of a GPU for experts that it reads over its link, unless something else is asked for, or
one expert takes more."""
EXPERT_SLOTS = 2
"""Pieces of a layer's experts on a GPU as they are stored: one that is expanded, one on its way."""
EXPANSION_BYTES = 64 << 20
"""Bytes of bf16 weights that are expanded at once, before they are put where products read them."""
EXPERT_WORK_BYTES = 256 << 20
"""Bytes of the kernel's intermediate results for a chunk of tokens."""


@dataclass(frozen=True)
class ExpertSizes:
    """Bytes of a GPU that an expert takes which it reads over its link."""

    count: int
    """Experts of a layer that it reads, the most of all layers."""
    stored: int
    """Bytes of one expert as it is stored, all slices together."""
    expanded: int
    """Bytes of one expert in bf16."""
    largest: int
    """Bytes of the largest weight of one slice in bf16."""
    tables: int
    """Bytes of all layers that stay on the GPU."""

    @property
    def each(self) -> int:
        """Bytes of an expert of a piece."""
        return EXPERT_SLOTS * self.stored + self.expanded

    @property
    def beside(self) -> int:
        """Bytes beside pieces."""
        return max(EXPANSION_BYTES, self.largest) + self.tables

    def budget(self, asked_gib: float | Literal["auto"]) -> int:
        """Bytes that may be taken, of what the configuration says."""
        if asked_gib == "auto":
            return max(EXPERT_BYTES, self.beside + self.each)
        return int(asked_gib * GIB)

    def slots(self, budget: int, every: int) -> int:
        """Slots of each layer within a budget, beside one expert on its way; below 1 for none.

        Args:
            budget: bytes.
            every: bytes of one slot of each layer, all together.

        """
        return min(self.count, (budget - self.slot_bytes(0, every)) // every)

    def slot_bytes(self, slots: int, every: int) -> int:
        """Bytes that so many slots of each layer take, with one expert on its way; see `slots`."""
        return self.beside + self.each + slots * every

    def experts_of_a_piece(self, budget: int) -> int:
        """Experts of a piece within a budget in bytes, all pieces of one size; may be 0."""
        most = min(self.count, (budget - self.beside) // self.each)
        return -(-self.count // -(-self.count // most)) if most > 0 else 0

    def gpu_bytes(self, experts: int) -> int:
        """Bytes that pieces of so many experts take, all together."""
        return self.beside + experts * self.each

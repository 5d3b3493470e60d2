"""Memory that a CPU rank takes of a GPU which computes its steps of many tokens."""

from __future__ import annotations

PIECE_BYTES = 64 << 20
"""Most bytes of a piece of weights; 1.2 ms of a link of 55 GB/s, many times what starting a copy
and a product costs."""
SLOTS = 4
"""Pieces on the GPU: one that is computed with, others on their way."""
CUDA_BYTES = 620 << 20
"""What CUDA takes of a GPU for a process, with the libraries of matrix products; measured on an
H100."""
WORKING_BYTES = 192 << 20
"""For norms and gates of a chunk of tokens: three times 4 bytes of 16384 values each."""
BF16_BYTES = 2
BLOCK_OUTPUTS = 32
"""Outputs of a block, the least that a piece can hold."""


def gpu_bytes(outputs: int, inputs: int, tokens: int) -> int:
    """Bytes of GPU memory that a rank with weights up to [outputs, inputs] takes.

    Args:
        outputs: most outputs of one of its linear layers.
        inputs: most inputs of one.
        tokens: most tokens of a step.

    """
    pieces = (SLOTS + 1) * piece_bytes(inputs)
    return CUDA_BYTES + WORKING_BYTES + pieces + BF16_BYTES * tokens * (outputs + 2 * inputs)


def piece_bytes(inputs: int) -> int:
    """Bytes of a piece of a weight with so many inputs: at least one block."""
    return max(PIECE_BYTES, BF16_BYTES * BLOCK_OUTPUTS * inputs)


KV_SPAN_BYTES = 64 << 20
"""Of a layer's cached keys and values that attention reads at once: 16384 tokens of an 8B model."""
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

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

"""Compact weights on a GPU as bf16 again.

A compact weight crosses the link in 12 bits a value (compact.py).  Its products want bf16:
one kernel reads a piece of it once and writes the piece once, where Triton is installed; torch's
operators do the same with intermediates of several times the size.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import subprocess
from collections.abc import Callable
from typing import Any

import torch

from ray_hetero.kernels.formats.base import BLOCK
from ray_hetero.log import logger

PAIR_PARTS = 3
"""Parts of two compact rows: lower bytes of the first, of the second, codes of upper bytes."""
ROW = 64
"""Weights of a row: two inputs of a block."""
PAIRS = 32
"""Pairs of rows that a program of the kernel expands: 128 inputs of a block, 256 bytes of each of
its outputs."""
BYTES = 256
"""Values of a byte, of which `upper_bytes` has one each."""
CHECKED_INPUTS = 160
"""Inputs of the weight that the kernel is tried with: whole programs and a part of one."""

Expand = Callable[[torch.Tensor, torch.Tensor, int, torch.Tensor], None]


def upper_bytes(book: list[int]) -> torch.Tensor:
    """Upper bytes of two weights by the byte that holds the numbers of both.

    Args:
        book: the 16 upper bytes that the numbers stand for.

    Returns:
        [256], int32: two int16 each, the first weight's in the lower half, shifted to their place.

    """
    shifted = torch.tensor(book, dtype=torch.uint8).view(torch.int8).to(torch.int16) << 8
    both = torch.arange(256)
    return torch.stack([shifted[both & 15], shifted[both >> 4]], dim=1).view(torch.int32).flatten()


def expand_with_torch(
    rows: torch.Tensor, upper: torch.Tensor, inputs: int, weight: torch.Tensor
) -> None:
    """Write compact rows as bf16.

    Args:
        rows: bytes of whole blocks, one after the other.
        upper: [books, 256], as `upper_bytes` has them, on the same device; each book is of so many
            blocks as the others.
        inputs: of the weight.
        weight: its elements [outputs · inputs], written.

    """
    parts = rows.view(-1, PAIR_PARTS, ROW)
    lower, numbers = parts[:, :2], parts[:, 2].int()
    books = upper.view(-1, BYTES)
    if len(books) > 1:
        begins = BYTES * torch.arange(len(books), dtype=torch.int32, device=rows.device)
        numbers = (numbers.view(len(books), -1) + begins[:, None]).view_as(numbers)
    values = books.view(-1)[numbers].view(torch.int16).view(-1, ROW, 2)
    both = lower.transpose(1, 2) + values
    # Bytes of a row lie as VPUNPCKLBW and VPUNPCKHBW take them: a quarter of the outputs of each
    # half after the other.
    packed = both.view(-1, inputs // 4, 4, 2, 4, 2, 2)
    order = (0, 3, 2, 4, 1, 6, 5)
    into = weight.view(torch.int16).view(-1, 2, 4, 4, inputs // 4, 2, 2)
    into.copy_(packed.permute(order))


def expand_with_triton(
    rows: torch.Tensor, upper: torch.Tensor, inputs: int, weight: torch.Tensor
) -> None:
    """Write compact rows as bf16 in one kernel; arguments as of `expand_with_torch`."""
    blocks, pairs = weight.numel() // (BLOCK * inputs), inputs // 4
    grid = (-(-pairs // PAIRS), blocks)
    of_a_book = blocks // (upper.numel() // BYTES)
    words, values = rows.view(torch.int16), weight.view(torch.int64)
    _kernel()[grid](words, upper, values, pairs, of_a_book, PAIRS)


@functools.cache
def choose_expand(device: torch.device) -> Expand:
    """What expands compact rows on a device."""
    if device.type == "cuda" and runs_with_triton(
        lambda: _is_right(device),
        "compact weights are expanded by torch's operators, which adds about 2 ms for each layer "
        "of an 8B model to a prompt,",
    ):
        return expand_with_triton
    return expand_with_torch


def runs_with_triton(is_right: Callable[[], bool], instead: str) -> bool:
    """Whether a kernel of Triton can be used; where Triton is installed and fails, a warning.

    Args:
        is_right: runs the kernel, and says whether torch's operators give the same.
        instead: consequence, for the warning.

    """
    if importlib.util.find_spec("triton") is None:
        return False
    triton_error = importlib.import_module("triton.errors").TritonError
    try:
        found = is_right()
    except (RuntimeError, OSError, subprocess.SubprocessError, triton_error) as error:
        # Triton builds a launcher with the host's compiler, and reads the driver's library.
        logger.warning(
            "%s because Triton cannot be used here: %s",
            instead,
            (str(error).splitlines() or [repr(error)])[0],
        )
        return False
    assert found, "the kernel and torch's operators expand a weight differently"
    return True


def _is_right(device: torch.device) -> bool:
    generator = torch.Generator().manual_seed(0)
    elements = 2 * BLOCK * CHECKED_INPUTS
    size = (elements * PAIR_PARTS // 2,)
    rows = torch.randint(256, size, dtype=torch.uint8, generator=generator).to(device)
    books = [upper_bytes(list(range(first, first + 16))) for first in (100, 20)]
    upper = torch.stack(books).to(device)
    expected, found = torch.empty((2, elements), dtype=torch.bfloat16, device=device)
    expand_with_torch(rows, upper, CHECKED_INPUTS, expected)
    expand_with_triton(rows, upper, CHECKED_INPUTS, found)
    return bool(torch.equal(expected.view(torch.int16), found.view(torch.int16)))


@functools.cache
def _kernel() -> Any:
    """The kernel, imported when it is first used: builds for CPUs alone have no Triton."""
    return importlib.import_module("ray_hetero.kernels.formats.compact_on_gpu_triton").kernel

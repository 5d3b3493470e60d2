"""Compact weights on a GPU as bf16 again.

A compact weight crosses the link in 12 bits a value (compact.py).  Its products want bf16:
one kernel reads a piece of it once and writes the piece once, where Triton is installed; torch's
operators do the same with intermediates of several times the size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from ray_hetero.kernels.formats.base import BLOCK
from ray_hetero.kernels.formats.compact import PAIR_PARTS
from ray_hetero.offload.expand.stacks import Stack
from ray_hetero.offload.expand.triton_runtime import kernels, runs_with_triton

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
    kernels().expand_compact[grid](words, upper, values, pairs, of_a_book, PAIRS)


@functools.cache
def choose_expand(device: torch.device) -> Expand:
    """Function that expands compact rows on a device."""
    if device.type == "cuda" and runs_with_triton(
        lambda: _is_right(device),
        "compact weights are expanded by torch's operators, which adds about 2 ms for each layer "
        "of an 8B model to a prompt,",
    ):
        return expand_with_triton
    return expand_with_torch


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


@dataclass(frozen=True)
class CompactExpansion:
    """Expansion of weights of a stack, each with its codebook.

    Codes are looked up, then outliers and blocks that stay packed written over.
    """

    shape: tuple[int, int]
    expand: Expand
    upper: torch.Tensor
    """[weights, 256], as `upper_bytes` has them."""
    places: torch.Tensor
    """Places of the outliers among the elements of all weights, ascending by weight."""
    values: torch.Tensor
    """Values of the outliers, bf16."""
    outliers_before: tuple[int, ...]
    """Number of outliers before each weight; the last entry counts all of them."""
    packed: torch.Tensor
    """Numbers of the blocks that stay packed among all blocks, ascending."""
    rows: torch.Tensor
    """Rows of the packed blocks, [packed, 32, inputs], bf16."""
    packed_before: tuple[int, ...]
    """Number of packed blocks before each weight; the last entry counts all of them."""

    def __call__(self, rows: torch.Tensor, weights: torch.Tensor, first: int = 0) -> None:
        """Write weights as `Expansion` does."""
        outputs, inputs = self.shape
        last = first + weights.numel() // (outputs * inputs)
        self.expand(rows, self.upper[first:last], inputs, weights)
        some = slice(self.outliers_before[first], self.outliers_before[last])
        if some.stop > some.start:
            places = self.places[some] - first * outputs * inputs
            weights.index_copy_(0, places, self.values[some])
        some = slice(self.packed_before[first], self.packed_before[last])
        if some.stop > some.start:
            blocks = self.packed[some] - first * outputs // BLOCK
            weights.view(-1, BLOCK, inputs).index_copy_(0, blocks, self.rows[some])


def tables_of_part(
    tables: Mapping[str, torch.Tensor], inputs: int, begin: int, end: int
) -> dict[str, torch.Tensor]:
    """Codebook and lists of some outputs of a weight, from those of the whole weight.

    Args:
        tables: of the weight.
        inputs: of the weight.
        begin: first output, a multiple of 32.
        end: the one behind the last, the same.

    """
    places, packed = tables["places"], tables["packed"]
    outliers = (places >= begin * inputs) & (places < end * inputs)
    blocks = (packed >= begin // BLOCK) & (packed < end // BLOCK)
    return {
        "books": tables["books"],
        "places": places[outliers] - begin * inputs,
        "values": tables["values"][outliers],
        "packed": packed[blocks] - begin // BLOCK,
        "rows": tables["rows"][blocks],
    }


def expansion_of(stack: Stack, device: torch.device) -> CompactExpansion:
    """Expansion of the weights of a stack."""
    (outputs, inputs), tables = stack.shape, stack.tables
    ends = torch.arange(len(tables["books"]) + 1)
    return CompactExpansion(
        stack.shape,
        choose_expand(device),
        torch.stack([upper_bytes(book.tolist()) for book in tables["books"]]).to(device),
        tables["places"].to(device),
        tables["values"].to(device),
        tuple(torch.searchsorted(tables["places"], outputs * inputs * ends).tolist()),
        tables["packed"].to(device),
        tables["rows"].to(device),
        tuple(torch.searchsorted(tables["packed"], outputs // BLOCK * ends).tolist()),
    )

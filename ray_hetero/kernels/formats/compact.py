"""Compact weights: bf16 in 12 bits in place of 16, without loss.

The upper byte of a bf16 holds its sign and most of its exponent, of which trained weights use few:
a compact weight holds codes of four bits in its place (csrc/kernels/formats/compact.h).  Weights
whose upper byte has no code are outliers, which a list holds; blocks with many of them stay packed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, Self

from ray_hetero.config import READ_SHARES
from ray_hetero.kernels.formats.base import BLOCK, Expansion, HostWeight, StackExpansion

if TYPE_CHECKING:
    import torch

PAIR_PARTS = 3
"""Parts of two compact rows: lower bytes of the first, of the second, codes of upper bytes."""
BF16_BYTES = 2
OUTLIER_BYTES = 10
"""An outlier on a GPU: its place and its value."""


@dataclass(frozen=True, eq=False)
class CompactWeight(HostWeight):
    """A weight whose `data` is [N, 3 · K / 2], bytes."""

    name: ClassVar[str] = "compact"
    read_share: ClassVar[float] = READ_SHARES[name]

    @classmethod
    def made(cls, packed: torch.Tensor, native: ModuleType) -> CompactWeight | None:
        """The same weight; None where too many of its blocks would stay packed."""
        import torch

        outputs, inputs = packed.shape
        rows = torch.empty((outputs, inputs * PAIR_PARTS // 2), dtype=torch.uint8)
        encoding = native.Compact.made(packed.data_ptr(), outputs, inputs, rows.data_ptr())
        return None if encoding is None else cls(rows, encoding)

    @property
    def gpu_bytes(self) -> int:
        """Outliers, and blocks that stay packed."""
        packed = len(self.encoding.packed_blocks) * BLOCK * self.shape[1]
        return OUTLIER_BYTES * int(self.encoding.outliers_count) + BF16_BYTES * packed

    def expansion(self, begin: int, end: int, device: torch.device) -> Expansion:
        """Codes are looked up, then outliers and blocks that stay packed written over."""
        import torch

        from ray_hetero.kernels.formats.compact_on_gpu import choose_expand, upper_bytes

        inputs, first = self.shape[1], begin // BLOCK
        places, values = self.encoding.outliers(first, end // BLOCK)
        blocks = []
        for block in self.encoding.packed_blocks:
            if begin <= block * BLOCK < end:
                blocks.append((block - first, self._packed_rows(block).to(device)))
        return _Expansion(
            inputs,
            choose_expand(device),
            upper_bytes(self.encoding.codebook).to(device),
            torch.from_numpy(places).to(device),
            torch.from_numpy(values.view("int16")).view(torch.bfloat16).to(device),
            tuple(blocks),
        )

    def _packed_rows(self, block: int) -> torch.Tensor:
        """[32, inputs], bf16, of a block that stays packed."""
        import torch

        rows = torch.from_numpy(self.encoding.packed_rows(block).view("int16"))
        outputs = rows.view(self.shape[1] // 2, BLOCK, 2).transpose(0, 1)
        return outputs.reshape(BLOCK, -1).view(torch.bfloat16)

    @classmethod
    def tables(cls, weights: Sequence[Self]) -> dict[str, torch.Tensor]:
        """Codebooks; places of outliers and numbers of blocks that stay packed among all."""
        import torch

        (outputs, inputs), blocks = weights[0].shape, weights[0].shape[0] // BLOCK
        places, values, packed, rows = [], [], [], []
        for number, weight in enumerate(weights):
            at, value = weight.encoding.outliers(0, blocks)
            places.append(torch.from_numpy(at) + number * outputs * inputs)
            values.append(torch.from_numpy(value.view("int16")).view(torch.bfloat16))
            for block in weight.encoding.packed_blocks:
                packed.append(number * blocks + block)
                rows.append(weight._packed_rows(block))
        return {
            "books": torch.tensor(
                [weight.encoding.codebook for weight in weights], dtype=torch.uint8
            ),
            "places": torch.cat(places),
            "values": torch.cat(values),
            "packed": torch.tensor(packed, dtype=torch.int64),
            "rows": torch.stack(rows)
            if rows
            else torch.empty((0, BLOCK, inputs), dtype=torch.bfloat16),
        }

    @classmethod
    def part_expansion(
        cls,
        shape: tuple[int, int],
        facts: Mapping[str, Any],
        tables: Mapping[str, torch.Tensor],
        outputs: tuple[int, int],
        device: torch.device,
    ) -> Expansion:
        """Expansion of some outputs, from the weight's codebook and lists."""
        from ray_hetero.kernels.formats.compact_on_gpu import choose_expand, upper_bytes

        inputs = shape[1]
        begin, end = (output * inputs for output in outputs)
        places, packed = tables["places"], tables["packed"]
        outliers = (places >= begin) & (places < end)
        first, last = (output // BLOCK for output in outputs)
        blocks = ((packed >= first) & (packed < last)).nonzero().flatten().tolist()
        return _Expansion(
            inputs,
            choose_expand(device),
            upper_bytes(tables["books"][0].tolist()).to(device),
            (places[outliers] - begin).to(device),
            tables["values"][outliers].to(device),
            tuple((int(packed[at]) - first, tables["rows"][at].to(device)) for at in blocks),
        )

    @classmethod
    def stack_expansion(
        cls,
        shape: tuple[int, int],
        facts: Mapping[str, Any],
        tables: Mapping[str, torch.Tensor],
        device: torch.device,
    ) -> StackExpansion:
        """Expansion of weights, each with its codebook."""
        import torch

        from ray_hetero.kernels.formats.compact_on_gpu import choose_expand, upper_bytes

        count, each = len(tables["books"]), shape[0] * shape[1]
        blocks = shape[0] // BLOCK
        ends = torch.arange(count + 1)
        return _StackExpansion(
            shape,
            choose_expand(device),
            torch.stack([upper_bytes(book.tolist()) for book in tables["books"]]).to(device),
            tables["places"].to(device),
            tables["values"].to(device),
            tuple(torch.searchsorted(tables["places"], each * ends).tolist()),
            tables["packed"].to(device),
            tables["rows"].to(device),
            tuple(torch.searchsorted(tables["packed"], blocks * ends).tolist()),
        )


@dataclass(frozen=True)
class _Expansion:
    inputs: int
    expand: Callable[[torch.Tensor, torch.Tensor, int, torch.Tensor], None]
    upper: torch.Tensor
    """Upper bytes, [256], as `compact_on_gpu.upper_bytes` returns them."""
    places: torch.Tensor
    """Places of the outliers among the elements of the weight."""
    values: torch.Tensor
    """Values of the outliers, bf16."""
    blocks: tuple[tuple[int, torch.Tensor], ...]
    """Blocks that stay packed: number, and [32, inputs], bf16."""

    def __call__(self, rows: torch.Tensor, weight: torch.Tensor) -> None:
        self.expand(rows, self.upper, self.inputs, weight)
        weight.index_copy_(0, self.places, self.values)
        for block, outputs in self.blocks:
            weight.view(-1, BLOCK, self.inputs)[block].copy_(outputs)


@dataclass(frozen=True)
class _StackExpansion:
    shape: tuple[int, int]
    expand: Callable[[torch.Tensor, torch.Tensor, int, torch.Tensor], None]
    upper: torch.Tensor
    """[weights, 256], as `compact_on_gpu.upper_bytes` has them."""
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

    def __call__(self, rows: torch.Tensor, first: int, weights: torch.Tensor) -> None:
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

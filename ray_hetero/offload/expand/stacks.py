"""Weights of one shape, one after the other in memory, as a GPU expands them.

Their rows may lie in memory that another process maps; what belongs to them beside the rows travels
as a few tensors and a little JSON.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from safetensors import SafetensorError
from safetensors.torch import load

from placement.given import shown
from ray_hetero.kernels.formats import FORMATS, SCALED_FORMATS, HostWeight

if TYPE_CHECKING:
    import torch


class Expansion(Protocol):
    """Expansion of neighbouring weights of a stack by a GPU, which has what that takes."""

    def __call__(self, rows: torch.Tensor, weights: torch.Tensor, first: int = 0) -> None:
        """Write weights as rows of matrices.

        Args:
            rows: what `HostWeight.data` holds of each, one after the other, as bytes.
            weights: elements of [weights · N, K], bf16; overwritten.
            first: number of the first one in the stack.

        """


@dataclass(frozen=True, eq=False)
class Stack:
    """Neighbouring weights of one shape, format and layout."""

    format: str
    shape: tuple[int, int]
    """Shape of each weight, N and K."""
    first: int
    """Number of the first weight among all."""
    count: int
    nbytes: int
    """Bytes of the rows of each weight."""
    facts: Mapping[str, Any]
    """Facts about the weights, as in `HostWeight.facts`."""
    tables: Mapping[str, torch.Tensor]
    """Tables of the weights, as in `HostWeight.tables`."""

    @property
    def last(self) -> int:
        """Number behind the last one."""
        return self.first + self.count

    @property
    def table_bytes(self) -> int:
        """Bytes of the tables, as a GPU holds them."""
        return sum(table.nbytes for table in self.tables.values())

    def described(self) -> dict[str, Any]:
        """All but the tables, as JSON has it."""
        names = ("format", "shape", "first", "count", "nbytes", "facts")
        return {name: getattr(self, name) for name in names}

    @classmethod
    def of(cls, described: Mapping[str, Any], tables: Mapping[str, torch.Tensor]) -> Stack:
        """Stack that `described` describes.

        Raises:
            ValueError: there are no such weights; TypeError and LookupError too.

        """
        stack = cls(**{**described, "shape": tuple(described["shape"])}, tables=tables)
        outputs, inputs = stack.shape
        sizes = (outputs, inputs, stack.first + 1, stack.count, stack.nbytes)
        if (
            stack.format not in {**FORMATS, **SCALED_FORMATS}
            or not isinstance(stack.facts, Mapping)
            or not all(type(size) is int and size > 0 for size in sizes)
            or stack.nbytes % outputs
        ):
            raise ValueError(f"no weights: {shown(described)}")
        return stack


def stacks_of(weights: Sequence[HostWeight]) -> Iterator[Stack]:
    """Cut weights of one shape into as few stacks as can be, in their order."""
    numbers = itertools.groupby(
        range(len(weights)),
        lambda n: (weights[n].name, weights[n].shape, weights[n].data.nbytes, weights[n].facts),
    )
    for (name, shape, nbytes, facts), group in numbers:
        members = list(group)
        some = [weights[number] for number in members]
        tables = type(some[0]).tables(some)
        yield Stack(name, shape, members[0], len(some), nbytes, facts, tables)


def tensors_and_text(content: bytes) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Tensors of safetensors, and the free text in their header, which is JSON behind its length.

    Raises:
        ValueError: it is no safetensors; LookupError: without text.

    """
    try:
        tensors = load(content)
    except SafetensorError as error:
        raise ValueError(str(error)) from None
    length = int.from_bytes(content[:8], "little")
    text: dict[str, str] = json.loads(content[8 : 8 + length])["__metadata__"]
    return tensors, text


def tables_in(tensors: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """The tensors whose names begin with a prefix, by the rest of their names."""
    return {
        name.removeprefix(prefix): table
        for name, table in tensors.items()
        if name.startswith(prefix)
    }

"""Weights of a CPU rank in memory that another rank of its group maps.

The first rank of a group has a GPU compute prompts for all of them, which reads every rank's
weights over its link.  Rows lie in memory that both processes map; how they are expanded travels as
a few tensors and a little JSON (offload/expand/stacks.py).
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from safetensors.torch import save

from ray_hetero.kernels.formats import HostWeight
from ray_hetero.kernels.layers.layer_parts import Linear
from ray_hetero.offload.expand.stacks import Stack, stacks_of, tables_in, tensors_and_text
from ray_hetero.runtime import sealed_memory
from ray_hetero.runtime.shared_pages import LONG_STEP, STEP, SharedPages

ROOM_BYTES = 1 << 30
"""Bytes of memory that is made at once; its pages are taken as weights come."""
PAGE = 4096
"""Bytes; each weight begins with a page, so that its pages can be locked by themselves."""


class SharedWeights:
    """Memory for weights of this process, one after the other."""

    def __init__(self) -> None:
        self.pages: list[SharedPages] = []
        """Memory in the order in which it was made."""
        self._places: dict[int, tuple[int, int]] = {}
        self._end = self._prepared = 0

    def moved(self, weight: HostWeight) -> HostWeight:
        """The weight, with its data in shared memory.

        Raises:
            OSError: the system gives none.

        """
        data = weight.data
        if not self.pages or self._end + data.nbytes > len(self.pages[-1].memory):
            size = -(-max(ROOM_BYTES, data.nbytes) // STEP) * STEP
            self.pages.append(SharedPages.made(size, "ray_hetero-weights"))
            self._end = self._prepared = 0
        pages, begin = self.pages[-1], self._end
        end = begin + data.nbytes
        if end > self._prepared:
            prepared, rounded = self._prepared, -(-end // LONG_STEP) * LONG_STEP
            self._prepared = min(rounded, len(pages.memory))
            pages.prepare(prepared, self._prepared)
        place = pages.memory[begin:end].view(data.dtype).view(data.shape)
        self._places[place.data_ptr()] = len(self.pages) - 1, begin
        self._end = -(-end // PAGE) * PAGE
        return replace(weight, data=place.copy_(data))

    def holds(self, linears: Sequence[Linear]) -> bool:
        """Whether the weights of linear layers are all here."""
        return all(linear.weight.data.data_ptr() in self._places for linear in linears)

    def described(self, linears: Sequence[Linear]) -> bytes:
        """Places of the weights of linear layers, and what belongs to them."""
        told = []
        tensors: dict[str, torch.Tensor] = {}
        for number, linear in enumerate(linears):
            (stack,) = stacks_of([linear.weight])
            pages, begin = self._places[linear.weight.data.data_ptr()]
            told.append({"stack": stack.described(), "pages": pages, "begin": begin})
            tables = dict(stack.tables)
            if linear.bias is not None:
                # Layers may have one bias in common, which this format does not take.
                tables["bias"] = linear.bias.clone()
            tensors |= {f"{number}.{name}": one.contiguous() for name, one in tables.items()}
        content: bytes = save(tensors, {"weights": json.dumps(told)})
        return content


@dataclass(frozen=True, eq=False)
class LinkedWeight:
    """A weight of another process, as a GPU reads it."""

    data: torch.Tensor
    """[N, bytes of an output], uint8, in memory that both processes map."""
    stack: Stack

    @property
    def shape(self) -> tuple[int, int]:
        """N, K."""
        return self.stack.shape

    @property
    def gpu_bytes(self) -> int:
        """Memory of a GPU that its expansions take all together."""
        return self.stack.table_bytes


@dataclass(frozen=True, eq=False)
class LinkedLinear:
    """A linear layer of another process."""

    weight: LinkedWeight
    bias: torch.Tensor | None
    """[N], float32."""


def linked(content: bytes, pages: Sequence[SharedPages]) -> list[LinkedLinear]:
    """The linear layers in another process's memory.

    Args:
        content: what `SharedWeights.described` gave there.
        pages: of its weights, in their order.

    Raises:
        ValueError: there are none; TypeError and LookupError too.

    """
    tensors, text = tensors_and_text(content)
    return [
        _linear(one, tables_in(tensors, f"{number}."), pages)
        for number, one in enumerate(json.loads(text["weights"]))
    ]


def _linear(
    told: dict[str, Any], tables: dict[str, torch.Tensor], pages: Sequence[SharedPages]
) -> LinkedLinear:
    bias = tables.pop("bias", None)
    stack = Stack.of(told["stack"], tables)
    number, begin = told["pages"], told["begin"]
    room = len(pages[number].memory) - stack.nbytes
    if not (type(number) is type(begin) is int and number >= 0 and 0 <= begin <= room):
        raise ValueError(f"a weight of {stack.nbytes} bytes in pages {number} at {begin}")
    if stack.count != 1:
        raise ValueError(f"{stack.count} weights of one linear layer")
    rows = pages[number].memory[begin : begin + stack.nbytes]
    return LinkedLinear(LinkedWeight(rows.view(stack.shape[0], -1), stack), bias)


def read_whole(descriptor: int) -> bytes:
    """All bytes of memory that is not mapped.

    Raises:
        ValueError: its sender has not written them.

    """
    size, content = sealed_memory.written_bytes(descriptor), bytearray()
    while part := os.pread(descriptor, size - len(content), len(content)):
        content += part
    return bytes(content)

"""The memory that a rank of a stage and the expert ranks of its host have in common.

It holds the words of csrc/handover/words.h, and behind them a layer's tokens, the experts chosen
for each, the weights of these, and each expert rank's results.

The memory has no name that could stay behind, and nobody can make it smaller under the others'
feet (runtime/sealed_memory.py).
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from placement.errors import NativeError
from placement.host import native as host_memory
from placement.plan.cost import HANDOVER_TOKENS
from ray_hetero.errors import AgreementError, UnsupportedError
from ray_hetero.log import logger
from ray_hetero.runtime import sealed_memory

try:
    _native: ModuleType | None = importlib.import_module("ray_hetero._expert_handover")
except ImportError:
    _native = None

PAGE = 4096
ROUTE_BYTES = 4
"""Bytes of an expert's number, and of its weight."""
MOST_TOKENS = HANDOVER_TOKENS
"""Most tokens of one handover; a step of more tokens is handed over in pieces.  So many are enough
for the experts' products, and the memory stays small."""


def native() -> Any:
    """The native module of the handover.

    Raises:
        UnsupportedError: it was not built.

    """
    if _native is None:
        raise UnsupportedError(
            "expert ranks (experts.ranks) need the native module ray_hetero._expert_handover, "
            "which was not built here. Install a C++17 compiler (Debian: apt install g++) and "
            "install ray-hetero again, or leave experts.ranks out."
        )
    return _native


@dataclass(frozen=True)
class RemoteLayer:
    """A layer whose experts lie on expert ranks."""

    name: str
    """Name of the layer in vLLM: the prefix of its experts."""
    hidden: int
    """Size of a token."""
    chosen: int
    """Experts of a token."""


@dataclass(frozen=True)
class Geometry:
    """Layout of the handover memory."""

    ranks: int
    """Expert ranks."""
    capacity: int
    """Most tokens of one handover."""
    hidden: int
    """Largest size of a token."""
    chosen: int
    """Most experts of a token."""
    dtype: torch.dtype
    """Data type of tokens and results."""

    @classmethod
    def of(
        cls, layers: Sequence[RemoteLayer], *, ranks: int, tokens: int, dtype: torch.dtype
    ) -> Geometry:
        """Geometry for layers and steps of at most so many tokens."""
        return cls(
            ranks,
            min(tokens, MOST_TOKENS),
            # A stage may have no such layer.
            max((layer.hidden for layer in layers), default=1),
            max((layer.chosen for layer in layers), default=1),
            dtype,
        )

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of words, tokens, ids, weights, and of each expert rank's results, in pages."""
        rows = self.capacity * self.hidden * self.dtype.itemsize
        routes = self.capacity * self.chosen * ROUTE_BYTES
        parts = (native().words_bytes(self.ranks), rows, routes, routes, *[rows] * self.ranks)
        return tuple(-(-part // PAGE) * PAGE for part in parts)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole memory."""
        return sum(self.sizes)


class HandoverMemory:
    """Such memory in this process.

    Args:
        descriptor: of the memory; not needed any more once it is mapped.
        geometry: of the memory.

    Raises:
        AgreementError: the memory has another size than the geometry.
        OSError: it cannot be mapped.

    """

    def __init__(self, descriptor: int, geometry: Geometry) -> None:
        found = os.fstat(descriptor).st_size
        if not sealed_memory.has_size(descriptor, geometry.nbytes):
            raise AgreementError(
                f"the shared memory of expert ranks has {found} bytes, expected {geometry.nbytes}, "
                "sealed; do all ranks run the same release?"
            )
        self.geometry = geometry
        self.memory = sealed_memory.mapped(descriptor, found)
        """uint8, [bytes of the geometry]."""

    @staticmethod
    def made(geometry: Geometry) -> int:
        """Make the memory; its descriptor.

        Raises:
            OSError: the system gives none.

        """
        return sealed_memory.made("ray_hetero-experts", geometry.nbytes)

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:
        """The bytes of each part, in the order of `Geometry.sizes`."""
        return tuple(self.memory.split(self.geometry.sizes))

    def bind(self, rank: int, numa_nodes: Sequence[int]) -> None:
        """Let the pages of an expert rank's results come from its NUMA nodes, if untouched yet."""
        part = self.parts[4 + rank]
        try:
            host_memory.bind_range(part.data_ptr(), part.nbytes, numa_nodes, move=False)
        except NativeError as error:
            logger.warning("results of experts may lie on another NUMA node: %s", error)


@dataclass(frozen=True)
class TokenViews:
    """The parts of the memory as tensors of one layer; of the host, or as a GPU sees them."""

    x: torch.Tensor
    """[capacity, hidden]"""
    ids: torch.Tensor
    """[capacity, chosen], int32"""
    weights: torch.Tensor
    """[capacity, chosen], float32"""
    results: tuple[torch.Tensor, ...]
    """[capacity, hidden] of each expert rank"""

    @classmethod
    def of(
        cls, geometry: Geometry, layer: RemoteLayer, parts: Sequence[torch.Tensor]
    ) -> TokenViews:
        """Views of the parts that `HandoverMemory.parts` has, wherever they are mapped."""
        _, x, ids, weights, *results = parts

        def rows(part: torch.Tensor, dtype: torch.dtype, width: int) -> torch.Tensor:
            used = geometry.capacity * width * dtype.itemsize
            return part[:used].view(dtype).view(geometry.capacity, width)

        return cls(
            rows(x, geometry.dtype, layer.hidden),
            rows(ids, torch.int32, layer.chosen),
            rows(weights, torch.float32, layer.chosen),
            tuple(rows(result, geometry.dtype, layer.hidden) for result in results),
        )

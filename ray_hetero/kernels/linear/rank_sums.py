"""Sums over the ranks of a tensor-parallel group inside of native calls.

A group's ranks each hold a part of the output and the down projection, whose products are to be
added up: twice a layer.  As operators between native calls these sums would end the parallel region
each time, and call all threads together anew.  Here the ranks meet inside of it, in memory that
their processes share (csrc/kernels/rank_sums.h).

Partial sums are float32: they are rounded once, when all are added up, so that a group's result is
no worse than that of one rank; of bf16 each would be rounded before, and to read twice the bytes
costs little beside waiting for each other.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class SumTerms:
    """Terms that the ranks of a group must share to add their products up in native calls."""

    level: str
    """Set of instructions of the kernels."""
    step_tokens: int
    """Most tokens of a step that is a native call."""
    elements: int
    """Most elements of a sum."""
    linears: int
    """Linear layers that the kernels compute."""


class RankSums:
    """The sums of this process's rank with the others of its group.

    Args:
        native: the module of the kernels.
        memory: shared by all ranks, uint8, zeroed.
        elements: most elements of a sum.
        ranks: global rank of each member.
        own: this rank's place among them.
        limit_s: longest wait for another rank, in seconds.
        connections: by member, a socket that ends with that rank's process; None where there is
            none.

    """

    def __init__(
        self,
        native: ModuleType,
        memory: torch.Tensor,
        *,
        elements: int,
        ranks: Sequence[int],
        own: int,
        limit_s: float,
        connections: Sequence[socket.socket | None],
    ) -> None:
        self._memory = memory
        self.connections = tuple(connections)
        self.ranks = tuple(ranks)
        self.own = own
        self.elements = elements
        self.limit_s = limit_s
        self.size = len(ranks)
        self.is_first = own == 0
        """Whether this rank is the one that biases are added by."""
        self.native: Any = native.RankSums(
            memory=memory.data_ptr(),
            bytes=memory.nbytes,
            elements=elements,
            ranks=list(ranks),
            own=own,
            limit_s=limit_s,
            connections=[-1 if one is None else one.fileno() for one in connections],
        )
        # Pages come from the NUMA node of who touches them first.
        begin, end = self.native.own_pages
        memory[begin:end].zero_()

        self.missing: type[Exception] = native.MissingRank
        """Exception that native calls raise where another rank is missing."""
        self._level = native.levels()[-1]

    def add(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """Let y be the sums of all ranks' x; all of them have to call this.

        Args:
            x: a multiple of 16 elements, at most `elements`, float32, contiguous.
            y: as many, bf16, contiguous.

        Raises:
            torch.distributed.DistError: as `meeting` says.

        """
        with meeting(self):
            self.native.run(x=x.data_ptr(), elements=x.numel(), y=y.data_ptr(), level=self._level)


def why_not_added(
    divided: Sequence[Any], added: Sequence[Any], sums: RankSums | None
) -> str:  # fmt: skip
    """Why the ranks of a group cannot add linear layers up in native calls; or "".

    Args:
        divided: vLLM's linear layers of which each rank has a part.
        added: those of them whose products the ranks add up.
        sums: of this rank with the others; None where it adds nothing up.

    """
    size = 1 if sums is None else sums.size
    if any(one.tp_size != size for one in divided):
        return "tensor-parallel ranks add their products up in between"
    if sums is not None and not all(one.reduce_results and one.input_is_parallel for one in added):
        return "tensor-parallel ranks add other products up than those that are known"
    return ""


Gather = Callable[[Any], list[Any]]
"""Function that tells all ranks of the group something, and gives what each has told."""


def gathering(group: Any, size: int) -> Gather:
    """A collective of all ranks of a group: gives each of them the values of all, by rank.

    Args:
        group: of torch.distributed, over Gloo.
        size: of the group.

    """

    def gather(value: Any) -> list[Any]:
        found: list[Any] = [None] * size
        dist.all_gather_object(found, value, group=group)
        return found

    return gather


@contextmanager
def meeting(sums: RankSums | None) -> Iterator[None]:
    """Let a native call be an exchange with the other ranks of a group, if there is one.

    Raises:
        torch.distributed.DistError: another rank has ended, is late or computes another step; an
            error of this kind follows from that rank's, as where a collective of PyTorch's fails.

    """
    if sums is None:
        yield
        return
    try:
        yield
    except sums.missing as error:
        raise dist.DistError(str(error)) from None

"""How the CPU ranks of a tensor-parallel group on one host come to share memory for their sums.

All ranks of the group call `joined` once their weights are loaded.  They tell each other what they
would add up; where all say the same, the first rank makes memory without a name, and hands it to
each of the others through a Unix socket.  These sockets stay open: of a process that ends, the
system closes them, which ends the others' wait.  Where anything is missing, no rank shares memory,
and vLLM's own all-reduce adds up between operators.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Sequence
from contextlib import ExitStack
from types import ModuleType

import torch
import torch.distributed as dist

from placement.host.sysfs import machine_id
from ray_hetero.kernels.linear.rank_sums import Gather, RankSums, SumTerms, gathering
from ray_hetero.log import logger
from ray_hetero.runtime import sealed_memory, unix_sockets

_MEMBER = struct.Struct("i")
"""Message of a rank that connects: its place in the group."""


def joined(
    group: dist.ProcessGroup,
    ranks: Sequence[int],
    native: ModuleType | None,
    terms: SumTerms | None,
    limit_s: float,
) -> RankSums | None:
    """Share memory with the other ranks of a group; all of them have to call this.

    Args:
        group: of processes on CPUs.
        ranks: global rank of each member.
        native: the module of the kernels.
        terms: what this rank adds up; None where its layers are not computed in native calls.
        limit_s: longest wait for another rank, now and in each step (exchange.timeout_s).

    Returns:
        None where some rank cannot.

    Raises:
        RuntimeError: another rank has ended, or is late.

    """

    gather = gathering(group, len(ranks))
    heard = gather(terms)
    if terms is None or any(other != terms for other in heard):
        if any(heard):
            told = ", ".join(f"rank {rank}: {one}" for rank, one in zip(ranks, heard, strict=True))
            logger.info("a decode step is not one native call: the ranks differ (%s)", told)
        return None
    assert native is not None
    own = ranks.index(dist.get_rank())
    size = native.RankSums.bytes(len(ranks), terms.elements)
    join = _begin if own == 0 else _join
    try:
        shared = join(own, len(ranks), size, gather, limit_s)
    except OSError as error:
        raise RuntimeError(
            f"one of the ranks {list(ranks)}, of one tensor-parallel group, has ended or was not "
            f"there in {limit_s:g} s (exchange.timeout_s): {error}"
        ) from None
    if shared is None:
        logger.warning(
            "the ranks %s of a tensor-parallel group on one host cannot share memory: vLLM's "
            "all-reduce adds up their products between operators, and decoding takes longer",
            list(ranks),
        )
        return None
    memory, connections = shared
    logger.info(
        "a decode step is one native call on each of the ranks %s, which add up their products in "
        "shared memory (cpu.fuse_layers)",
        list(ranks),
    )
    return RankSums(
        native, memory, elements=terms.elements, ranks=ranks, own=own, limit_s=limit_s,
        connections=connections,
    )  # fmt: skip


Shared = tuple[torch.Tensor, list[socket.socket | None]]
"""The memory, and what this rank is connected to the others by."""


def _begin(own: int, members: int, size: int, gather: Gather, limit_s: float) -> Shared | None:
    """Make the memory and hand it to all others."""
    with ExitStack() as stack, ExitStack() as kept:
        try:
            descriptor = sealed_memory.made("ray_hetero-sums", size)
            stack.callback(os.close, descriptor)
            listener = stack.enter_context(unix_sockets.unix_socket(limit_s))
            address = machine_id().encode(), unix_sockets.bind_abstract(listener)
            memory = sealed_memory.mapped(descriptor, size)
        except OSError as error:
            logger.warning("no memory can be shared: %s", error)
            gather(None)
            return None
        gather(address)
        if not all(gather(True)):
            return None
        connections: list[socket.socket | None] = [None] * members
        for _ in range(members - 1):
            end = kept.enter_context(unix_sockets.accepted(listener))
            end.settimeout(limit_s)
            member = _member(end.recv(_MEMBER.size), connections)
            socket.send_fds(end, [unix_sockets.NOTE], [descriptor])
            connections[member] = end
        kept.pop_all()
        return memory, connections


def _join(own: int, members: int, size: int, gather: Gather, limit_s: float) -> Shared | None:
    """Take the memory that the first rank has made."""
    with ExitStack() as stack, ExitStack() as kept:
        address = gather(None)[0]
        if address is None:
            return None
        connection = kept.enter_context(unix_sockets.unix_socket(limit_s))
        if not all(gather(_is_connected(connection, *address))):
            return None
        connection.send(_MEMBER.pack(own))
        _, descriptors, _, _ = socket.recv_fds(connection, len(unix_sockets.NOTE), 1)
        if not descriptors:
            raise RuntimeError("the first rank of this tensor-parallel group has ended")
        stack.callback(os.close, descriptors[0])
        if not sealed_memory.has_size(descriptors[0], size):
            raise RuntimeError(
                f"the memory for sums of a tensor-parallel group is not sealed at {size} bytes; "
                "do all ranks run the same release?"
            )
        memory = sealed_memory.mapped(descriptors[0], size)
        kept.pop_all()
        return memory, [connection, *[None] * (members - 1)]


def _member(message: bytes, connections: Sequence[socket.socket | None]) -> int:
    """The place in the group that a process has told.

    Raises:
        RuntimeError: it has told none of those that are left.

    """
    member = _MEMBER.unpack(message)[0] if len(message) == _MEMBER.size else 0
    if not 0 < member < len(connections) or connections[member] is not None:
        raise RuntimeError(
            f"a process that is no other rank of this group of {len(connections)} has connected to "
            f"its first rank and sent {message!r}; do all ranks run the same release?"
        )
    return int(member)


def _is_connected(connection: socket.socket, machine: bytes, name: bytes) -> bool:
    if not machine or machine != machine_id().encode():
        return False
    try:
        unix_sockets.connect(connection, name)
    except OSError as error:
        logger.warning("the memory for sums, on this machine, is out of reach: %s", error)
        return False
    return True

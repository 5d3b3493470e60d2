"""Messages among the CPU ranks of a group around a step that one GPU computes for all.

The first rank orders the GPU's work.  Every other rank tells it which step it has come to, before
any memory of that rank is read or written; then it waits until the first rank says how the step has
ended.  They talk through the Unix sockets that they have shared memory through
(distributed/shared_sums.py), one message each way a step: the system ends a wait for a process that
is not there any more.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist

from placement.given import shown
from ray_hetero.kernels import step_trace
from ray_hetero.kernels.linear.rank_sums import RankSums
from ray_hetero.kernels.step_trace import Event
from ray_hetero.log import logger
from ray_hetero.runtime.shared_pages import SharedPages, kept_at
from ray_hetero.runtime.unix_sockets import MALFORMED, unlike

MOST_BYTES = 1 << 16
"""Most bytes of a message."""
MOST_TEXT = 1000
"""Characters of an error that is handed on."""
_STEP = struct.Struct("5q")
_YES, _NO = b"yes", b"no"
RESULTS = 2
"""Number of results: what is to be added to the residual, and the residual."""
Caches = tuple[tuple[torch.Tensor, ...], ...]
"""Caches of all layers of each other rank."""


class PromptGroup:
    """The ranks of a group, of which the first has a GPU compute prompts for all.

    Args:
        sums: of the group, whose connections are used.
        results: memory that all ranks map, [2, elements], bf16.

    """

    def __init__(self, sums: RankSums, results: torch.Tensor) -> None:
        self.is_first = sums.is_first
        self.results = results
        """Memory for the hidden states and residuals of a step on the GPU, [2, elements]."""
        self._sums = sums
        self._round = 0
        self._mapped: dict[int, SharedPages] = {}

    def begin(self, step: Sequence[int]) -> None:
        """Come to a step; the first rank waits until all others have come to the same.

        Args:
            step: four numbers that say which one it is.

        Raises:
            torch.distributed.DistError: a rank has ended, is late, or has come to another step.

        """
        self._round += 1
        own = _STEP.pack(self._round, *step)
        if not self.is_first:
            step_trace.note(Event.MESSAGE, self._sums.own, "begins", *step)
            self._send(0, own)
            return
        for member in self._others():
            if self._receive(member) != own:
                raise dist.DistError(f"{self._name(member)} computes another step")

    @contextmanager
    def telling(self, *, stays: bool = False) -> Iterator[None]:
        """Tell all other ranks how the first one's part of a step ends.

        Args:
            stays: whether its results stay on the GPU, and are not in the ranks' memory.

        """
        said: dict[str, Any] = {"problem": "the step was not computed"}
        try:
            yield
            said = {"stays": stays}
        except torch.OutOfMemoryError as error:
            said = {"memory": str(error)[:MOST_TEXT]}
            raise
        except (RuntimeError, TimeoutError) as error:
            said = {"problem": str(error)[:MOST_TEXT]}
            raise
        finally:
            # The others are told also where one of them has ended, whose name they would not know.
            step_trace.note(Event.MESSAGE, self._sums.own, "ends", said)
            with ExitStack() as stack:
                for member in self._others():
                    stack.callback(self._send, member, json.dumps(said).encode())

    def wait(self) -> bool:
        """Wait in another rank until the first one has had the step computed.

        Returns:
            Whether the results stay on the GPU.

        Raises:
            torch.OutOfMemoryError: the GPU has run out of memory.
            torch.distributed.DistError: the first rank has failed, has ended or is late.

        """
        message = self._receive(0)
        with self._meeting(0):
            said = {**json.loads(message)}
            if "memory" in said:
                raise torch.OutOfMemoryError(str(said["memory"]))
            if "problem" in said:
                raise dist.DistError(f"{self._name(0)} has failed: {said['problem']}")
            return bool(said["stays"])

    def caches(self, own: Sequence[torch.Tensor]) -> Caches | None:
        """Hand layers' caches to the first rank, and take them there; once for each run of layers.

        Args:
            own: of each layer, [blocks, kv heads, tokens of a block, 2 · size], bf16.

        Returns:
            Those of the other ranks, none where this rank is not the first; None on all ranks if
            those of any cannot be mapped.

        """
        if not self.is_first:
            self._offer(own)
            return () if self._receive(0) == _YES else None
        found = [self._taken(member, own) for member in self._others()]
        can = all(one is not None for one in found)
        for member in self._others():
            self._send(member, _YES if can else _NO)
        return tuple(one for one in found if one is not None) if can else None

    def _offer(self, own: Sequence[torch.Tensor]) -> None:
        pages = {kept_at(cache.untyped_storage().data_ptr()) for cache in own}
        (shared,) = pages if len(pages) == 1 else (None,)
        if shared is None:
            logger.warning("this rank's KV cache is not in memory that other ranks can map")
            self._send(0, b"{}")
            return
        said = {
            "shape": list(own[0].shape),
            "stride": own[0].stride(),
            "offsets": [cache.storage_offset() for cache in own],
        }
        with self._meeting(0) as connection:
            socket.send_fds(connection, [json.dumps(said).encode()], [shared.descriptor])

    def _taken(self, member: int, own: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...] | None:
        with self._meeting(member) as connection:
            message, descriptors, _, _ = socket.recv_fds(connection, MOST_BYTES, 1)
            try:
                if not message:
                    raise self._ended(member)
                said = json.loads(message)
                if said == {} or not descriptors:
                    logger.warning(
                        "%s has no KV cache that can be mapped: the cores compute prompts",
                        self._name(member),
                    )
                    return None
                memory = self._pages(member, descriptors[0])
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
            return self._views(member, said, memory, own)

    def _views(
        self, member: int, said: dict[str, Any], memory: torch.Tensor, own: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """Caches of another rank, which has said where they lie."""
        shape, stride, offsets = said["shape"], said["stride"], said["offsets"]
        expected = list(own[0].shape), list(own[0].stride()), len(own)
        if (shape, stride, len(offsets)) != expected:
            raise dist.DistError(
                f"{self._name(member)} has another KV cache: {shown(shape)} with strides "
                f"{shown(stride)} for each of {len(offsets)} layers, expected {expected[0]} with "
                f"{expected[1]} for {expected[2]}"
            )
        elements = memory[: memory.nbytes // 2 * 2].view(torch.bfloat16)
        room = len(elements) - _extent(own[0])
        if not all(type(offset) is int and 0 <= offset <= room for offset in offsets):
            raise ValueError(f"{shown(offsets)} in memory of {memory.nbytes} bytes")
        return tuple(elements.as_strided(shape, stride, offset) for offset in offsets)

    def _pages(self, member: int, descriptor: int) -> torch.Tensor:
        """Memory of another rank, mapped once."""
        try:
            number = os.fstat(descriptor).st_ino
            if number not in self._mapped:
                self._mapped[number] = SharedPages.received(descriptor)
        except (OSError, RuntimeError) as error:
            raise dist.DistError(
                f"{self._name(member)} has a KV cache whose memory cannot be mapped: {error}"
            ) from None
        return self._mapped[number].memory

    def _others(self) -> range:
        return range(1, self._sums.size)

    def _name(self, member: int) -> str:
        return f"rank {self._sums.ranks[member]}, of the same tensor-parallel group,"

    def _ended(self, member: int) -> dist.DistError:
        return dist.DistError(f"{self._name(member)} has ended")

    def _send(self, member: int, message: bytes) -> None:
        with self._meeting(member) as connection:
            connection.send(message)

    def _receive(self, member: int) -> bytes:
        with self._meeting(member) as connection:
            message: bytes = connection.recv(MOST_BYTES)
        if not message:
            raise self._ended(member)
        return message

    @contextmanager
    def _meeting(self, member: int) -> Iterator[Any]:
        """The connection with a rank, within the limit.

        Raises:
            torch.distributed.DistError: the rank has ended or is late; as where sums wait for it.

        """
        connection = self._sums.connections[member]
        assert connection is not None
        connection.settimeout(self._sums.limit_s)
        try:
            yield connection
        except TimeoutError:
            raise dist.DistError(
                f"{self._name(member)} was not there in {self._sums.limit_s:g} s "
                "(exchange.timeout_s)"
            ) from None
        except ConnectionError:
            raise self._ended(member) from None
        except MALFORMED as error:
            raise dist.DistError(f"{self._name(member)} {unlike(error)}") from None


def _extent(tensor: torch.Tensor) -> int:
    """Elements of memory from a tensor's first one to its last."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((int(size) - 1) * int(stride) for size, stride in steps)

"""The memory of one step's message between two stages.

    header │ row 0: hidden states, residual │ row 1: … │ …

Both stages know the number of tokens of a step from the scheduler's output, so nothing is said
about the rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Protocol

import numpy as np
import torch

from ray_hetero.runtime.stream_words import VALUES

Tensors = dict[str, torch.Tensor]

HEADER_BYTES = 64
ALIGNMENT = 64
"""Bytes to whose multiple each tensor's part of a row is filled up."""


class OnItsWay(Protocol):
    """A message that is being sent or received."""

    def wait(self) -> object:
        """Wait until the message is there.

        Raises:
            RuntimeError: the other stage is late, or has ended.

        """


class There:
    """A message that needs no time on its way."""

    def is_completed(self) -> bool:
        """Whether it is there; vLLM's handles have this."""
        return True

    def wait(self) -> None:
        """Nothing to wait for."""


class Packing:
    """How the tensors of a token lie in a row, one behind the other."""

    def __init__(self, template: Mapping[str, torch.Tensor]) -> None:
        self._parts: dict[str, tuple[int, int, tuple[int, ...], torch.dtype]] = {}
        end = 0
        for name in sorted(template):
            shape, dtype = tuple(template[name].shape[1:]), template[name].dtype
            nbytes = prod(shape) * dtype.itemsize
            self._parts[name] = (end, end + nbytes, shape, dtype)
            end += -(-nbytes // ALIGNMENT) * ALIGNMENT
        self.row_bytes = end

    @property
    def names(self) -> set[str]:
        """Names of the tensors."""
        return set(self._parts)

    def message_bytes(self, capacity: int) -> int:
        """Bytes of a message's memory for so many tokens."""
        return HEADER_BYTES + capacity * self.row_bytes

    def views(self, rows: torch.Tensor) -> Tensors:
        """The tensors inside a block of rows.

        Args:
            rows: uint8, [tokens, row_bytes].

        Returns:
            Views of shape [tokens, …], by name.

        """
        return {
            name: rows[:, begin:end].view(dtype).unflatten(1, shape)
            for name, (begin, end, shape, dtype) in self._parts.items()
        }


class Message:
    """One step's message, for as many tokens as there is memory.

    Args:
        packing: how the tensors lie in a row.
        memory: of the host, uint8, [packing.message_bytes(capacity)].

    """

    def __init__(self, packing: Packing, memory: torch.Tensor) -> None:
        self._memory = memory
        self._row_bytes = packing.row_bytes
        # Written by threads that are not in inference mode, hence not through torch.
        self._stamp = memory[:8].numpy().view(np.float64)
        self._marks = memory[8:32].numpy().view(np.int64)
        self._done = memory[32:36].numpy().view(np.uint32)
        self._complete = memory[36:40].numpy().view(np.uint32)
        self.number = 0
        """Times that it will have been complete once all is there that was begun last."""
        self.rows = memory[HEADER_BYTES:].view(-1, packing.row_bytes)
        self.tensors = packing.views(self.rows)
        self.sent: OnItsWay | None = None

    @property
    def computed_at(self) -> float:
        """When the sender had the tensors, in seconds of its clock."""
        return float(self._stamp[0])

    @computed_at.setter
    def computed_at(self, seconds: float) -> None:
        self._stamp[0] = seconds

    @property
    def is_on_gpu(self) -> bool:
        """Whether the rows lie in memory of a GPU that both ends see, and not here."""
        return bool(self._marks[0])

    @is_on_gpu.setter
    def is_on_gpu(self, is_there: bool) -> None:
        self._marks[0] = is_there
        if is_there:
            self._marks[1] = 0

    @property
    def is_taken(self) -> bool:
        """Whether the receiver has read such rows."""
        return bool(self._marks[1])

    def take(self) -> None:
        """Say that such rows have been read."""
        self._marks[1] = 1

    @property
    def awaited(self) -> int:
        """Number by which a GPU's stream waits for such rows; 0 where they are there."""
        return int(self._marks[2])

    @awaited.setter
    def awaited(self, number: int) -> None:
        self._marks[2] = number

    @property
    def done(self) -> int:
        """Number of the last step with such rows that the receiver's GPU has computed."""
        return int(self._done[0])

    @property
    def done_address(self) -> int:
        """Address of `done`, 32 bits, which a stream of that GPU writes."""
        return int(self._done.ctypes.data)

    @property
    def complete_address(self) -> int:
        """Address of the times that it was complete, 32 bits, which a stream can wait for."""
        return int(self._complete.ctypes.data)

    def begin(self) -> None:
        """Begin to fill it, or to receive it."""
        self.number = (self.number + 1) % VALUES

    def complete(self) -> None:
        """Say that all is there that was begun last."""
        self._complete[0] = self.number

    def of(self, tokens: int) -> torch.Tensor:
        """The part of it that a step of so many tokens needs."""
        return self._memory[: HEADER_BYTES + tokens * self._row_bytes]

    def wait_until_sent(self) -> None:
        """Wait until what it last held has been sent."""
        if self.sent is not None:
            self.sent.wait()
            self.sent = None

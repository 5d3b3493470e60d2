"""Two words of a GPU's memory behind rows that one rank computes there and another one reads.

One says when the rows are there, the other when they have been read.  Streams of both ranks write
them and wait for them (runtime/stream_words.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ray_hetero.kernels import step_trace
from ray_hetero.kernels.step_trace import Event
from ray_hetero.runtime.stream_words import VALUES, words_of

if TYPE_CHECKING:
    import torch

WORD_BYTES = 64
"""Bytes for each of the two words behind the rows."""


class Words:
    """One end of the two words behind rows: it writes one of them and waits for the other.

    Args:
        memory: of the rows and the words, uint8.
        is_sender: whether this end writes that rows are there, and waits for their being read; the
            other end does the reverse.
        device: the GPU.
        stream: writes and waits.

    Raises:
        UnsupportedError: the GPU's driver refuses that.

    """

    def __init__(
        self, memory: torch.Tensor, device: torch.device, stream: Any, *, is_sender: bool
    ) -> None:
        end = memory.data_ptr() + memory.nbytes
        there, read = end - 2 * WORD_BYTES, end - WORD_BYTES
        self._own, self._other = (there, read) if is_sender else (read, there)
        self._names = ("there", "read") if is_sender else ("read", "there")
        """Names of the words that this end writes and waits for, in traces."""
        self._stream = words_of(device, stream, self._own)

    def say(self, number: int) -> None:
        """Write the number of a step where the stream comes to it.

        Raises:
            RuntimeError: CUDA's driver refuses it.

        """
        step_trace.note(Event.WORD, "write", self._names[0], number)
        self._stream.write(self._own, number % VALUES)

    def tell(self, address: int, number: int) -> None:
        """Write the number of a step to another word, of locked memory of the host, as `say` does.

        Raises:
            RuntimeError: as `say`.

        """
        step_trace.note(Event.WORD, "write", "computed", number)
        self._stream.write(address, number % VALUES)

    def wait(self, number: int) -> None:
        """Make the stream wait until the other end has reached a step, by its number.

        Raises:
            RuntimeError: as `say`.

        """
        step_trace.note(Event.WORD, "wait", self._names[1], number)
        self._stream.wait(self._other, number % VALUES)

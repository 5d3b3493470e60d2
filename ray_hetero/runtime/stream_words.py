"""Words of host memory that a GPU's stream writes, and waits for.

Memory operations of a stream need no function of the host, and can be captured into a CUDA graph:
cuStreamBatchMemOp of CUDA's driver API, section "Stream Memory Operations".

This module needs PyTorch and CUDA's driver, not vLLM.
"""

from __future__ import annotations

import ctypes
import time
from typing import Any, Protocol

import torch

from ray_hetero.errors import UnsupportedError

_WAIT_VALUE_32 = 1
_WRITE_VALUE_32 = 2
_AT_LEAST = 0
"""CU_STREAM_WAIT_VALUE_GEQ: the difference is not negative, so that words may go round."""
_NAP_S = 1e-5
VALUES = 1 << 32
"""Number of different values of a word, which goes round."""


class _Operation(ctypes.Structure):
    """CUstreamBatchMemOpParams of a word of 32 bits."""

    _fields_ = (
        ("operation", ctypes.c_uint),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint),
        ("alias", ctypes.c_uint64),
        ("padding", ctypes.c_uint64),
    )


def waiting(address: int, value: int) -> tuple[int, int, int]:
    """Operation that waits until the word at an address has at least a value."""
    return _WAIT_VALUE_32, address, value


def writing(address: int, value: int) -> tuple[int, int, int]:
    """Operation that writes a value to the word at an address."""
    return _WRITE_VALUE_32, address, value


def operations(*given: tuple[int, int, int]) -> Any:
    """Operations in the form that the driver takes."""
    made = [_Operation(kind, address, value, _AT_LEAST, 0, 0) for kind, address, value in given]
    return (_Operation * len(made))(*made)


class Driver:
    """CUDA's driver, as far as streams and words are concerned."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libcuda.so.1")

    def run(self, given: Any, stream: Any) -> int:
        """Order operations on a stream; a CUresult, 0 for success."""
        at = ctypes.c_void_p(stream.cuda_stream)
        return int(self.library.cuStreamBatchMemOp_v2(at, len(given), given, ctypes.c_uint(0)))


class StreamWords(Protocol):
    """Words that a stream waits for and writes."""

    def wait(self, address: int, value: int) -> None:
        """Make the stream wait until the word at an address has at least a value."""

    def write(self, address: int, value: int) -> None:
        """Write a value to the word at an address, in the order of the stream."""


class OfGpu:
    """Words of page-locked memory, and a stream of a GPU."""

    def __init__(self, stream: Any) -> None:
        self._driver, self._stream = Driver(), stream

    def wait(self, address: int, value: int) -> None:
        """Wait as `StreamWords` says.

        Raises:
            RuntimeError: the driver refuses it.

        """
        self._run(waiting(address, value))

    def write(self, address: int, value: int) -> None:
        """Write as `StreamWords` says.

        Raises:
            RuntimeError: the driver refuses it.

        """
        self._run(writing(address, value))

    def _run(self, operation: tuple[int, int, int]) -> None:
        if status := self._driver.run(operations(operation), self._stream):
            raise RuntimeError(
                f"CUDA's driver refuses a stream memory operation (CUresult {status})"
            )


class CurrentStream:
    """The stream of a GPU that is current when something is ordered."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def cuda_stream(self) -> int:
        """Its handle."""
        return int(torch.cuda.current_stream(self._device).cuda_stream)


class OfHost:
    """The same where the CPU takes the place of a GPU: the thread that orders work does it."""

    def wait(self, address: int, value: int) -> None:
        """Wait as `StreamWords` says."""
        word = ctypes.c_uint32.from_address(address)
        while (word.value - value) % VALUES >= VALUES // 2:
            time.sleep(_NAP_S)

    def write(self, address: int, value: int) -> None:
        """Write as `StreamWords` says."""
        ctypes.c_uint32.from_address(address).value = value % VALUES


def words_of(device: torch.device, stream: Any, address: int) -> StreamWords:
    """Words for a stream of a device.

    Args:
        device: the GPU; for tests the CPU.
        stream: of the GPU.
        address: of a word, which becomes 0.

    Raises:
        UnsupportedError: CUDA's driver refuses such operations.

    """
    if device.type != "cuda":
        return OfHost()
    words = OfGpu(stream)
    try:
        words.write(address, 0)
    except RuntimeError as error:
        raise UnsupportedError(str(error)) from None
    return words

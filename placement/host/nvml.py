"""NVIDIA's management library as far as this project asks it.

The driver brings the library; ctypes is enough to ask it, so no Python package is needed.  Names
and codes: NVML API Reference Manual, "Device Queries" and "Device Enums".
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

LIBRARY = "libnvidia-ml.so.1"
INSUFFICIENT_SIZE = 7
"""Code of a list that is longer than the room for it: of processes, that there are some."""
CLOCK_SM, CLOCK_MEMORY = 1, 2
TEXT_BYTES = 96


class NvmlError(Exception):
    """The library is not there, or no driver answers it."""


class _Memory(ctypes.Structure):
    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


class _PciInfo(ctypes.Structure):
    _fields_ = (
        ("legacy_address", ctypes.c_char * 16),
        ("domain", ctypes.c_uint),
        ("bus", ctypes.c_uint),
        ("device", ctypes.c_uint),
        ("device_id", ctypes.c_uint),
        ("subsystem_id", ctypes.c_uint),
        ("address", ctypes.c_char * 32),
    )


@contextmanager
def opened() -> Iterator[Nvml]:
    """The library, for a while.

    Raises:
        NvmlError: it is not installed, or no driver is loaded.

    """
    try:
        functions = ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise NvmlError(str(error)) from None
    if code := functions.nvmlInit_v2():
        raise NvmlError(f"nvmlInit answers {code}")
    try:
        yield Nvml(functions)
    finally:
        functions.nvmlShutdown()


@dataclass(frozen=True)
class Nvml:
    """The opened library.  What it does not know, or an older one does not have, is None."""

    functions: ctypes.CDLL

    @property
    def driver(self) -> str | None:
        """Version of the driver."""
        text = ctypes.create_string_buffer(TEXT_BYTES)
        return _decoded(text.value) if self._ask("nvmlSystemGetDriverVersion", text, 80) else None

    def count(self) -> int:
        """Number of GPUs."""
        found = ctypes.c_uint()
        return found.value if self._ask("nvmlDeviceGetCount_v2", ctypes.byref(found)) else 0

    def device(self, index: int) -> NvmlDevice | None:
        """A GPU by its number; None where this user may not ask it."""
        handle = ctypes.c_void_p()
        found = self._ask("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index),
                          ctypes.byref(handle))  # fmt: skip
        return NvmlDevice(self, handle) if found else None

    def _ask(self, name: str, *arguments: object) -> bool:
        return self.code(name, *arguments) == 0

    def code(self, name: str, *arguments: object) -> int | None:
        """Result code of a function, 0 for success; None where the library does not have it."""
        function = getattr(self.functions, name, None)
        return None if function is None else int(function(*arguments))


@dataclass(frozen=True)
class NvmlDevice:
    """One GPU."""

    library: Nvml
    handle: ctypes.c_void_p

    def number(self, function: str, *selector: int) -> int | None:
        """Answer of a function that gives one unsigned number; None without one.

        Args:
            function: its name without `nvmlDeviceGet`.
            selector: what the function takes between the device and the answer.

        """
        found = ctypes.c_uint()
        chosen = map(ctypes.c_uint, selector)
        return found.value if self._ask(function, *chosen, ctypes.byref(found)) else None

    def text(self, function: str) -> str | None:
        """Answer of a function that gives a text; its name is without `nvmlDeviceGet`."""
        found = ctypes.create_string_buffer(TEXT_BYTES)
        asked = self._ask(function, found, ctypes.c_uint(TEXT_BYTES))
        return _decoded(found.value) if asked else None

    @property
    def memory_bytes(self) -> int | None:
        """All memory of the GPU; None where it has none of its own."""
        found = _Memory()
        return int(found.total) if self._ask("MemoryInfo", ctypes.byref(found)) else None

    @property
    def pci_address(self) -> str | None:
        """Address on the PCI bus, like 00000000:65:00.0."""
        found = _PciInfo()
        asked = self._ask("PciInfo_v3", ctypes.byref(found))
        return _decoded(found.address) if asked else None

    @property
    def compute_capability(self) -> tuple[int, int] | None:
        """CUDA's number of the architecture, like (9, 0)."""
        major, minor = ctypes.c_int(), ctypes.c_int()
        asked = self._ask("CudaComputeCapability", ctypes.byref(major), ctypes.byref(minor))
        return (major.value, minor.value) if asked else None

    @property
    def is_computing(self) -> bool:
        """Whether some process has CUDA work on it."""
        room = ctypes.c_uint(0)
        code = self._code("ComputeRunningProcesses_v3", ctypes.byref(room), None)
        return code == INSUFFICIENT_SIZE

    def _ask(self, function: str, *arguments: object) -> bool:
        return self._code(function, *arguments) == 0

    def _code(self, function: str, *arguments: object) -> int | None:
        # "Cuda…" and "Max…" alike: all have the same beginning.
        return self.library.code(f"nvmlDeviceGet{function}", self.handle, *arguments)


def _decoded(text: bytes) -> str:
    return text.decode(errors="replace")

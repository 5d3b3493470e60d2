"""Program that times copies within a GPU's memory and over its link, and prints them as JSON.

`python -m placement.host.gpu_copies [CPU …]` measures the first visible GPU from these logical
CPUs.  It calls CUDA's driver through ctypes, and so needs no torch, whose import alone takes longer
than the copies.  Names: CUDA Driver API, "Memory Management" and "Event Management".
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict

from placement.host.topology import GpuRates
from placement.units import MIB

LIBRARY = "libcuda.so.1"
LINK_BYTES = 128 * MIB
MEMORY_BYTES = 1024 * MIB
"""Much more than the largest second-level cache."""
SMALLEST = 16 * MIB
REPEATS = 5


class CudaError(Exception):
    """CUDA's driver refuses a call; the message names it and the code."""


class Driver:
    """CUDA's driver with the first visible GPU's context made current."""

    def __init__(self, library: str = LIBRARY) -> None:
        self._functions = ctypes.CDLL(library)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuInit", ctypes.c_uint(0))
        self.call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(0))
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)

    def call(self, name: str, *arguments: object) -> None:
        """Call a function.

        Raises:
            CudaError: it answers anything but success.

        """
        if code := getattr(self._functions, name)(*arguments):
            raise CudaError(f"{name} answers {code} (CUresult)")

    def allocated(self, name: str, wanted: int, *arguments: object) -> tuple[ctypes.c_void_p, int]:
        """Memory of the wanted size, or of the largest half, quarter … of it that there is.

        Raises:
            CudaError: not even a small piece is free.

        """
        address = ctypes.c_void_p()
        while True:
            try:
                self.call(name, ctypes.byref(address), ctypes.c_size_t(wanted), *arguments)
            except CudaError:
                wanted //= 2
                if wanted < SMALLEST:
                    raise
            else:
                return address, wanted

    def best_s(self, start_copy: Callable[[], None]) -> float:
        """Seconds of the fastest of several copies; the first, which wakes the link, is not one."""
        begin, end = ctypes.c_void_p(), ctypes.c_void_p()
        for event in (begin, end):
            self.call("cuEventCreate", ctypes.byref(event), ctypes.c_uint(0))
        start_copy()
        times = []
        for _ in range(REPEATS):
            self.call("cuEventRecord", begin, None)
            start_copy()
            self.call("cuEventRecord", end, None)
            self.call("cuEventSynchronize", end)
            milliseconds = ctypes.c_float()
            self.call("cuEventElapsedTime", ctypes.byref(milliseconds), begin, end)
            times.append(milliseconds.value / 1e3)
        return min(times)


def rates(driver: Driver) -> GpuRates:
    """Time the copies.

    Raises:
        CudaError: there is no memory, or CUDA refuses a call.

    """
    host, size = driver.allocated("cuMemHostAlloc", LINK_BYTES, ctypes.c_uint(0))
    source, room = driver.allocated("cuMemAlloc_v2", MEMORY_BYTES)
    target, room = driver.allocated("cuMemAlloc_v2", room)
    size = min(size, room)

    def copy(name: str, to: ctypes.c_void_p, what: ctypes.c_void_p, count: int) -> float:
        return count / driver.best_s(
            lambda: driver.call(name, to, what, ctypes.c_size_t(count), None)
        )

    return GpuRates(
        # A copy reads each byte and writes it.
        memory=2 * copy("cuMemcpyDtoDAsync_v2", target, source, room),
        to_gpu=copy("cuMemcpyHtoDAsync_v2", target, host, size),
        from_gpu=copy("cuMemcpyDtoHAsync_v2", host, target, size),
    )


def main(cpus: Sequence[str]) -> None:
    """Measure and print; the exit status is 1 where CUDA does not work."""
    near = os.sched_getaffinity(0) & set(map(int, cpus))
    if near:
        os.sched_setaffinity(0, near)
    try:
        found = rates(Driver())
    except (CudaError, OSError) as error:
        sys.exit(str(error))
    print(json.dumps(asdict(found)))


if __name__ == "__main__":
    main(sys.argv[1:])

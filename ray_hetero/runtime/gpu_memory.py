"""Memory of a GPU, as tensors, shared with other processes of the host; and locked host memory.

CUDA's driver API: cuMemAlloc, and cuIpcGetMemHandle and cuIpcOpenMemHandle of its section "Memory
Management".  PyTorch's own way to share tensors keeps count of readers in files of /dev/shm, which
a killed process leaves behind.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

_HANDLE_BYTES = 64
_MAY_BE_OF_A_PEER = 1
"""CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, which cuIpcOpenMemHandle asks for."""
_locked: dict[tuple[int, int], torch.Tensor] = {}
"""Locked tensors by address and bytes.  Kept: other memory at an address that CUDA has locked could
not be locked."""


class _Handle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = (("reserved", ctypes.c_char * _HANDLE_BYTES),)


class _Bytes:
    """Memory of a GPU, for torch to see; see the CUDA Array Interface."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3,
        }  # fmt: skip


def identity(device: torch.device) -> str:
    """The GPU's own identity, which processes that number GPUs otherwise have in common."""
    return str(torch.cuda.get_device_properties(device).uuid)


def made(device: torch.device, nbytes: int) -> tuple[torch.Tensor, bytes]:
    """Take memory of a GPU, until it is given back or this process ends.

    Args:
        device: the current GPU of this thread.
        nbytes: how much.

    Returns:
        It, uint8, [nbytes], and the handle that another process opens it by.

    Raises:
        RuntimeError: the GPU has too little memory left, or cannot share it.

    """
    address, handle = ctypes.c_uint64(), _Handle()
    _call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(nbytes))
    try:
        _call("cuIpcGetMemHandle", ctypes.byref(handle), address)
    except RuntimeError:
        _call("cuMemFree_v2", address)
        raise
    return seen(address.value, nbytes, device), bytes(handle)


def give_back(memory: torch.Tensor) -> None:
    """Free what `made` has given; nothing may use it any more."""
    _call("cuMemFree_v2", ctypes.c_uint64(memory.data_ptr()))


def opened(device: torch.device, handle: bytes, nbytes: int) -> torch.Tensor:
    """Memory that another process has made on the same GPU; it is there as long as that process.

    Args:
        device: the current GPU of this thread.
        handle: see `made`.
        nbytes: its size.

    Raises:
        RuntimeError: this process cannot see it, as from another container.

    """
    address = ctypes.c_uint64()
    flags = ctypes.c_uint(_MAY_BE_OF_A_PEER)
    _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), _Handle.from_buffer_copy(handle), flags)
    return seen(address.value, nbytes, device)


def seen(address: int, nbytes: int, device: torch.device) -> torch.Tensor:
    """Memory that a GPU reaches by an address, its own or locked memory of the host.

    Args:
        address: where it begins; it outlives what is returned.
        nbytes: its size.
        device: the GPU.

    Returns:
        uint8, [nbytes].

    """
    return torch.as_tensor(_Bytes(address, nbytes), device=device)


def _call(name: str, *arguments: Any) -> None:
    status = getattr(ctypes.CDLL("libcuda.so.1"), name)(*arguments)
    if status:
        raise RuntimeError(f"{name} of CUDA's driver answers {status}")


def lock_pages(memory: torch.Tensor) -> None:
    """Lock memory for as long as the process lives, once; it belongs to the current GPU.

    See cudaHostRegister.

    Args:
        memory: of the host, contiguous, of any dtype and shape.

    Raises:
        RuntimeError: the system refuses; what CUDA says.

    """
    where = memory.data_ptr(), memory.nbytes
    if where in _locked:
        return
    status = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    torch.cuda.check_error(int(status))
    _locked[where] = memory

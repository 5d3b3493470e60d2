"""Host memory whose pages stay in their places, so that a GPU copies from and to it by itself."""

from __future__ import annotations

import torch

_locked: dict[tuple[int, int], torch.Tensor] = {}
"""Locked tensors by address and bytes.  Kept: other memory at an address that CUDA has locked could
not be locked."""


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

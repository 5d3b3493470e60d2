"""Host memory whose pages stay in their places, so that a GPU copies from and to it by itself."""

from __future__ import annotations

import torch


def lock_pages(memory: torch.Tensor, device: torch.device) -> None:
    """Lock memory for as long as the process lives.

    Args:
        memory: of the host, contiguous, of any dtype and shape.
        device: the GPU whose context it is locked in; see cudaHostRegister.

    Raises:
        RuntimeError: the system refuses; what CUDA says.

    """
    # Locked memory belongs to the current one.
    torch.cuda.set_device(device)
    status = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    torch.cuda.check_error(int(status))

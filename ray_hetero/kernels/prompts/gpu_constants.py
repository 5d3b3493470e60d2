"""Small tensors of layers that a GPU keeps."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class _Constant:
    """A small tensor, here and on the GPU; as long as it is here its address is its own."""

    here: torch.Tensor
    there: torch.Tensor


class GpuConstants:
    """Biases and norms' weights, each sent once.

    Args:
        device: the GPU.

    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sent: dict[int, _Constant] = {}

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same in bf16 on the GPU."""
        at = tensor.data_ptr()
        if at not in self._sent:
            self._sent[at] = _Constant(tensor, tensor.to(self._device, torch.bfloat16))
        return self._sent[at].there

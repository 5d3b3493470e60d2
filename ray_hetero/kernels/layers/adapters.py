"""LoRA adapters of requests: their addends to the linear layers of a CPU rank.

A step may have a request of one adapter beside another's, and beside requests without.  A decode
step adds them in its native call (csrc/kernels/adapters.h); for steps of many tokens they are added
here, one adapter after the other, where vLLM's operators would copy an adapter for each token.
Both read vLLM's own tensors, so that an adapter that comes or goes needs no notice.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch.nn import functional

from ray_hetero.compat.models.lora import StackedAdapters, stacked_adapters

OUTPUTS_MULTIPLE = 16
"""Divisor of the number of a slice's outputs: a vector's elements."""


class Adapters:
    """The adapters of a linear layer.

    Args:
        stacked: vLLM's tensors.
        native: the module of the kernels.

    Raises:
        ValueError: outputs in another multiple than those of a vector.

    """

    def __init__(self, stacked: StackedAdapters, native: ModuleType) -> None:
        self._stacked = stacked
        self.count, _, self.rank, inputs = stacked.a[0].shape
        self.native: Any = native.Adapters(
            slots=self.count,
            rank=self.rank,
            k=inputs,
            slices=[
                (a.data_ptr(), b.data_ptr(), b.shape[2])
                for a, b in zip(stacked.a, stacked.b, strict=True)
            ],
        )

    def slots(self, tokens: int) -> torch.Tensor | None:
        """The slot of each token of this step [tokens], int64; None where no token has one."""
        found = self._stacked.slots()[:tokens]
        if not len(found) or int(found.max()) < 0:
            return None
        # Rows behind the step's own belong to no request.
        return functional.pad(found, (0, tokens - len(found)), value=-1)

    def add(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """Add what the step's adapters give, with the rounding of vLLM's operators.

        Args:
            x: [M, K], bf16.
            y: [M, N], bf16, the layer's product; changed in place.

        """
        slots = self.slots(len(x))
        if slots is None:
            return
        for slot in slots.unique().tolist():
            if slot < 0:
                continue
            rows = (slots == slot).nonzero().flatten()
            own, begin = x[rows].float(), 0
            for a, b in zip(self._stacked.a, self._stacked.b, strict=True):
                end = begin + b.shape[2]
                shrunk = (own @ a[slot, 0].float().T).to(y.dtype).float()
                y[rows, begin:end] += (shrunk @ b[slot, 0].float().T).to(y.dtype)
                begin = end


def adapters_of(
    module: Any, shape: Sequence[int], native: ModuleType, dtype: torch.dtype = torch.bfloat16
) -> Adapters | str | None:
    """The adapters of a module of vLLM's, or why they cannot be added here; None if it has none.

    Args:
        module: of any class.
        shape: outputs and inputs of its linear layer.
        native: the module of the kernels.
        dtype: that the model is computed in.

    """
    stacked = stacked_adapters(module)
    if stacked is None or isinstance(stacked, str):
        return stacked
    matrices = (*stacked.a, *stacked.b)
    if any(one.dtype != dtype for one in matrices):
        return f"adapters are {matrices[0].dtype}, expected {dtype} (--lora-dtype)"
    outputs = [b.shape[2] for b in stacked.b]
    if (
        [sum(outputs), stacked.a[0].shape[3]] != list(shape)
        or any(one % OUTPUTS_MULTIPLE for one in outputs)
        or any(not one.is_contiguous() for one in matrices)
    ):
        return f"adapters have outputs {outputs} of a layer {list(shape)}"
    return Adapters(stacked, native)

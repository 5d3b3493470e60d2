"""vLLM's linear layers with LoRA adapters, on a CPU rank.

vLLM puts a module with adapters around a linear layer, and keeps the matrices of all adapters that
a step may have in tensors of its own, a slot for each, whose contents it replaces when adapters
come and go.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch

from ray_hetero.compat.patching import original, replace
from ray_hetero.supported import is_since

KNOWN = (
    "ColumnParallelLinearWithLoRA",
    "MergedColumnParallelLinearWithLoRA",
    "MergedQKVParallelLinearWithLoRA",
    "QKVParallelLinearWithLoRA",
    "ReplicatedLinearWithLoRA",
    "RowParallelLinearWithLoRA",
)
"""Classes that add B · (A · x) to what the layer gives, each rank with its own part of A or B."""


@dataclass(frozen=True, eq=False)
class StackedAdapters:
    """The adapters of a linear layer, one in each slot, for neighbouring outputs."""

    a: tuple[torch.Tensor, ...]
    """[slots, 1, rank, inputs] for each slice of the outputs."""
    b: tuple[torch.Tensor, ...]
    """[slots, 1, outputs of the slice, rank]."""
    punica: Any
    """vLLM's object that knows which slot each token of the step has."""

    def slots(self) -> torch.Tensor:
        """The slot of each token of this step, int64; negative for none."""
        found: torch.Tensor = self.punica.token_lora_indices
        return found


def base_layer(module: Any) -> Any:
    """The linear layer that a module with adapters is around; any other module itself.

    Uses: `BaseLinearLayerWithLoRA.base_layer`.
    """
    from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA

    return module.base_layer if isinstance(module, BaseLinearLayerWithLoRA) else module


def stacked_adapters(module: Any) -> StackedAdapters | str | None:
    """The adapters of a module, or why they are not among those known; None if it has none.

    Uses: `BaseLinearLayerWithLoRA.lora_a_stacked`, `BaseLinearLayerWithLoRA.lora_b_stacked`,
    `BaseLayerWithLoRA.punica_wrapper` and `PunicaWrapperBase.token_lora_indices`, for the classes
    in `KNOWN`.

    Args:
        module: of any class.

    """
    if base_layer(module) is module:
        return None
    from vllm.lora import layers

    if type(module) not in {original(layers, name) for name in KNOWN}:
        return f"adapters are added in another way ({type(module).__name__})"
    return StackedAdapters(
        tuple(module.lora_a_stacked), tuple(module.lora_b_stacked), module.punica_wrapper
    )


def leave_tokens_without_adapter() -> None:
    """Leave out tokens of requests without an adapter in vLLM's operators.

    Replaces: `lora_ops.bgmv_shrink`, `punica_cpu.bgmv_shrink`.
    Why: bgmv_shrink looks tokens without an adapter up in the slot −1, which is the last one:
    beside requests with adapters they get the adapter that is in there.
    Serves: 0.32.
    Can go when: 0.32 is not supported; since 0.33 it leaves out tokens whose index is negative.
    """
    if is_since("0.33"):
        return
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    def make(stock: Any) -> Any:
        def bgmv_shrink(
            inputs: Any, weights: Any, output: Any, indices: Any, scaling: float = 1.0
        ) -> None:
            stock(inputs, weights, output, indices, scaling)
            output[: len(indices)][indices < 0] = 0

        return bgmv_shrink

    for module in (lora_ops, sys.modules[PunicaWrapperCPU.__module__]):
        replace(module, "bgmv_shrink", make)

"""Operations of a CPU rank's decoder layers from one attention to the next.

A decode step's time on a socket is that of reading the weights, and of what lies between the
products: operators whose instructions the weights have driven out of the caches, each of which
calls all threads together anew.  Here the products between two attentions, with their norms and
the activation, are one call of csrc/kernels/post_attention.h; a GPU that computes prompts
(offload_gpu.py) gets them as one piece of work too, and sends back one result instead of four.
"""

from __future__ import annotations

import torch
from vllm.distributed import tensor_model_parallel_all_reduce

from ray_hetero.compat.models.custom_ops import rounds, vllm_ops
from ray_hetero.kernels.layers.layer_parts import Linear, Norm, PostAttention, adapters_in, product
from ray_hetero.kernels.linear.rank_sums import meeting
from ray_hetero.kernels.linear.streaming_linear import StreamingLinear

Results = tuple[torch.Tensor, torch.Tensor]
"""Output of layers [M, N], which is still to be added to the residual, and the residual [M, N]."""


class PostAttentionBlock:
    """Computes parts: few tokens in one native call, many on the prompt GPU."""

    def __init__(self, parts: PostAttention, kernel: StreamingLinear) -> None:
        self.parts = parts
        self._kernel = kernel
        self._adapters = adapters_in(parts.linears)
        self.native = parts.native(kernel.native, kernel.sums and kernel.sums.native)

    def __call__(
        self, attended: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute from the output of one attention to the input of the next.

        Args:
            attended: [M, K], bf16.
            residual: [M, N], bf16; left as it is.

        Returns:
            [M, outputs] and the new residual [M, N]; after the last layer what is to be added to
            the residual, and it.

        """
        tokens = attended.shape[0]
        gpu = self._kernel.gpu
        sums = self._kernel.sums
        slots = None if self._adapters is None else self._adapters.slots(tokens)
        if (
            gpu is not None
            and slots is None  # adapters are not on the GPU
            and sums is None  # a GPU would have to wait for them in between
            and self._kernel.limits.is_for_gpu(tokens)
            and all(gpu.suits(linear.weight.data, tokens) for linear in self.parts.linears)
        ):
            return gpu.post_attention(self.parts, attended, residual)  # type: ignore[no-any-return]
        if tokens > self._kernel.few_tokens:
            return self.one_by_one(attended, residual)
        attended, residual = attended.contiguous(), residual.contiguous()
        result = attended.new_empty((tokens, self.parts.outputs))
        total = torch.empty_like(residual)
        with meeting(sums):
            self.native.run(
                attended.data_ptr(),
                residual.data_ptr(),
                tokens,
                total.data_ptr(),
                result.data_ptr(),
                self._kernel.level,
                slots=0 if slots is None else slots.data_ptr(),
            )
        return result, total

    def one_by_one(
        self, attended: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same as a sequence of operators; arguments and result as of a call."""
        parts, total = self.parts, residual.clone(memory_format=torch.contiguous_format)
        added = self._summed(self._linear(attended, parts.output))
        if parts.is_parallel:
            hidden = norm(total, parts.norm)
            total += added * parts.multiplier
        else:
            added = addend(added, parts.output_norm, parts.multiplier)
            hidden = add_and_norm(added, total, parts.norm)
        if parts.gate_up is None or parts.down is None:
            return hidden, total
        inner = self._activated(self._linear(hidden, parts.gate_up))
        added = self._summed(self._linear(inner, parts.down))
        added = addend(added, parts.down_norm, parts.multiplier)
        if parts.next is None:
            return added, total
        return self._linear(add_and_norm(added, total, parts.next.norm), parts.next.qkv), total

    def _activated(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.parts
        if parts.activation != "silu" or not parts.is_gated or not rounds():
            return parts.activated(x)
        gated = x.new_empty((x.shape[0], x.shape[1] // 2))
        torch.ops._C.silu_and_mul(gated, x)
        return gated

    def _summed(self, x: torch.Tensor) -> torch.Tensor:
        """A product of which each rank of a tensor-parallel group has computed a part."""
        if self._kernel.sums is None:
            return x
        summed: torch.Tensor = tensor_model_parallel_all_reduce(x)
        return summed

    def _linear(self, x: torch.Tensor, linear: Linear) -> torch.Tensor:
        return product(self._kernel, x, linear)


def addend(x: torch.Tensor, own: Norm | None, multiplier: float) -> torch.Tensor:
    """Addend of a residual, from the result of a product.

    Args:
        x: [M, N], bf16.
        own: its norm.
        multiplier: of what is added.

    """
    x = x if own is None else norm(x, own)
    return x if multiplier == 1 else x * multiplier


def norm(x: torch.Tensor, how: Norm) -> torch.Tensor:
    """The norm of x [M, N], bf16."""
    if how.kind != "rms" or not rounds():
        return how(x)
    result = torch.empty_like(x)
    vllm_ops.rms_norm(result, x, how.weight, how.epsilon)
    return result


def input_norm(
    hidden: torch.Tensor, residual: torch.Tensor | None, how: Norm
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of a layer's input, and its residual, both in memory of their own.

    Args:
        hidden: [M, N], bf16.
        residual: [M, N], bf16; None at the beginning of a model.
        how: the norm.

    """
    if residual is None:
        total = hidden.clone(memory_format=torch.contiguous_format)
        return norm(total, how), total
    x, total = (one.clone(memory_format=torch.contiguous_format) for one in (hidden, residual))
    return add_and_norm(x, total, how), total


def results_like(hidden: torch.Tensor) -> Results:
    """Memory for what a layer gives and for its residual, each as `hidden` [M, N]."""
    x, total = (torch.empty_like(hidden, memory_format=torch.contiguous_format) for _ in range(2))
    return x, total


def add_and_norm(x: torch.Tensor, residual: torch.Tensor, how: Norm) -> torch.Tensor:
    """residual += x, in place; the norm of the sum, maybe in the memory of x.

    Args:
        x: [M, N], bf16.
        residual: [M, N], bf16.
        how: the norm.

    """
    if how.of_rounded:
        residual += x
        return norm(residual, how)
    if how.kind == "rms" and rounds():
        torch.ops._C.fused_add_rms_norm(x, residual, how.weight, how.epsilon)
        return x
    both = residual.float() + x
    residual.copy_(both)
    return how(both)

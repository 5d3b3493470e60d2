"""What a decoder layer of a CPU rank computes from one attention to the next.

A decode step's time on a socket is that of reading the weights, and of what lies between the
products: operators whose instructions the weights have driven out of the caches, each of which
calls all threads together anew.  Here the products between two attentions, with their norms and
the activation, are one call of csrc/kernels/post_attention.h; a GPU that computes prompts
(gpu_prefill.py) gets them as one piece of work too, and sends back one result instead of four.
"""

from __future__ import annotations

import torch
from vllm.distributed import tensor_model_parallel_all_reduce

from ray_hetero.kernels.layer_parts import Linear, Norm, PostAttention
from ray_hetero.kernels.rank_sums import meeting
from ray_hetero.kernels.streaming_linear import StreamingLinear


class PostAttentionBlock:
    """Computes parts: few tokens in one native call, many on a borrowed GPU."""

    def __init__(self, parts: PostAttention, kernel: StreamingLinear) -> None:
        self.parts = parts
        self._kernel = kernel
        self.native = kernel.native.PostAttention(
            output=parts.output.native,
            norm=parts.norm.native,
            gate_up=parts.gate_up.native,
            down=parts.down.native,
            next=parts.next and parts.next.native,
            sums=kernel.sums and kernel.sums.native,
        )

    def __call__(
        self, attended: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """From the output of one attention to the input of the next.

        Args:
            attended: [M, K], bf16.
            residual: [M, N], bf16; left as it is.

        Returns:
            [M, outputs] and the new residual [M, N]; after the last layer what is to be added to
            the residual, and it.

        """
        tokens = attended.shape[0]
        many = self._kernel.prompts
        sums = self._kernel.sums
        if (
            many is not None
            and sums is None  # a GPU would have to wait for them in between
            and tokens >= many.from_tokens
            and all(many.gpu.suits(linear.weight.data, tokens) for linear in self.parts.linears)
        ):
            return many.gpu.post_attention(self.parts, attended, residual)
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
            )
        return result, total

    def one_by_one(
        self, attended: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same as a sequence of operators; arguments and result as of a call."""
        parts, total = self.parts, residual.clone(memory_format=torch.contiguous_format)
        hidden = self._summed(self._linear(attended, parts.output))
        add_and_norm(hidden, total, parts.norm)
        gate_up = self._linear(hidden, parts.gate_up)
        gated = gate_up.new_empty((gate_up.shape[0], gate_up.shape[1] // 2))
        torch.ops._C.silu_and_mul(gated, gate_up)
        hidden = self._summed(self._linear(gated, parts.down))
        if parts.next is None:
            return hidden, total
        add_and_norm(hidden, total, parts.next.norm)
        return self._linear(hidden, parts.next.qkv), total

    def _summed(self, x: torch.Tensor) -> torch.Tensor:
        """A product of which each rank of a tensor-parallel group has computed a part."""
        if self._kernel.sums is None:
            return x
        summed: torch.Tensor = tensor_model_parallel_all_reduce(x)
        return summed

    def _linear(self, x: torch.Tensor, linear: Linear) -> torch.Tensor:
        return self._kernel.compute(x, linear.weight, linear.bias)


def add_and_norm(x: torch.Tensor, residual: torch.Tensor, norm: Norm) -> None:
    """residual += x, x = norm(residual), in place."""
    torch.ops._C.fused_add_rms_norm(x, residual, norm.weight, norm.epsilon)

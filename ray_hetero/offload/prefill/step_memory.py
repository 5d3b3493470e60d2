"""Memory for the tokens of a step: of a GPU, and page-locked memory beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ray_hetero.offload.prefill.embedded_prompts import EmbeddedRows
from ray_hetero.offload.weights.resident_pieces import IdleMemory
from ray_hetero.planning.prefill_memory import SHARED_TOKENS


class StepMemory:
    """Memory in which one step after the other is computed.

    Args:
        device: the GPU; for tests the CPU.
        tokens: most of a step.
        inputs: most that a product has for a token.
        outputs: the same.
        hidden: elements of a token's residual.

    """

    def __init__(
        self, device: torch.device, tokens: int, inputs: int, outputs: int, hidden: int
    ) -> None:
        self._device = device

        def memory(elements: int) -> torch.Tensor:
            return torch.empty(elements, dtype=torch.bfloat16, device=device)

        self._inputs, self._outputs = inputs, outputs
        self._x, self._y = memory(tokens * inputs), memory(tokens * outputs)
        self.behind_products = self._y[SHARED_TOKENS * outputs :]
        """Memory where smaller steps have no products: there is room for whole weights."""
        self._x_host = self.host_memory(tokens * inputs)
        self._residual = memory(tokens * hidden)
        self._residual_host = self.host_memory(tokens * hidden)
        # The model's first layer has no residual, and so leaves this to the hidden state.
        self.embedded = EmbeddedRows(self._residual_host, self._residual)
        """Rows of an embedding where the GPU reads them, until other inputs are staged."""

    @property
    def device(self) -> torch.device:
        """Device that computes."""
        return self._device

    def idle(self, values: int) -> list[IdleMemory]:
        """Memory that shared decode steps leave idle.

        Args:
            values: that they expand at once, at the beginning of `behind_products`.

        """
        # Not that of residuals: embeddings go there in decode steps of many requests too.
        return [
            IdleMemory(
                whole[begin:].view(torch.uint8),
                before=begin * whole.itemsize, row_bytes=row * whole.itemsize,
            )
            for whole, row, begin in (
                (self._y, self._outputs, SHARED_TOKENS * self._outputs + values),
                (self._x, self._inputs, SHARED_TOKENS * self._inputs),
            )
        ]  # fmt: skip

    def host_memory(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Make host memory that the GPU copies from and to by itself."""
        is_gpu = self._device.type == "cuda"
        return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=is_gpu)

    def stage(
        self, hidden: torch.Tensor, residual: torch.Tensor | None, rows: torch.Tensor | slice
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A step's input, [M, N] each, copied to where the GPU reads it, or `embedded` there.

        Args:
            hidden: of all tokens.
            residual: of all tokens, if there is one.
            rows: which tokens the GPU computes.

        """
        if residual is None and isinstance(rows, slice) and self.embedded.holds(hidden):
            return hidden[rows], None
        return (
            _gathered(hidden, rows, self._x_host),
            None if residual is None else _gathered(residual, rows, self._residual_host),
        )

    def sent(
        self, hidden: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Send what `stage` has given: what is to be added to the residual, and the residual.

        In the model's first layer there is nothing to add: the hidden state is the residual, which
        may have been sent while it was looked up.
        """
        if residual is None:
            there = self.embedded.take(hidden)
            if there is None:
                there = self._sent_residual(hidden)
            return None, there
        x = _like(self._y, hidden).copy_(hidden, non_blocking=True)
        return x, self._sent_residual(residual)

    def sent_to_multiply(
        self, x: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Send what the next product multiplies, [M, K], and the residual, [M, N]."""
        there = _like(self._x, x).copy_(x, non_blocking=True)
        return there, self._sent_residual(residual)

    def _sent_residual(self, residual: torch.Tensor) -> torch.Tensor:
        self.embedded.forget()
        return _like(self._residual, residual).copy_(residual, non_blocking=True)

    def products(self, tokens: int, outputs: int) -> torch.Tensor:
        """Memory for a product [tokens, outputs], which the one before that has left."""
        return self._y[: tokens * outputs].view(tokens, outputs)

    def to_multiply(self, *shape: int) -> torch.Tensor:
        """Memory for what the next product multiplies, which the one before that has used."""
        return self._x[: math.prod(shape)].view(shape)

    def sent_alone(self, x: torch.Tensor) -> torch.Tensor:
        """Send what the next product multiplies, [M, K], from any memory."""
        staged = _like(self._x_host, x).copy_(x)
        return _like(self._x, x).copy_(staged, non_blocking=True)

    def send(
        self, *results: torch.Tensor, into: Sequence[torch.Tensor] | None = None
    ) -> list[torch.Tensor]:
        """Results on their way to host memory.

        Args:
            results: on the GPU, bf16.
            into: memory with room for each, page-locked; None for new memory.

        """
        if into is None:
            received = [self.host_memory(*result.shape) for result in results]
        else:
            received = [_like(one, result) for one, result in zip(into, results, strict=True)]
        for host, result in zip(received, results, strict=True):
            host.copy_(result, non_blocking=True)
        return received


def _like(memory: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return memory[: x.numel()].view(x.shape)


def _gathered(x: torch.Tensor, rows: torch.Tensor | slice, host: torch.Tensor) -> torch.Tensor:
    if isinstance(rows, slice):
        return _like(host, x[rows]).copy_(x[rows])
    into = host[: len(rows) * x.shape[1]].view(len(rows), x.shape[1])
    return torch.index_select(x, 0, rows, out=into)

"""A GPU that computes linear layers of a CPU rank in steps of many tokens.

A decode step reads every weight for a few tokens, and the socket reads them faster than the link
to a GPU would carry them.  A prefill multiplies every weight by thousands of tokens; there a GPU
reads the weights over its link, piece by piece and ahead of their use, and sends back the
products.

The weights stay in host memory, page-locked and in the layout that the CPU computes with.  The GPU
holds a few pieces of them and the tokens of one step.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from placement.devices import GIB
from ray_hetero.errors import UnsupportedError
from ray_hetero.locked_pages import lock_pages
from ray_hetero.weight_formats.base import BLOCK, Expansion, HostWeight

if TYPE_CHECKING:
    from ray_hetero.between_attentions import Linear, Norm, Parts

PIECE_BYTES = 64 << 20
"""Most bytes of a piece of weights; 1.2 ms of a link of 55 GB/s, many times what starting a copy
and a product costs."""
SLOTS = 4
"""Pieces on the GPU: one that is computed with, others on their way."""
CUDA_BYTES = 620 << 20
"""What CUDA takes of a GPU for a process, with the libraries of matrix products; measured on an
H100."""
LEAST_BYTES = 1 << 20
"""Of a weight; smaller ones may share pages, which can be locked only once."""
BF16_BYTES = 2
CHUNK_TOKENS = 1024
"""Whose norms and gates are computed together."""
WORKING_BYTES = 192 << 20
"""For what lies between in these: three times 4 bytes of 16384 values each."""


@dataclass(eq=False)
class _Piece:
    """Neighbouring blocks of a weight [outputs, inputs]."""

    weight: torch.Tensor
    """[end - begin, …] of `HostWeight.data`, in host memory."""
    begin: int
    end: int
    inputs: int
    expansion: Expansion
    after: _Piece | None = None
    """The one that was computed with next the last time."""


@dataclass(eq=False)
class _Slot:
    """Memory on the GPU for one piece."""

    memory: torch.Tensor
    """Bytes."""
    ready: Any
    """Event: the piece has come."""
    free: Any
    """Event: nothing reads it any more."""
    piece: _Piece | None = None


@dataclass(frozen=True)
class _Constant:
    """A small tensor, here and on the GPU; as long as it is here its address is its own."""

    here: torch.Tensor
    there: torch.Tensor


@dataclass(frozen=True)
class Taken:
    """What a rank has taken of a GPU."""

    weight_bytes: int
    """Weights that the GPU can read."""
    gpu_bytes: int
    """Its memory."""


class BorrowedGpu:
    """What a CPU rank computes linear layers of many tokens with.

    Args:
        device: the GPU; for tests the CPU, with the same sequence of copies and products.
        tokens: most tokens of a step.

    """

    def __init__(self, device: torch.device, tokens: int) -> None:
        self._device = device
        self._tokens = tokens
        self._weights: dict[int, HostWeight] = {}
        self._pieces: dict[int, list[_Piece]] = {}
        self._constants: dict[int, _Constant] = {}
        self._ahead: deque[_Slot] = deque()
        self._last: _Piece | None = None

    def add(self, weight: HostWeight) -> None:
        """Have a weight computed here, from `take` on."""
        if weight.data.nbytes >= LEAST_BYTES:
            self._weights[weight.data.data_ptr()] = weight

    def take(self) -> Taken:
        """Lock the weights' pages and take memory of the GPU.

        Raises:
            UnsupportedError: the pages cannot be locked, or the GPU has too little memory left.

        """
        weights = self._weights.values()
        if not weights:
            return Taken(0, 0)
        outputs, inputs = (max(weight.shape[i] for weight in weights) for i in (0, 1))
        needed = gpu_bytes(outputs, inputs, self._tokens)
        needed += sum(weight.gpu_bytes for weight in weights)
        try:
            self._lock_pages()
            self._allocate(outputs, inputs)
        except RuntimeError as error:
            reason = str(error).splitlines()[0].rstrip(".")
            raise UnsupportedError(
                f"no GPU computes this rank's prompts, which takes {needed / GIB:.1f} GiB of its "
                f"memory and pages of the host that can be locked: {reason}. "
                "Lower gpu.memory_utilization or --max-num-batched-tokens, or set cpu.borrow_gpu "
                "to false."
            ) from None
        self._pieces = {at: list(self._cut(weight)) for at, weight in self._weights.items()}
        return Taken(sum(weight.data.nbytes for weight in weights), needed)

    def _lock_pages(self) -> None:
        if self._device.type != "cuda":
            return
        # Streams, events and locked memory belong to the current one.
        torch.cuda.set_device(self._device)
        for weight in self._weights.values():
            lock_pages(weight.data)

    def _allocate(self, outputs: int, inputs: int) -> None:
        device = self._device
        # vLLM's CPU worker puts things that do nothing into their places in torch.cuda.
        module: Any = torch.cuda.streams if device.type == "cuda" else torch.cpu
        self._computing, self._copying = module.Stream(), module.Stream()
        self._done = module.Event()

        def memory(elements: int) -> torch.Tensor:
            return torch.empty(elements, dtype=torch.bfloat16, device=device)

        piece = _piece_bytes(inputs) // BF16_BYTES
        slots = [
            _Slot(memory(piece).view(torch.uint8), module.Event(), module.Event())
            for _ in range(SLOTS)
        ]
        self._slots = itertools.cycle(slots)
        self._unpacked = memory(piece)
        self._x, self._y = memory(self._tokens * inputs), memory(self._tokens * outputs)
        self._x_host = self._host_memory(self._tokens * inputs)
        # A residual is the input of some layer.
        self._residual = memory(self._tokens * inputs)
        self._residual_host = self._host_memory(self._tokens * inputs)

    def _host_memory(self, *shape: int) -> torch.Tensor:
        is_gpu = self._device.type == "cuda"
        return torch.empty(shape, dtype=torch.bfloat16, device="cpu", pin_memory=is_gpu)

    def _cut(self, weight: HostWeight) -> Iterator[_Piece]:
        outputs, inputs = weight.shape
        step = _piece_bytes(inputs) // (BF16_BYTES * BLOCK * inputs) * BLOCK
        for begin in range(0, outputs, step):
            end = min(begin + step, outputs)
            expansion = weight.expansion(begin, end, self._device)
            yield _Piece(weight.data[begin:end], begin, end, inputs, expansion)

    def suits(self, packed: torch.Tensor, tokens: int) -> bool:
        """Whether a weight is here, and there is room for so many tokens."""
        return packed.data_ptr() in self._pieces and tokens <= self._tokens

    def linear(
        self, x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """y = x · Wᵀ + bias.

        Args:
            x: [M, K], bf16, in host memory.
            packed: `HostWeight.data` of W [N, K], one that `suits`.
            bias: [N], float32.

        Returns:
            [M, N], bf16, in host memory.

        """
        with _current(self._computing):
            y = self._multiply(self._sent(x, self._x_host, self._x), packed, bias)
            (y_host,) = self._received(y)
        return y_host

    def between(
        self, parts: Parts, attended: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What `BetweenAttentions` computes; shapes as there, all in host memory."""
        with _current(self._computing):
            x = self._sent(attended, self._x_host, self._x)
            total = self._sent(residual, self._residual_host, self._residual)
            x = self._add_and_norm(self._product(x, parts.output), total, parts.norm)
            x = self._gated(self._product(x, parts.gate_up))
            y = self._product(x, parts.down)
            if parts.next is not None:
                y = self._add_and_norm(y, total, parts.next.norm)
                y = self._product(y, parts.next.stacked)
            y_host, total_host = self._received(y, total)
        return y_host, total_host

    def _sent(self, x: torch.Tensor, host: torch.Tensor, gpu: torch.Tensor) -> torch.Tensor:
        host, gpu = (memory[: x.numel()].view(x.shape) for memory in (host, gpu))
        host.copy_(x)
        return gpu.copy_(host, non_blocking=True)

    def _received(self, *results: torch.Tensor) -> list[torch.Tensor]:
        received = [self._host_memory(*result.shape) for result in results]
        for host, result in zip(received, results, strict=True):
            host.copy_(result, non_blocking=True)
        self._done.record(self._computing)
        self._done.synchronize()
        return received

    def _product(self, x: torch.Tensor, linear: Linear) -> torch.Tensor:
        return self._multiply(x, linear.weight.data, linear.bias)

    def _multiply(
        self, x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        tokens, outputs = x.shape[0], packed.shape[0]
        y = self._y[: tokens * outputs].view(tokens, outputs)
        # It was bf16 before vLLM widened it.
        added = None if bias is None else self._constant(bias)
        for piece in self._pieces[packed.data_ptr()]:
            weight = self._unpack(piece).t()
            part = y[:, piece.begin : piece.end]
            if added is None:
                torch.mm(x, weight, out=part)
            else:
                torch.addmm(added[piece.begin : piece.end], x, weight, out=part)
        return y

    def _constant(self, tensor: torch.Tensor) -> torch.Tensor:
        """A bias or a norm's weight, which the GPU keeps."""
        if tensor.data_ptr() not in self._constants:
            there = tensor.to(self._device, torch.bfloat16)
            self._constants[tensor.data_ptr()] = _Constant(tensor, there)
        return self._constants[tensor.data_ptr()].there

    def _add_and_norm(self, y: torch.Tensor, total: torch.Tensor, norm: Norm) -> torch.Tensor:
        """Add y to `total`; the norm of the sum, where the products' inputs are."""
        x, weight = self._x[: y.numel()].view(y.shape), self._constant(norm.weight)
        for rows in _chunks(len(y)):
            both = y[rows].float() + total[rows].float()
            total[rows] = both
            scale = torch.rsqrt(both.square().mean(-1, keepdim=True) + norm.epsilon)
            torch.mul((both * scale).bfloat16(), weight, out=x[rows])
        return x

    def _gated(self, y: torch.Tensor) -> torch.Tensor:
        """silu(gate) ∘ up of y [M, 2 · N], where the products' inputs are."""
        tokens, inputs = y.shape[0], y.shape[1] // 2
        x = self._x[: tokens * inputs].view(tokens, inputs)
        for rows in _chunks(tokens):
            gate, up = y[rows].chunk(2, dim=1)
            torch.mul(torch.nn.functional.silu(gate), up, out=x[rows])
        return x

    def _unpack(self, piece: _Piece) -> torch.Tensor:
        """The piece on the GPU as rows of outputs; the next ones are on their way then."""
        if self._last is not None:
            self._last.after = piece
        self._last = piece
        slot = self._slot_of(piece)
        self._computing.wait_event(slot.ready)
        rows, inputs = piece.end - piece.begin, piece.inputs
        weight = self._unpacked[: rows * inputs]
        piece.expansion(slot.memory[: piece.weight.nbytes], weight)
        slot.free.record(self._computing)
        self._read_ahead()
        return weight.view(rows, inputs)

    def _slot_of(self, piece: _Piece) -> _Slot:
        # Pieces that were expected and did not come are passed over.
        while self._ahead:
            slot = self._ahead.popleft()
            if slot.piece is piece:
                return slot
        self._fetch(piece)
        return self._ahead.popleft()

    def _read_ahead(self) -> None:
        """Order what came after this piece the last time, as far as there are slots."""
        last = self._ahead[-1].piece if self._ahead else self._last
        while len(self._ahead) < SLOTS and last is not None and last.after is not None:
            last = last.after
            self._fetch(last)

    def _fetch(self, piece: _Piece) -> None:
        slot = next(self._slots)
        with _current(self._copying):
            self._copying.wait_event(slot.free)
            sent = piece.weight.view(torch.uint8).view(-1)
            slot.memory[: sent.numel()].copy_(sent, non_blocking=True)
            slot.ready.record(self._copying)
        slot.piece = piece
        self._ahead.append(slot)


def _current(stream: Any) -> AbstractContextManager[object]:
    """Make a stream the current one, without torch.cuda.stream, which the worker replaces too."""
    return stream if isinstance(stream, torch.Stream) else nullcontext()


def gpu_bytes(outputs: int, inputs: int, tokens: int) -> int:
    """Memory of the GPU that a rank with weights up to [outputs, inputs] takes."""
    pieces = (SLOTS + 1) * _piece_bytes(inputs)
    return CUDA_BYTES + WORKING_BYTES + pieces + BF16_BYTES * tokens * (outputs + 2 * inputs)


def _piece_bytes(inputs: int) -> int:
    # At least one block.
    return max(PIECE_BYTES, BF16_BYTES * BLOCK * inputs)


def _chunks(tokens: int) -> Iterator[slice]:
    for begin in range(0, tokens, CHUNK_TOKENS):
        yield slice(begin, begin + CHUNK_TOKENS)

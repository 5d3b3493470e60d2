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

from placement.units import GIB
from ray_hetero.errors import UnsupportedError
from ray_hetero.kernels.packed_weights import BLOCK, PAIR_PARTS, ROW, PackedWeight
from ray_hetero.planning.prefill_memory import BF16_BYTES, SLOTS, gpu_bytes, piece_bytes
from ray_hetero.runtime.locked_pages import lock_pages

if TYPE_CHECKING:
    from ray_hetero.kernels.post_attention import Linear, Norm, Parts

LEAST_BYTES = 1 << 20
"""Of a weight; smaller ones may share pages, which can be locked only once."""
EXCEPTION_BYTES = 10
"""Of a weight that compact rows do not hold: its place and its value."""
CHUNK_TOKENS = 1024
"""Whose norms and gates are computed together."""


@dataclass(eq=False)
class _Piece:
    """Neighbouring blocks of a packed weight [outputs, inputs]."""

    weight: torch.Tensor
    """[end - begin, …] of `PackedWeight.data`, in host memory."""
    begin: int
    end: int
    inputs: int
    compact: _Compact | None = None
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
class _Compact:
    """What belongs to a compact piece beside its rows; on the GPU."""

    upper: torch.Tensor
    """[256], int32: for a byte of two numbers the upper bytes, as int16 each, shifted to their
    place."""
    places: torch.Tensor
    """Of weights that the rows do not hold, in [end - begin, inputs]."""
    values: torch.Tensor
    """Theirs, bf16."""


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
        self._weights: dict[int, PackedWeight] = {}
        self._pieces: dict[int, list[_Piece]] = {}
        self._constants: dict[int, _Constant] = {}
        self._ahead: deque[_Slot] = deque()
        self._last: _Piece | None = None

    def add(self, weight: PackedWeight) -> None:
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
        needed += EXCEPTION_BYTES * sum(
            weight.compact.outliers_count for weight in weights if weight.compact is not None
        )
        try:
            self._lock_pages()
            self._allocate(outputs, inputs)
        except RuntimeError as error:
            reason = str(error).splitlines()[0].rstrip(".")
            raise UnsupportedError(
                f"no GPU computes this rank's prompts, which takes {needed / GIB:.1f} GiB of its "
                f"memory and pages of the host that can be locked: {reason}. "
                "Lower gpu.memory_utilization or --max-num-batched-tokens, or set "
                "cpu.prefill_on_gpu to false."
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

        piece = piece_bytes(inputs) // BF16_BYTES
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

    def _cut(self, weight: PackedWeight) -> Iterator[_Piece]:
        outputs, inputs = weight.shape
        step = piece_bytes(inputs) // (BF16_BYTES * BLOCK * inputs) * BLOCK
        native = weight.compact
        upper = None if native is None else _upper_bytes(native.codebook).to(self._device)
        for begin in range(0, outputs, step):
            end = min(begin + step, outputs)
            compact = None
            if upper is not None:
                places, values = native.outliers(begin // BLOCK, end // BLOCK)
                compact = _Compact(
                    upper,
                    torch.from_numpy(places).to(self._device),
                    torch.from_numpy(values).view(torch.bfloat16).to(self._device),
                )
            yield _Piece(weight.data[begin:end], begin, end, inputs, compact)

    def suits(self, packed: torch.Tensor, tokens: int) -> bool:
        """Whether a weight is here, and there is room for so many tokens."""
        return packed.data_ptr() in self._pieces and tokens <= self._tokens

    def linear(
        self, x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """y = x · Wᵀ + bias.

        Args:
            x: [M, K], bf16, in host memory.
            packed: `PackedWeight.data` of W [N, K], one that `suits`.
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
        memory = slot.memory[: piece.weight.nbytes]
        if piece.compact is None:
            packed = memory.view(torch.bfloat16).view(rows // BLOCK, inputs // 2, BLOCK, 2)
            weight.view(rows // BLOCK, BLOCK, inputs // 2, 2).copy_(packed.permute(0, 2, 1, 3))
        else:
            _expand(memory, piece.compact, inputs, weight)
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


def _chunks(tokens: int) -> Iterator[slice]:
    for begin in range(0, tokens, CHUNK_TOKENS):
        yield slice(begin, begin + CHUNK_TOKENS)


def _upper_bytes(book: list[int]) -> torch.Tensor:
    """`_Compact.upper` of a book."""
    shifted = torch.tensor(book, dtype=torch.uint8).view(torch.int8).to(torch.int16) << 8
    both = torch.arange(256)
    return torch.stack([shifted[both & 15], shifted[both >> 4]], dim=1).view(torch.int32).flatten()


def _expand(rows: torch.Tensor, compact: _Compact, inputs: int, weight: torch.Tensor) -> None:
    """Write compact rows, given as bytes, as a weight [outputs, inputs], given as its elements."""
    parts = rows.view(-1, PAIR_PARTS, ROW)
    lower, numbers = parts[:, :2], parts[:, 2]
    upper = compact.upper[numbers.int()].view(torch.int16).view(-1, ROW, 2)
    both = lower.transpose(1, 2) + upper
    # Bytes of a row lie as VPUNPCKLBW and VPUNPCKHBW take them: a quarter of the outputs of each
    # half after the other.
    packed = both.view(-1, inputs // 4, 4, 2, 4, 2, 2)
    order = (0, 3, 2, 4, 1, 6, 5)
    into = weight.view(torch.int16).view(-1, 2, 4, 4, inputs // 4, 2, 2)
    into.copy_(packed.permute(order))
    weight.index_copy_(0, compact.places, compact.values)

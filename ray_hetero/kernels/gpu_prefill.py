"""A GPU that computes linear layers of a CPU rank in steps of many tokens.

A decode step reads every weight for a few tokens, and the socket reads them faster than the link
to a GPU would carry them.  A prefill multiplies every weight by thousands of tokens; there a GPU
reads the weights over its link, piece by piece and ahead of their use (weight_pieces.py), and sends
back the products.

The weights stay in host memory, page-locked and in the layout that the CPU computes with.  The GPU
holds a few pieces of them and the tokens of one step.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from placement.units import GIB
from ray_hetero.errors import UnsupportedError
from ray_hetero.kernels import gpu_rows
from ray_hetero.kernels.weight_pieces import PieceReader, Placed, WholeWeight, current, cut
from ray_hetero.planning.prefill_memory import SHARED_TOKENS, gpu_bytes
from ray_hetero.runtime.locked_pages import lock_pages
from ray_hetero.weight_formats.base import HostWeight
from ray_hetero.weight_formats.compact_on_gpu import choose_expand, expand_with_triton

if TYPE_CHECKING:
    from ray_hetero.kernels.layer_parts import Linear, Norm, PostAttention

LIMIT_S = 600.0
"""Longest wait for the thread that orders work beside the main one."""
LEAST_BYTES = 1 << 20
"""Of a weight; smaller ones may share pages, which can be locked only once."""
CHUNK_TOKENS = 2048
"""Whose norms and gates are computed together."""


@dataclass(frozen=True)
class _Constant:
    """A small tensor, here and on the GPU; as long as it is here its address is its own."""

    here: torch.Tensor
    there: torch.Tensor


@dataclass(frozen=True, eq=False)
class _Part:
    """Pieces of a weight that are neighbours."""

    outputs: slice
    inputs: slice
    is_added: bool
    """As in `Placed`."""
    values: torch.Tensor
    """[outputs · inputs], bf16."""

    def is_before(self, other: _Part) -> bool:
        """Whether another one's outputs follow those of this one, in memory too."""
        return (
            (self.inputs, self.is_added) == (other.inputs, other.is_added)
            and self.outputs.stop == other.outputs.start
        )  # fmt: skip

    def with_next(self, other: _Part) -> _Part:
        """Both in one."""
        outputs = slice(self.outputs.start, other.outputs.stop)
        values = self.values.as_strided((len(self.values) + len(other.values),), (1,))
        return replace(self, outputs=outputs, values=values)

    @property
    def weight(self) -> torch.Tensor:
        """[inputs, outputs]."""
        return self.values.view(-1, self.inputs.stop - self.inputs.start).t()


@dataclass(eq=False)
class _Whole:
    """The first pieces of a weight, or all, expanded ahead."""

    pieces: int = 0
    parts: list[_Part] = field(default_factory=list)

    def add(self, placed: Placed, values: torch.Tensor) -> None:
        """Add the next piece, whose memory follows that of the last one."""
        part = _Part(placed.outputs, placed.inputs, placed.is_added, values)
        if self.parts and self.parts[-1].is_before(part):
            part = self.parts.pop().with_next(part)
        self.parts.append(part)
        self.pieces += 1


@dataclass(frozen=True)
class Taken:
    """What a rank has taken of a GPU."""

    weight_bytes: int
    """Weights that the GPU can read."""
    gpu_bytes: int
    """Its memory."""


class GpuPrefill:
    """What a CPU rank computes linear layers of many tokens with.

    Args:
        device: the GPU; for tests the CPU, with the same sequence of copies and products.
        tokens: most tokens of a step.
        cores: logical CPUs for the thread that orders work beside the main one; without any, those
            of the thread that makes this.

    """

    def __init__(self, device: torch.device, tokens: int, cores: Collection[int] = ()) -> None:
        self._device = device
        self._ordering = ThreadPoolExecutor(
            1, thread_name_prefix="GpuPrefill", initializer=_begin_thread,
            initargs=(device, cores),
        )  # fmt: skip
        self.uses_triton = choose_expand(device) is expand_with_triton
        """Whether kernels of Triton compute what has one, instead of several operators."""
        self._tokens = tokens
        self._weights: dict[int, WholeWeight] = {}
        self._pieces: dict[int, list[Placed]] = {}
        self._constants: dict[int, _Constant] = {}
        self._ahead: list[int] = []
        """Addresses of the weights that were expanded ahead, as far as there is room."""
        self._whole: dict[int, _Whole] = {}
        """What is there of them, by address."""
        self._ordered: Future[None] | None = None
        """What another thread orders of them."""

    def add(self, weight: HostWeight) -> None:
        """Have a weight computed here, from `take` on."""
        if weight.data.nbytes >= LEAST_BYTES:
            self.add_whole(WholeWeight.of_one(weight))

    def add_whole(self, weight: WholeWeight) -> None:
        """Have a weight computed here whose parts begin with pages of their own."""
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
        of_parts = max(part.source.shape[1] for weight in weights for part in weight.parts)
        needed = gpu_bytes(outputs, inputs, self._tokens)
        needed += sum(weight.gpu_bytes for weight in weights)
        try:
            self._lock_pages()
            self._allocate(outputs, inputs, of_parts)
        except RuntimeError as error:
            reason = str(error).splitlines()[0].rstrip(".")
            raise UnsupportedError(
                f"no GPU computes this rank's prompts, which takes {needed / GIB:.1f} GiB of its "
                f"memory and pages of the host that can be locked: {reason}. "
                "Lower gpu.memory_utilization or --max-num-batched-tokens, or set "
                "cpu.prefill_on_gpu to false."
            ) from None
        self._pieces = {at: list(cut(weight, self._device)) for at, weight in self._weights.items()}
        return Taken(sum(weight.nbytes for weight in weights), needed)

    def _lock_pages(self) -> None:
        if self._device.type != "cuda":
            return
        # Streams, events and locked memory belong to the current one.
        torch.cuda.set_device(self._device)
        for weight in self._weights.values():
            for part in weight.parts:
                lock_pages(part.source.data)

    def _allocate(self, outputs: int, inputs: int, inputs_of_parts: int) -> None:
        device = self._device
        # vLLM's CPU worker puts things that do nothing into their places in torch.cuda.
        module: Any = torch.cuda.streams if device.type == "cuda" else torch.cpu
        self._module = module
        self._computing = module.Stream()
        self._done = module.Event()

        def memory(elements: int) -> torch.Tensor:
            return torch.empty(elements, dtype=torch.bfloat16, device=device)

        self._reader = PieceReader(device, module, self._computing, inputs_of_parts)
        self._x, self._y = memory(self._tokens * inputs), memory(self._tokens * outputs)
        # In smaller steps whole weights lie behind products.
        self._behind_products = self._y[SHARED_TOKENS * outputs :]
        self._x_host = self.host_memory(self._tokens * inputs)
        # A residual is the input of some layer.
        self._residual = memory(self._tokens * inputs)
        self._residual_host = self.host_memory(self._tokens * inputs)

    def host_memory(self, *shape: int) -> torch.Tensor:
        """Make host memory, bf16, that the GPU copies from and to by itself."""
        is_gpu = self._device.type == "cuda"
        return torch.empty(shape, dtype=torch.bfloat16, device="cpu", pin_memory=is_gpu)

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self._device

    @property
    def tokens(self) -> int:
        """Most tokens of a step."""
        return self._tokens

    def stream(self) -> Any:
        """Make a stream of this device."""
        return self._module.Stream()

    def event(self) -> Any:
        """Make an event of this device."""
        return self._module.Event()

    @property
    def computing(self) -> Any:
        """The stream that products are computed on."""
        return self._computing

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
        self.settle()
        with current(self._computing):
            y = self._multiply(self._sent(x, self._x_host, self._x), packed, bias)
            (y_host,) = self.received(y)
        return y_host

    def post_attention(
        self, parts: PostAttention, attended: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What `PostAttentionBlock` computes; shapes as there, all in host memory."""
        self.settle()
        with current(self._computing):
            attended = _gathered(attended, slice(None), self._x_host)
            residual = _gathered(residual, slice(None), self._residual_host)
            y, total = self.behind_from(parts, attended, residual)
            if parts.next is not None:
                y = self.product(self.add_and_norm(y, total, parts.next.norm), parts.next.qkv)
            y_host, total_host = self.received(y, total)
        return y_host, total_host

    def behind_from(
        self, parts: PostAttention, attended: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What `behind` computes, from page-locked host memory; on the stream of products.

        Args:
            parts: of the layer; what comes next is left out.
            attended: [M, K].
            residual: [M, N].

        Returns:
            [M, N], which is to be added to the residual, and it.

        """
        x = _like(self._x, attended).copy_(attended, non_blocking=True)
        total = _like(self._residual, residual).copy_(residual, non_blocking=True)
        return self.behind(parts, x, total), total

    def behind(
        self, parts: PostAttention, attended: torch.Tensor, total: torch.Tensor
    ) -> torch.Tensor:
        """What a layer computes behind its attention: [M, N], which is to be added to `total`.

        Without a perceptron: what its norm gives.

        Args:
            parts: of the layer; what comes next is left out.
            attended: [M, K].
            total: [M, N], the residual, to which the attention is added.

        """
        y = self.product(attended, parts.output)
        if parts.is_parallel:
            x = self.add_and_norm(None, total, parts.norm)
            total += y if parts.multiplier == 1 else y * parts.multiplier
        else:
            self._prepare(y, parts.output_norm, parts.multiplier)
            x = self.add_and_norm(y, total, parts.norm)
        if parts.gate_up is None or parts.down is None:
            return x
        y = self.product(self.activated(parts, self.product(x, parts.gate_up)), parts.down)
        self._prepare(y, parts.down_norm, parts.multiplier)
        return y

    def _prepare(self, y: torch.Tensor, norm: Norm | None, multiplier: float) -> None:
        """Make of a product [M, N] what is added to the residual, in place."""
        if norm is not None:
            for rows in chunks(len(y)):
                y[rows] = self.norm(y[rows], norm)
        if multiplier != 1:
            y *= multiplier

    def norm(self, x: torch.Tensor, how: Norm) -> torch.Tensor:
        """The norm of x's last dimension, bf16."""
        bias = None if how.bias is None else self.constant(how.bias)
        return how(x, self.constant(how.weight), bias)

    def stage(
        self, hidden: torch.Tensor, residual: torch.Tensor | None, rows: torch.Tensor | slice
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Copy a step's input, [M, N] each, to where the GPU reads it.

        Args:
            hidden: of all tokens.
            residual: of all tokens, if there is one.
            rows: which tokens the GPU computes.

        """
        self.settle()
        return (
            _gathered(hidden, rows, self._x_host),
            None if residual is None else _gathered(residual, rows, self._residual_host),
        )

    def sent(
        self, hidden: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Send what `stage` has given: what is to be added to the residual, and the residual.

        In the model's first layer there is nothing to add: the hidden state is the residual.
        """
        if residual is None:
            return None, _like(self._residual, hidden).copy_(hidden, non_blocking=True)
        x = _like(self._y, hidden).copy_(hidden, non_blocking=True)
        return x, _like(self._residual, residual).copy_(residual, non_blocking=True)

    def _sent(self, x: torch.Tensor, host: torch.Tensor, gpu: torch.Tensor) -> torch.Tensor:
        return _like(gpu, x).copy_(_like(host, x).copy_(x), non_blocking=True)

    def received(
        self, *results: torch.Tensor, into: Sequence[torch.Tensor] | None = None
    ) -> list[torch.Tensor]:
        """As `send`; waits for all that was computed before."""
        received = self.send(*results, into=into)
        self.wait()
        return received

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

    def wait(self) -> None:
        """Wait for all that was ordered on the stream of products."""
        self.mark()
        self.wait_for_mark()

    def mark(self) -> None:
        """Mark what was ordered on the stream of products up to now."""
        self._done.record(self._computing)

    def wait_for_mark(self) -> None:
        """Wait for what was marked last."""
        self._done.synchronize()

    def order(self, work: Callable[[], Any]) -> Future[Any]:
        """Have the GPU's work ordered beside this thread."""
        return self._ordering.submit(work)

    def expand_ahead(self, linears: Sequence[Linear]) -> None:
        """Have `expand` called by the other thread, unless all is there.

        What is asked for next waits until it has ordered everything.
        """
        self.settle()
        if not self.has(linears):
            self._ordered = self.order(lambda: self.expand(linears))

    def settle(self) -> None:
        """Wait until the other thread has ordered everything.

        Raises:
            RuntimeError: what CUDA has said there.
            TimeoutError: it takes too long.

        """
        ordered, self._ordered = self._ordered, None
        if ordered is not None:
            ordered.result(timeout=LIMIT_S)

    def has(self, linears: Sequence[Linear]) -> bool:
        """Whether weights were expanded ahead, and nothing has taken their place."""
        return self._ahead == _addresses(linears)

    def expand(self, linears: Sequence[Linear]) -> None:
        """Have weights come and be expanded, which their next products use in this order.

        They take the place of products of larger steps, which forget them, and of those before.
        What there is no room for comes ahead as other pieces do.
        """
        memory = self._behind_products
        self.forget()
        self._ahead = _addresses(linears)
        with torch.inference_mode(), current(self._computing):
            for at in self._ahead:
                whole = self._whole[at] = _Whole()
                for placed in self._pieces[at]:
                    count = (placed.piece.end - placed.piece.begin) * placed.piece.inputs
                    if count > len(memory):
                        return
                    weight, memory = memory[:count], memory[count:]
                    self._reader.expanded(placed.piece, weight)
                    whole.add(placed, weight)

    def forget(self) -> None:
        """Have nothing ahead any more."""
        self._ahead = []
        self._whole.clear()

    def wait_for_link(self) -> None:
        """Wait until all that was ordered ahead has come."""
        self._reader.wait()
        self.wait()

    def product(self, x: torch.Tensor, linear: Linear) -> torch.Tensor:
        """x · Wᵀ + bias, [M, N], in memory that the next product overwrites."""
        return self._multiply(x, linear.weight.data, linear.bias)

    def _multiply(
        self, x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        at = packed.data_ptr()
        tokens, outputs = x.shape[0], self._weights[at].shape[0]
        if tokens > SHARED_TOKENS:
            self.forget()
        y = self._y[: tokens * outputs].view(tokens, outputs)
        # It was bf16 before vLLM widened it.
        added = None if bias is None else self.constant(bias)
        for placed, weight in self._placed(at):
            part, own = y[:, placed.outputs], x[:, placed.inputs]
            if placed.is_added:
                # Rounded once a part, as where ranks on GPUs add theirs up.
                part.addmm_(own, weight)
            elif added is None:
                torch.mm(own, weight, out=part)
            else:
                torch.addmm(added[placed.outputs], own, weight, out=part)
        return y

    def _placed(self, at: int) -> Iterator[tuple[Placed | _Part, torch.Tensor]]:
        """The pieces of a weight, each with its values [inputs, outputs], in their order."""
        whole = self._whole.get(at, _Whole())
        yield from ((part, part.weight) for part in whole.parts)
        for placed in self._pieces[at][whole.pieces :]:
            yield placed, self._reader.expanded(placed.piece).t()

    def constant(self, tensor: torch.Tensor) -> torch.Tensor:
        """A bias or a norm's weight, which the GPU keeps."""
        if tensor.data_ptr() not in self._constants:
            there = tensor.to(self._device, torch.bfloat16)
            self._constants[tensor.data_ptr()] = _Constant(tensor, there)
        return self._constants[tensor.data_ptr()].there

    def add_and_norm(self, y: torch.Tensor | None, total: torch.Tensor, norm: Norm) -> torch.Tensor:
        """Add y to `total`; the norm of the sum, [M, N], in memory that the next one overwrites.

        Args:
            y: [M, N]; None adds nothing.
            total: [M, N].
            norm: of rows.

        """
        x = _like(self._x, total)
        if self.uses_triton and gpu_rows.has_norm(norm, total.shape[1]):
            gpu_rows.add_and_norm(y, total, norm, self.constant(norm.weight), x)
            return x
        for rows in chunks(len(total)):
            if y is not None:
                total[rows] += y[rows]
            x[rows] = self.norm(total[rows], norm)
        return x

    def activated(self, parts: PostAttention, y: torch.Tensor) -> torch.Tensor:
        """What a perceptron's `down` multiplies, [M, K], in the memory of norms.

        Args:
            parts: of the layer.
            y: what `gate_up` gave, [M, K or 2 · K].

        """
        tokens = y.shape[0]
        inputs = y.shape[1] // 2 if parts.is_gated else y.shape[1]
        x = self._x[: tokens * inputs].view(tokens, inputs)
        if self.uses_triton and gpu_rows.has_activation(parts):
            gpu_rows.activate(y, x)
            return x
        for rows in chunks(tokens):
            x[rows] = parts.activated(y[rows])
        return x


def _addresses(linears: Sequence[Linear]) -> list[int]:
    return [linear.weight.data.data_ptr() for linear in linears]


def _begin_thread(device: torch.device, cores: Collection[int]) -> None:
    if cores:
        os.sched_setaffinity(0, cores)
    # Workers of OpenMP belong to the main thread.
    torch.set_num_threads(1)
    if device.type == "cuda":
        torch.cuda.set_device(device)


def give_back(device: torch.device) -> None:
    """Let other processes have the GPU's memory that nothing in this one uses any more."""
    if device.type == "cuda":
        torch.cuda.memory.empty_cache()


def chunks(tokens: int) -> Iterator[slice]:
    """Tokens of a step, as many at a time as intermediate results have room for."""
    for begin in range(0, tokens, CHUNK_TOKENS):
        yield slice(begin, begin + CHUNK_TOKENS)


def _like(memory: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return memory[: x.numel()].view(x.shape)


def _gathered(x: torch.Tensor, rows: torch.Tensor | slice, host: torch.Tensor) -> torch.Tensor:
    if isinstance(rows, slice):
        return _like(host, x[rows]).copy_(x[rows])
    into = host[: len(rows) * x.shape[1]].view(len(rows), x.shape[1])
    return torch.index_select(x, 0, rows, out=into)

"""A GPU that computes linear layers of a CPU rank in steps of many tokens.

A decode step reads every weight for a few tokens, and the socket reads them faster than the link
to a GPU would carry them.  A prefill multiplies every weight by thousands of tokens; there a GPU
reads the weights over its link, piece by piece and ahead of their use (piece_reader.py), and sends
back the products.

The weights stay in host memory, page-locked and in the layout that the CPU computes with.  The GPU
holds a few pieces of them and the tokens of one step.
"""

from __future__ import annotations

import functools
import mmap
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch

from placement.host.gpus import read_gpus
from placement.units import GIB
from ray_hetero.errors import UnsupportedError
from ray_hetero.kernels.formats.base import BLOCK, HostWeight
from ray_hetero.offload.expand.compact_expansion import choose_expand, expand_with_triton
from ray_hetero.offload.prefill import layer_ops
from ray_hetero.offload.prefill.step_memory import StepMemory
from ray_hetero.offload.prefill.submission import SubmissionThread
from ray_hetero.offload.weights.link_reader import current
from ray_hetero.offload.weights.piece_reader import PieceReader
from ray_hetero.offload.weights.read_sequence import ReadSequence
from ray_hetero.offload.weights.resident_pieces import IdleMemory
from ray_hetero.offload.weights.weight_pieces import Piece, WeightSlice, WholeWeight, cut
from ray_hetero.planning.prefill_memory import ahead_bytes, gpu_bytes
from ray_hetero.runtime.gpu_memory import lock_pages

if TYPE_CHECKING:
    from ray_hetero.kernels.layers.layer_parts import Linear, PostAttention


def gpu_of(device: torch.device) -> str:
    """A GPU with its link and driver, as far as CUDA and the driver's library tell.

    Without what changes while a GPU rests: it may lower the link's generation.
    """
    if device.type != "cuda":
        return f"GPU {device}"
    found = torch.cuda.get_device_properties(device)
    address = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
    told = next((gpu.details for gpu in read_gpus() if gpu.pci_address == address), None)
    if told is None:
        return f"GPU {found.name} at {address} for CUDA {torch.version.cuda}"
    link = f"{told.link_width} lanes of generation {told.link_generation_max}"
    return f"GPU {found.name} at {address} with {link}, driver {told.driver}"


class GpuConstants:
    """Biases and norms' weights, each sent once.

    Args:
        device: the GPU.

    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sent: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """Each here and on the GPU: as long as it is here, its address is its own."""

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same in bf16 on the GPU."""
        at = tensor.data_ptr()
        if at not in self._sent:
            self._sent[at] = tensor, tensor.to(self._device, torch.bfloat16)
        return self._sent[at][1]


LEAST_BYTES = 1 << 20
"""Least bytes of a weight; smaller ones are read only with the others of a whole layer."""


def with_own_pages(weight: HostWeight) -> HostWeight:
    """A weight that shares no page with others, as pages can be locked only once.

    Args:
        weight: of any size; large ones are left where they are.

    Returns:
        It, or the same with its data in new memory.

    """
    data = weight.data
    if data.nbytes >= LEAST_BYTES:
        return weight
    pages = torch.frombuffer(mmap.mmap(-1, data.nbytes), dtype=torch.uint8)
    return replace(weight, data=pages.view(data.dtype).view(data.shape).copy_(data))


@dataclass(frozen=True)
class PrefillBytes:
    """Bytes that computing a rank's prompts on a GPU takes."""

    weight_bytes: int
    """Weights in host memory that the GPU can read."""
    gpu_bytes: int
    """Memory of the GPU."""


class OffloadGpu(SubmissionThread):
    """GPU that computes a CPU rank's linear layers of many tokens, reading weights over its link.

    Args:
        device: the GPU; for tests the CPU, with the same sequence of copies and products.
        tokens: most tokens of a step.
        cores: logical CPUs for the thread that orders work beside the main one; without any, those
            of the thread that makes this.

    """

    def __init__(self, device: torch.device, tokens: int, cores: Collection[int] = ()) -> None:
        super().__init__(device, cores)
        self._device = device
        self.uses_triton = choose_expand(device) is expand_with_triton
        """Whether kernels of Triton compute what has one, instead of several operators."""
        self._tokens = tokens
        self._weights: dict[int, WholeWeight] = {}
        self._pieces: dict[int, list[WeightSlice]] = {}
        self.constant = GpuConstants(device)
        """Biases and norms' weights on the GPU."""
        self.order_of_prompts = ReadSequence()
        """Order of the pieces of larger steps."""
        self.idle: list[IdleMemory] = []
        """Memory for what prompts need beside products, which decode steps leave idle."""

    def add(self, weight: HostWeight) -> None:
        """Add a weight whose products are computed here from `take` on."""
        if weight.data.nbytes >= LEAST_BYTES:
            self.add_whole(WholeWeight.of_one(weight))

    def add_beside(self, weights: Iterable[HostWeight]) -> None:
        """Add the small weights of layers, which have pages of their own, if there are large ones.

        Args:
            weights: of whole layers.

        """
        if self._weights:
            for weight in weights:
                self.add_whole(WholeWeight.of_one(weight))

    def add_whole(self, weight: WholeWeight) -> None:
        """Add a weight whose parts begin with pages of their own."""
        self._weights[weight.data.data_ptr()] = weight

    def take(self, hidden: int | None = None) -> PrefillBytes:
        """Lock the weights' pages and take memory of the GPU.

        Args:
            hidden: elements of a token's residual; None if they are not known, which takes them
                for the most inputs of a weight.

        Raises:
            UnsupportedError: the pages cannot be locked, or the GPU has too little memory left.

        """
        weights = self._weights.values()
        if not weights:
            return PrefillBytes(0, 0)
        outputs, inputs = (max(weight.shape[i] for weight in weights) for i in (0, 1))
        hidden = inputs if hidden is None else min(hidden, inputs)
        needed = gpu_bytes(outputs, inputs, self._tokens)
        needed += sum(weight.gpu_bytes for weight in weights)
        try:
            self._lock_pages()
            cut_up = {at: list(cut(weight, self._device)) for at, weight in self._weights.items()}
            pieces = dict.fromkeys(placed.piece for found in cut_up.values() for placed in found)
            self._allocate(outputs, inputs, hidden, list(pieces))
        except RuntimeError as error:
            reason = str(error).splitlines()[0].rstrip(".")
            raise UnsupportedError(
                f"no GPU computes this rank's prompts, which takes {needed / GIB:.1f} GiB of its "
                f"memory and pages of the host that can be locked: {reason}. "
                "Lower gpu.memory_utilization or --max-num-batched-tokens, or set "
                "cpu.prefill_on_gpu to false."
            ) from None
        self._pieces = cut_up
        return PrefillBytes(sum(weight.nbytes for weight in weights), needed)

    def _lock_pages(self) -> None:
        if self._device.type != "cuda":
            return
        # Streams, events and locked memory belong to the current one.
        torch.cuda.set_device(self._device)
        for weight in self._weights.values():
            for part in weight.parts:
                lock_pages(part.source.data)

    def _allocate(self, outputs: int, inputs: int, hidden: int, pieces: list[Piece]) -> None:
        device = self._device
        # vLLM's CPU worker puts things that do nothing into their places in torch.cuda.
        module: Any = torch.cuda.streams if device.type == "cuda" else torch.cpu
        self._module = module
        self._computing = module.Stream()
        self._done = module.Event()
        budget = ahead_bytes(inputs, hidden, self._tokens)
        self.reader = PieceReader(device, module, self._computing, pieces, budget)
        """Reader of all weights' pieces."""
        self.memory = StepMemory(device, self._tokens, inputs, outputs, hidden)
        """Memory for the tokens of a step."""

    @property
    def device(self) -> torch.device:
        """Device that computes."""
        return self._device

    @property
    def tokens(self) -> int:
        """Most tokens of a step."""
        return self._tokens

    @property
    def pieces(self) -> list[list[WeightSlice]]:
        """Pieces of each weight, in the order in which weights were added; none before `take`."""
        return list(self._pieces.values())

    @property
    def about(self) -> str:
        """The GPU, and what decides how long it takes for the weights of a layer."""
        ahead = self.memory.behind_products.numel()
        triton = "with" if self.uses_triton else "without"
        return f"{gpu_of(self._device)}, {ahead} weights ahead {triton} Triton"

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
        """y = x · Wᵀ + bias, as `ManyTokens` says."""
        self.begin(len(x))
        with current(self._computing):
            y = self._multiply(self.memory.sent_alone(x), packed, bias)
            (y_host,) = self.received(y)
        return y_host

    def post_attention(
        self, parts: PostAttention, attended: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute parts of a layer as `PostAttentionBlock` does; everything is in host memory."""
        self.begin(len(attended))
        with current(self._computing):
            x, total = self.memory.stage(attended, residual, slice(None))
            assert total is not None
            x, total = self.memory.sent_to_multiply(x, total)
            y = layer_ops.behind(self, parts, x, total)
            if parts.next is not None:
                x = layer_ops.add_and_norm(self, y, total, parts.next.norm)
                y = self.product(x, parts.next.qkv)
            y_host, total_host = self.received(y, total)
        return y_host, total_host

    def received(
        self, *results: torch.Tensor, into: Sequence[torch.Tensor] | None = None
    ) -> list[torch.Tensor]:
        """Send as `StepMemory.send` does; waits for all that was computed before."""
        received = self.memory.send(*results, into=into)
        self.wait()
        return received

    def wait(self) -> None:
        """Wait for all that was ordered on the stream of products."""
        self._done.record(self._computing)
        self._done.synchronize()

    def begin(self, tokens: int) -> None:
        """Begin products of a step, in the place of pieces that decode steps use.

        Args:
            tokens: of the step, or more.

        Raises:
            torch.OutOfMemoryError: as `settle`.

        """
        self.settle()
        self.reader.kept.forget(tokens)

    def read_ahead(self) -> None:
        """Prefetch a prompt's first weights now, in the place of those of decode steps.

        Where memory has run out, nothing is asked for: the next step learns of that.

        Raises:
            RuntimeError: what CUDA says.

        """
        if self._shortage is None:
            with torch.inference_mode(), current(self._computing):
                self.read_first()

    def read_first(self) -> None:
        """Prefetch a prompt's first weights, on the thread that submits the prompt's work."""
        self.reader.prepare_next(self.order_of_prompts)

    @functools.cached_property
    def link_rate(self) -> float:
        """Bytes a second that come over the link; measured once, while the GPU computes nothing.

        Raises:
            RuntimeError: what CUDA says.

        """
        self.settle()
        with torch.inference_mode(), current(self._computing):
            return self.reader.link_rate()

    def product(self, x: torch.Tensor, linear: Linear) -> torch.Tensor:
        """x · Wᵀ + bias, [M, N], in memory that the next product overwrites."""
        return self._multiply(x, linear.weight.data, linear.bias)

    def _multiply(
        self, x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        at = packed.data_ptr()
        tokens, outputs = x.shape[0], self._weights[at].shape[0]
        y = self.memory.products(tokens, outputs)
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

    def _placed(self, at: int) -> Iterator[tuple[WeightSlice, torch.Tensor]]:
        """A weight's parts of pieces, each with its values [inputs, outputs], in their order."""
        for piece, parts in groupby(self._pieces[at], attrgetter("piece")):
            weight = self.reader.expanded(piece, self.order_of_prompts)
            yield from ((placed, weight[placed.rows].t()) for placed in parts)

    def pieces_of(self, part: WholeWeight) -> list[WeightSlice]:
        """The pieces of a part of a weight that is here."""
        rows = max(one.source.data[:1].nbytes for one in part.parts)
        most = min(self.reader.values // part.shape[1], self.reader.stored // rows)
        return list(cut(part, self._device, most // BLOCK * BLOCK))

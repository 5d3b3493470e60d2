"""Results of a CPU stage's prompts that stay on the GPU that has computed them.

The stage behind often computes on the same GPU.  Hidden states and residuals of 8,192 tokens of an
8B model are 134 MB: down over the link, into a message and up again they take longer than a
layer of the model.  Here they stay in memory that both ranks see, and the message only says so
(distributed/stage_boundary.py).

That is done once a step has shown that what the layers return is what is sent: a model might do
more with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from ray_hetero.kernels.prompts.link_reader import current
from ray_hetero.log import logger
from ray_hetero.runtime import gpu_memory

if TYPE_CHECKING:
    from ray_hetero.kernels.prompts.gpu_prefill import GpuPrefill

HIDDEN, RESIDUAL = "hidden_states", "residual"
"""Names of both results in vLLM's models, between stages."""


class RowPacking(Protocol):
    """How the tensors of a token lie in a row of a message."""

    row_bytes: int

    @property
    def names(self) -> set[str]:
        """Names of the tensors."""

    def views(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors inside of rows, uint8, [tokens, row_bytes]; views of [tokens, …], by name."""


class Carrier(Protocol):
    """A message that says that its rows lie here."""

    @property
    def is_taken(self) -> bool:
        """Whether the receiving rank has read them."""


@dataclass(frozen=True)
class GpuOffer:
    """Memory of a GPU that a sending rank puts messages' rows in."""

    gpu: str
    """See `gpu_memory.identity`."""
    handle: bytes
    nbytes: int


class StageOutput:
    """Memory in which a stage's last layers leave the results of steps that a GPU computes.

    Args:
        gpu: that computes them.

    """

    def __init__(self, gpu: GpuPrefill) -> None:
        self._gpu = gpu
        self._memory: torch.Tensor | None = None
        self._places: Mapping[str, torch.Tensor] = {}
        self._carried: Carrier | None = None
        self._returned: tuple[int, int] | None = None
        self._stays = self._is_direct = False

    # --- the stage boundary's side ------------------------------------------------------------

    def offer(self, packing: RowPacking, capacity: int) -> GpuOffer | None:
        """Take the memory; None where the GPU gives none, or other tensors are sent.

        Args:
            packing: of the messages.
            capacity: most tokens of one.

        """
        if packing.names != {HIDDEN, RESIDUAL}:
            return None
        nbytes = capacity * packing.row_bytes
        try:
            memory, handle = gpu_memory.made(self._gpu.device, nbytes)
        except (OSError, RuntimeError) as error:
            logger.warning("results of prompts are sent through the host's memory: %s", error)
            return None
        self._memory = memory
        self._places = packing.views(memory.view(capacity, packing.row_bytes))
        return GpuOffer(gpu_memory.identity(self._gpu.device), handle, nbytes)

    def accepted(self, *, is_seen: bool) -> None:
        """Keep the memory if the receiving rank sees it."""
        if self._memory is not None and not is_seen:
            self._places = {}
            gpu_memory.give_back(self._memory)
            self._memory = None

    def holds(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Whether the rows of a step that is sent lie here; called once for each step.

        Raises:
            RuntimeError: they do, and are not what is sent.

        """
        sent = tuple(
            tensors[name].data_ptr() if name in tensors else 0 for name in (HIDDEN, RESIDUAL)
        )
        is_direct = self._returned == sent
        stays, self._stays = self._stays, False
        if stays and not is_direct:
            raise RuntimeError(
                "this stage sends tensors that its last layers have not returned, although their "
                "results are on a GPU; expected the tensors of earlier steps. Set "
                "cpu.prefill_on_gpu to false, and report the model's class."
            )
        self._is_direct |= is_direct
        self._returned = None
        return stays

    def sent(self, message: Carrier) -> None:
        """Keep the memory until the receiving rank has read it by this message."""
        self._carried = message

    # --- the layers' side ---------------------------------------------------------------------

    def may_take(self, tokens: int) -> bool:
        """Whether a step's results can stay here."""
        return (
            self._is_direct
            and bool(self._places)
            and tokens <= len(self._places[HIDDEN])
            and (self._carried is None or self._carried.is_taken)
        )

    def put(
        self, tokens: int, rows: torch.Tensor | slice, x: torch.Tensor, total: torch.Tensor
    ) -> None:
        """Put some rows here, behind what the GPU is computing.

        Args:
            tokens: of the step.
            rows: which of them.
            x: [rows, N], bf16, on the GPU or the host.
            total: the same of the residual.

        """
        with current(self._gpu.computing):
            for name, result in ((HIDDEN, x), (RESIDUAL, total)):
                self._places[name][:tokens][rows] = result.to(self._gpu.device)

    def finish(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Wait for the rows; what stands for them in this process, whose values are not theirs.

        Args:
            hidden: the step's input, of the same shape.

        """
        self._gpu.wait()
        self._stays = True
        x, total = (
            torch.empty_like(hidden, memory_format=torch.contiguous_format) for _ in range(2)
        )
        self.note(x, total)
        return x, total

    def note(self, x: torch.Tensor, total: torch.Tensor) -> None:
        """What the last layers return for a step."""
        self._returned = x.data_ptr(), total.data_ptr()


_offered: list[StageOutput] = []


def use(output: StageOutput) -> None:
    """Have the boundary behind this rank's stage send from there."""
    _offered[:] = [output]


def offered() -> StageOutput | None:
    """What `use` was called with; None if it was not."""
    return _offered[0] if _offered else None


def accept(offer: GpuOffer, device: torch.device) -> torch.Tensor | None:
    """The offered memory in the receiving rank; None where that computes on another GPU.

    Args:
        offer: of the sending rank.
        device: where this rank computes.

    Returns:
        uint8, [bytes].

    """
    if gpu_memory.identity(device) != offer.gpu:
        return None
    try:
        return gpu_memory.opened(device, offer.handle, offer.nbytes)
    except (OSError, RuntimeError) as error:
        logger.info("results of prompts are received through the host's memory: %s", error)
        return None

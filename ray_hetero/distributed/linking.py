"""How two neighbouring ranks agree on what crosses between them, and by which link."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from placement.host.sysfs import machine_id
from ray_hetero.distributed.gloo_link import GlooLink
from ray_hetero.distributed.link import Link, Reached, Receiver, Sender, Terms, WaitUntilRead
from ray_hetero.distributed.neighbour import Neighbour
from ray_hetero.distributed.shared_memory_link import SharedMemoryLink
from ray_hetero.errors import AgreementError
from ray_hetero.log import logger
from ray_hetero.offload.prefill import stage_output
from ray_hetero.offload.prefill.stage_output import GpuOffer, SeenOutput, StageOutput

LINKS: Sequence[Link] = (
    SharedMemoryLink(),
    GlooLink(),
)
"""The fastest first; the last one can be reached from everywhere."""


@dataclass(frozen=True)
class Signature:
    """Tensors that cross a stage boundary for each token; both sides must agree on it."""

    tensors: tuple[tuple[str, tuple[int, ...], str], ...]
    """Name, shape of one token's row and dtype of each tensor, in the order they are packed."""
    capacity: int
    """Most tokens of a step."""

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor], capacity: int) -> Signature:
        """Read the signature off tensors of shape [tokens, …]."""
        rows = ((name, tuple(t.shape[1:]), str(t.dtype)) for name, t in tensors.items())
        return cls(tuple(sorted(rows)), capacity)


@dataclass(frozen=True)
class Introduction:
    """Message of a sending rank to the receiving one, sent once."""

    signature: Signature
    """Names and shapes of the tensors that the sending rank sends."""
    machine: str
    """Identity of its machine, whose processes read one clock; empty if unknown."""
    offers: tuple[tuple[str, bytes], ...]
    """Name and address of each link that it offers, in the order in which they are tried."""
    gpu: GpuOffer | None = None
    """Memory of a GPU that it can leave rows in; None if it computes none there."""


@dataclass(frozen=True)
class Answer:
    """Answer of a receiving rank to an introduction."""

    link: str | None
    """Name of the link that it has chosen; None where the two do not come together."""
    problem: str = ""
    """Why they do not."""
    sees_gpu: bool = False
    """Whether it sees the memory of a GPU that was offered."""
    waits_on_gpu: bool = False
    """Whether its streams wait for what is computed into that memory."""


@dataclass(frozen=True)
class Incoming:
    """State that a receiving rank keeps of a neighbour."""

    receiver: Receiver
    is_clock_shared: bool
    """Whether the neighbour reads the same clock."""
    gpu: SeenOutput | None
    """Memory of this rank's GPU in which the neighbour leaves rows."""


@dataclass(frozen=True)
class Linking:
    """Makes a rank's ends of the links to its neighbours."""

    signature: Signature
    terms: Terms
    links: Sequence[Link]
    """The links that may be used, in the order in which they are tried."""

    def to_next(self, neighbour: Neighbour, output: StageOutput | None = None) -> Sender:
        """The end that sends to a neighbour.

        Args:
            neighbour: the receiver.
            output: where this rank may leave results on a GPU.

        Raises:
            AgreementError: the neighbour takes other tensors, or none of the links.
            RuntimeError: it is late, or has ended.

        """
        offered = ((link.name, link.offer(self.terms, neighbour)) for link in self.links)
        offers = {name: offer for name, offer in offered if offer is not None}
        addresses = tuple((name, offer.address) for name, offer in offers.items())
        gpu = None
        if output is not None:
            gpu = output.offer(self.terms.packing, self.terms.capacity)
        neighbour.tell(Introduction(self.signature, machine_id(), addresses, gpu))
        answer: Answer = neighbour.hear()
        if output is not None:
            output.accepted(
                is_seen=answer.sees_gpu, waits=answer.waits_on_gpu, timeout_s=self.terms.timeout_s
            )
        for name, offer in offers.items():
            if name != answer.link:
                offer.withdraw()
        if answer.link is None:
            raise AgreementError(answer.problem)
        beside = ", prompts' rows in memory of the GPU" if answer.sees_gpu else ""
        logger.info("stage boundary to rank %d: %s%s", neighbour.rank, answer.link, beside)
        return offers[answer.link].accept()

    def to_previous(self, neighbour: Neighbour, wait_until_read: WaitUntilRead) -> Incoming:
        """The end that receives from a neighbour.

        Args:
            neighbour: the sender.
            wait_until_read: waits until what came in a message is not needed any more.

        Raises:
            AgreementError: the neighbour sends other tensors, or offers no link that it can be
                reached by.
            RuntimeError: it is late, or has ended.

        """
        heard: Introduction = neighbour.hear()
        problem = self._difference(heard, neighbour)
        found = None if problem else self._reached(heard, neighbour)
        if found is None:
            problem = problem or (
                f"rank {dist.get_rank()} reaches rank {neighbour.rank} by none of the links that "
                f"it offers: {', '.join(name for name, _ in heard.offers) or 'none'}"
            )
            neighbour.tell(Answer(None, problem))
            raise AgreementError(problem)
        (link, reached), gpu = found, None
        if heard.gpu is not None and link.is_one_memory and self.terms.is_on_gpu:
            gpu = stage_output.accept(heard.gpu, self.terms.device)
        waits = gpu is not None and gpu.words is not None
        neighbour.tell(Answer(link.name, sees_gpu=gpu is not None, waits_on_gpu=waits))
        is_clock_shared = heard.machine == machine_id() != ""
        return Incoming(reached.take(wait_until_read), is_clock_shared, gpu)

    def _difference(self, heard: Introduction, neighbour: Neighbour) -> str:
        """Description of the two ends' differences; empty where they agree."""
        if heard.signature == self.signature:
            return ""
        return (
            f"intermediate tensors: rank {neighbour.rank} sends {heard.signature}, "
            f"rank {dist.get_rank()} takes {self.signature}"
        )

    def _reached(self, heard: Introduction, neighbour: Neighbour) -> tuple[Link, Reached] | None:
        known = {link.name: link for link in self.links}
        for name, address in heard.offers:
            if name in known:
                reached = known[name].reach(address, self.terms, neighbour)
                if reached is not None:
                    return known[name], reached
        return None

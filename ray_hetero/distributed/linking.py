"""How two neighbouring stages agree on what crosses between them, and by which way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from placement.errors import NativeError
from placement.host import native
from placement.host.sysfs import machine_id
from ray_hetero.distributed import shared_memory_link
from ray_hetero.distributed.gloo_link import GlooReceiver, GlooSender, Neighbour
from ray_hetero.distributed.messages import Message, Packing
from ray_hetero.distributed.shared_memory_link import (
    Offer,
    SharedMemoryReceiver,
    SharedMemorySender,
    SharedMessages,
)
from ray_hetero.errors import AgreementError
from ray_hetero.log import logger
from ray_hetero.runtime.locked_pages import lock_pages


@dataclass(frozen=True)
class Signature:
    """What crosses a stage boundary for each token; both sides must agree on it."""

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
    """What a stage tells the next one once."""

    signature: Signature
    machine: str
    """Ranks with the same one read the same clock; empty if unknown."""
    address: bytes | None
    """Where it hands shared memory over; None where it has none."""


@dataclass(frozen=True)
class Linking:
    """Makes a stage's ends of the links to its neighbours; they share memory where they can."""

    signature: Signature
    packing: Packing
    device: torch.device
    """Where this stage computes."""
    stages: int
    """Of the pipeline."""
    may_share: bool
    timeout_s: float
    """Longest wait for a stage of the same host, now and in each step."""
    numa_nodes: tuple[int, ...] = ()
    """Of a CPU stage, which computes in the memory that it has received into."""

    @property
    def _depth(self) -> int:
        # One message more than batches in flight (one a stage), so that packing need not wait.
        return self.stages + 1

    @property
    def _shared_depth(self) -> int:
        # And one more, as a receiver gives the oldest back when it has begun with the newest.
        return self._depth + 1

    def to_next(self, neighbour: Neighbour) -> GlooSender | SharedMemorySender:
        """The end that sends.

        Raises:
            RuntimeError: the next stage is late, or has ended.

        """
        offer = self._offer() if self.may_share else None
        address = None if offer is None else offer.address
        neighbour.tell(Introduction(self.signature, machine_id(), address))
        is_taken = neighbour.hear()
        if offer is not None and is_taken:
            logger.info("stage boundary to rank %d: shared memory", neighbour.rank)
            sender = SharedMemorySender(offer.shared.messages, offer.accept())
            sender.begin()
            self._lock(offer.shared)
            return sender
        if offer is not None:
            offer.withdraw()
        logger.info("stage boundary to rank %d: Gloo", neighbour.rank)
        return GlooSender(self._own_messages(), neighbour)

    def _offer(self) -> Offer | None:
        capacity = self.signature.capacity
        try:
            return Offer(self.packing, capacity, self._shared_depth, self.timeout_s)
        except OSError as error:
            logger.warning("stage boundary: no memory can be shared: %s", error)
            return None

    def to_previous(
        self, neighbour: Neighbour, wait_until_read: Callable[[Message], None]
    ) -> tuple[GlooReceiver | SharedMemoryReceiver, bool]:
        """The end that receives, and whether the previous stage reads the same clock.

        Args:
            neighbour: the previous stage.
            wait_until_read: waits until what came in a message is not needed any more.

        Raises:
            AgreementError: the previous stage sends other tensors than this one takes.
            RuntimeError: it is late, or has ended.

        """
        heard: Introduction = neighbour.hear()
        is_near = heard.machine == machine_id() != ""
        is_agreed = heard.signature == self.signature
        connection = None
        if is_agreed and is_near and self.may_share and heard.address is not None:
            connection = shared_memory_link.connected(heard.address, self.timeout_s)
        neighbour.tell(connection is not None)
        if not is_agreed:
            raise AgreementError(
                f"intermediate tensors: rank {neighbour.rank} sends {heard.signature}, "
                f"rank {dist.get_rank()} takes {self.signature}"
            )
        if connection is None:
            return GlooReceiver(self._own_messages(), neighbour, wait_until_read), is_near
        capacity = self.signature.capacity
        shared = shared_memory_link.take(connection, self.packing, capacity, self._shared_depth)
        self._bind(shared)
        self._lock(shared)
        receiver = SharedMemoryReceiver(shared.messages, connection, wait_until_read)
        receiver.begin()
        return receiver, is_near

    def _bind(self, shared: SharedMessages) -> None:
        # Before the sender touches a page, which would then lie on its own node.
        if self.numa_nodes:
            memory = shared.memory
            try:
                native.bind_range(memory.data_ptr(), memory.nbytes, self.numa_nodes, move=False)
            except NativeError as error:
                logger.warning("stage boundary: messages may lie on another NUMA node: %s", error)

    def _lock(self, shared: SharedMessages) -> None:
        if self.device.type != "cpu":
            lock_pages(shared.memory)

    def _own_messages(self) -> list[Message]:
        # Pages of ordinary memory are there once a step has used them.
        memory = torch.empty(
            (self._depth, self.packing.message_bytes(self.signature.capacity)),
            dtype=torch.uint8,
            device="cpu",
            pin_memory=self.device.type != "cpu",
        )
        return [Message(self.packing, part) for part in memory]

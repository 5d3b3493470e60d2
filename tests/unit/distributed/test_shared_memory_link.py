"""Messages in memory that two stages share: order, room, and what becomes of a stage that ends."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ray_hetero.distributed.link import Terms
from ray_hetero.distributed.messages import Message, Packing
from ray_hetero.distributed.neighbour import Neighbour
from ray_hetero.distributed.shared_memory_link import (
    SharedMemoryLink,
    SharedMemoryOffer,
    SharedMemoryReached,
    SharedMemoryReceiver,
    SharedMemorySender,
    SharedMessages,
)
from ray_hetero.runtime import unix_sockets

PACKING = Packing({"hidden_states": torch.zeros(1, 8)})
CAPACITY, NUMBER = 4, 3
MAPPED = "/memfd:ray_hetero-messages (deleted)"
LINK = SharedMemoryLink()
FIRST, SECOND = (Neighbour(rank, group=None) for rank in (0, 1))


def terms(timeout_s: float, capacity: int = CAPACITY) -> Terms:
    return Terms(PACKING, capacity, NUMBER - 2, timeout_s, torch.device("cpu"))


def offered(timeout_s: float) -> SharedMemoryOffer:
    offer = LINK.offer(terms(timeout_s), SECOND)
    assert offer is not None
    return offer


def reached(address: bytes, timeout_s: float, capacity: int = CAPACITY) -> SharedMemoryReached:
    found = LINK.reach(address, terms(timeout_s, capacity), FIRST)
    assert found is not None
    return found


class Link:
    """Both ends, in one process."""

    def __init__(self, timeout_s: float) -> None:
        offer = offered(timeout_s)
        other = reached(offer.address, timeout_s)
        self.read: list[Message] = []
        senders: list[SharedMemorySender] = []
        # Each end waits for the other on its way up.
        accepting = threading.Thread(target=lambda: senders.append(offer.accept()))
        accepting.start()
        self.receiver: SharedMemoryReceiver = other.take(self.read.append)
        accepting.join(30)
        (self.sender,) = senders
        self.ends = (self.sender._connection.socket, self.receiver._connection.socket)

    def send(self, value: float) -> None:
        message = self.sender.next_message()
        message.tensors["hidden_states"].fill_(value)
        self.sender.send(message, CAPACITY).wait()

    def receive(self) -> float:
        message, arrival = self.receiver.receive(CAPACITY)
        arrival.wait()
        (value,) = message.tensors["hidden_states"].unique().tolist()
        return float(value)


@pytest.fixture
def link() -> Iterator[Link]:
    made = Link(timeout_s=30)
    yield made
    for end in made.ends:
        end.close()


def test_messages_come_in_the_order_they_were_sent(link: Link) -> None:
    for value in range(3 * NUMBER):
        link.send(value)
        assert link.receive() == value


def test_a_message_is_written_again_only_when_it_is_not_needed_any_more(link: Link) -> None:
    for value in range(NUMBER):
        link.send(value)
    writer = threading.Thread(target=link.send, args=(NUMBER,))
    writer.start()
    # The first message is needed until the receiver has come to the last one.
    assert [link.receive() for _ in range(NUMBER - 1)] == [0, 1]
    writer.join(0.2)
    assert writer.is_alive()
    assert not link.read
    assert link.receive() == 2
    writer.join(30)
    assert not writer.is_alive()
    assert len(link.read) == 1
    assert link.receive() == NUMBER


def test_the_wait_for_a_stage_that_has_ended_is_over(link: Link) -> None:
    link.send(1)
    link.ends[0].close()
    # What it had sent is still there.
    assert link.receive() == 1
    with pytest.raises(RuntimeError, match="closed the connection"):
        link.receive()


def test_nothing_can_be_sent_to_a_stage_that_has_ended(link: Link) -> None:
    link.ends[1].close()
    with pytest.raises(RuntimeError, match="closed the connection"):
        link.send(1)


def test_a_stage_that_is_late_is_waited_for_no_longer_than_it_was_said() -> None:
    link = Link(timeout_s=0.2)
    with pytest.raises(RuntimeError, match=r"rank 0, .* not there in 0\.2 s \(exchange\.timeout_s"):
        link.receive()
    for end in link.ends:
        end.close()


def test_an_offer_without_a_taker_ends_too() -> None:
    offer = offered(timeout_s=0.2)
    address = offer.address
    with pytest.raises(RuntimeError, match=r"rank 1, .* not there in 0\.2 s \(exchange\.timeout_s"):
        offer.accept()
    assert LINK.reach(address, terms(1), FIRST) is None


def test_an_offer_of_another_machine_is_not_reached() -> None:
    offer = offered(timeout_s=1)
    assert LINK.reach(b"other" + offer.address, terms(1), FIRST) is None
    offer.withdraw()


def test_an_offer_that_is_withdrawn_leaves_nothing() -> None:
    # What earlier tests have left to be collected must not go away meanwhile.
    gc.collect()
    before = set(os.listdir("/proc/self/fd"))
    offer = offered(timeout_s=1)
    address = offer.address
    # Memory without a name in /dev/shm or elsewhere, which tests beside this one use too.
    assert MAPPED in Path("/proc/self/maps").read_text()
    offer.withdraw()
    assert LINK.reach(address, terms(1), FIRST) is None
    del offer
    assert MAPPED not in Path("/proc/self/maps").read_text()
    assert set(os.listdir("/proc/self/fd")) == before


def test_processes_of_other_users_get_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    users = iter([os.getuid() + 1, os.getuid()])
    monkeypatch.setattr(unix_sockets, "user_of", lambda connection: next(users))
    offer = offered(timeout_s=10)
    stranger, mate = (reached(offer.address, 10) for _ in range(2))
    senders: list[SharedMemorySender] = []
    accepting = threading.Thread(target=lambda: senders.append(offer.accept()))
    accepting.start()
    with pytest.raises(RuntimeError, match=r"rank 0, .* has closed the connection"):
        stranger.take(lambda message: None)
    mate.take(lambda message: None)
    accepting.join(30)
    assert len(senders) == 1


def test_nobody_can_make_the_memory_smaller() -> None:
    offer = offered(timeout_s=1)
    for size in (0, 1 << 20):
        with pytest.raises(PermissionError):
            os.truncate(offer._descriptor, size)
    offer.withdraw()


def test_memory_of_another_size_is_refused_before_it_is_mapped() -> None:
    """A page that is not there would end the process by SIGBUS when it is first read."""
    offer = offered(timeout_s=10)
    other = reached(offer.address, 10, capacity=1 << 12)
    failures: list[str] = []

    def accept() -> None:
        try:
            offer.accept()
        except RuntimeError as error:
            failures.append(str(error))

    accepting = threading.Thread(target=accept)
    accepting.start()
    with pytest.raises(RuntimeError, match=r"has \d+ bytes, expected \d+ \(3 messages of \d+ b"):
        other.take(lambda message: None)
    other._connection.socket.close()
    accepting.join(30)
    assert "rank 1, at the other end of the stage boundary, has closed" in failures[0]


def test_memory_that_could_still_shrink_is_refused() -> None:
    size = NUMBER * PACKING.message_bytes(CAPACITY)
    with open(os.memfd_create("unsealed"), "wb") as unsealed:
        unsealed.truncate(size)
        with pytest.raises(RuntimeError, match="sealed"):
            SharedMessages(unsealed.fileno(), terms(1))

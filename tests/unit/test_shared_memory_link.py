"""Messages in memory that two stages share: order, room, and what becomes of a stage that ends."""

from __future__ import annotations

import gc
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ray_hetero.distributed import shared_memory_link
from ray_hetero.distributed.messages import Message, Packing
from ray_hetero.distributed.shared_memory_link import (
    Offer,
    SharedMemoryReceiver,
    SharedMemorySender,
    connected,
    take,
)

PACKING = Packing({"hidden_states": torch.zeros(1, 8)})
CAPACITY, NUMBER = 4, 3
MAPPED = "/memfd:ray_hetero-messages (deleted)"


class Link:
    """Both ends, in one process."""

    def __init__(self, timeout_s: float) -> None:
        offer = Offer(PACKING, CAPACITY, NUMBER, timeout_s)
        reached = connected(offer.address, timeout_s)
        assert reached is not None
        self.ends: tuple[socket.socket, socket.socket] = (offer.accept(), reached)
        self.read: list[Message] = []
        taken = take(reached, PACKING, CAPACITY, NUMBER)
        self.sender = SharedMemorySender(offer.shared.messages, self.ends[0])
        self.receiver = SharedMemoryReceiver(taken.messages, reached, self.read.append)
        self.receiver.begin()
        self.sender.begin()

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
    with pytest.raises(RuntimeError, match=r"exchange\.timeout_s"):
        link.receive()
    for end in link.ends:
        end.close()


def test_an_offer_without_a_taker_ends_too() -> None:
    offer = Offer(PACKING, CAPACITY, NUMBER, timeout_s=0.2)
    address = offer.address
    with pytest.raises(RuntimeError, match=r"exchange\.timeout_s"):
        offer.accept()
    assert connected(address, 1) is None


def test_an_offer_that_is_withdrawn_leaves_nothing() -> None:
    # What earlier tests have left to be collected must not go away meanwhile.
    gc.collect()
    before = set(os.listdir("/proc/self/fd"))
    offer = Offer(PACKING, CAPACITY, NUMBER, timeout_s=1)
    address = offer.address
    # Memory without a name in /dev/shm or elsewhere, which tests beside this one use too.
    assert MAPPED in Path("/proc/self/maps").read_text()
    offer.withdraw()
    assert connected(address, 1) is None
    del offer
    assert MAPPED not in Path("/proc/self/maps").read_text()
    assert set(os.listdir("/proc/self/fd")) == before


def test_processes_of_other_users_get_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    users = iter([os.getuid() + 1, os.getuid()])
    monkeypatch.setattr(shared_memory_link, "_user_of", lambda connection: next(users))
    offer = Offer(PACKING, CAPACITY, NUMBER, timeout_s=10)
    stranger, mate = (connected(offer.address, 10) for _ in range(2))
    assert stranger is not None
    assert mate is not None
    connection = offer.accept()
    assert stranger.recv(1) == b""
    assert len(take(mate, PACKING, CAPACITY, NUMBER).messages) == NUMBER
    for end in (stranger, mate, connection):
        end.close()

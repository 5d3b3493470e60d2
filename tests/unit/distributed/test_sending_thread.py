"""The thread that sends for a GPU rank: order, errors of every kind, and a limit to each wait."""

from __future__ import annotations

import threading

import pytest

from ray_hetero.distributed.sending_thread import SendingThread


def test_messages_are_sent_in_order() -> None:
    sent: list[int] = []
    thread = SendingThread(limit_s=30)
    for number in range(5):
        last = thread.put(lambda number=number: sent.append(number), "a message")  # type: ignore[misc]
    last.wait()
    assert sent == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("error", [RuntimeError("no link"), KeyError("key"), SystemExit("end")])
def test_an_error_of_any_kind_is_told_where_it_is_waited_for(error: BaseException) -> None:
    def fail() -> None:
        raise error

    thread, behind = SendingThread(limit_s=30), threading.Event()
    failed = thread.put(fail, "a step of 3 tokens to rank 2")
    with pytest.raises(RuntimeError, match="a step of 3 tokens to rank 2 was not sent: ") as raised:
        failed.wait()
    assert raised.value.__cause__ is error
    # What would be taken for the message that failed is not sent, and said to have failed too.
    with pytest.raises(RuntimeError, match="the next one was not sent: "):
        thread.put(behind.set, "the next one")
    assert not behind.is_set()


def test_messages_that_wait_behind_one_that_fails_fail_too() -> None:
    go_on, thread, sent = threading.Event(), SendingThread(limit_s=30), threading.Event()

    def fail() -> None:
        go_on.wait(30)
        raise ValueError("lost")

    first, second = thread.put(fail, "the first"), thread.put(sent.set, "the second")
    go_on.set()
    for message, name in ((first, "first"), (second, "second")):
        with pytest.raises(RuntimeError, match=f"the {name} was not sent: lost"):
            message.wait()
    assert not sent.is_set()


def test_the_wait_for_a_message_has_a_limit() -> None:
    never = threading.Event()
    sent = SendingThread(limit_s=0.1).put(lambda: never.wait(30) and None, "a step to rank 1")
    with pytest.raises(RuntimeError, match=r"a step to rank 1 was not sent in 0\.1 s \(exchange"):
        sent.wait()
    never.set()

"""Connections of strangers neither prolong a wait nor stand in the way of the one that is due."""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress

import pytest

from ray_hetero.runtime import unix_sockets

LIMIT_S = 0.5


def test_strangers_do_not_prolong_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unix_sockets, "user_of", lambda connection: os.getuid() + 1)
    over = threading.Event()
    with unix_sockets.unix_socket(LIMIT_S) as listener:
        name = unix_sockets.bind_abstract(listener)

        def knock() -> None:
            while not over.wait(LIMIT_S / 10):
                with unix_sockets.unix_socket(LIMIT_S) as stranger, suppress(OSError):
                    stranger.connect(b"\0" + name)

        thread = threading.Thread(target=knock)
        thread.start()
        # Without a limit for all of them this lasts as long as somebody knocks.
        threading.Timer(5 * LIMIT_S, over.set).start()
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            unix_sockets.accepted(listener)
        took = time.monotonic() - began
        over.set()
        thread.join()
        assert took < 3 * LIMIT_S
        assert listener.gettimeout() == LIMIT_S


def test_many_strangers_may_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    with unix_sockets.unix_socket(LIMIT_S) as listener:
        name = unix_sockets.bind_abstract(listener)
        strangers = [unix_sockets.unix_socket(LIMIT_S) for _ in range(20)]
        for stranger in strangers:
            unix_sockets.connect(stranger, name)
        own = unix_sockets.unix_socket(LIMIT_S)
        unix_sockets.connect(own, name)
        users = iter([os.getuid() + 1] * len(strangers) + [os.getuid()])
        monkeypatch.setattr(unix_sockets, "user_of", lambda connection: next(users))
        with unix_sockets.accepted(listener) as end:
            end.send(b"you")
            assert own.recv(3) == b"you"
        for one in (*strangers, own):
            one.close()


def test_a_full_backlog_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unix_sockets, "BACKLOG", 1)
    with unix_sockets.unix_socket(10) as listener:
        name = unix_sockets.bind_abstract(listener)
        strangers = [unix_sockets.unix_socket(LIMIT_S) for _ in range(2)]
        for stranger in strangers:
            unix_sockets.connect(stranger, name)
        with unix_sockets.unix_socket(LIMIT_S) as late:
            with pytest.raises(
                TimeoutError, match=f"too many connections wait there, for {LIMIT_S}"
            ):
                unix_sockets.connect(late, name)
            threading.Timer(LIMIT_S / 4, listener.accept).start()
            unix_sockets.connect(late, name)
        for stranger in strangers:
            stranger.close()

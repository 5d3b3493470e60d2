"""The thread of a GPU rank that sends messages once the GPU has copied them to the host."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable


class Sent:
    """One message to another stage, on its way.

    Args:
        what: names the message and its receiver in errors.
        limit_s: longest wait for it (exchange.timeout_s).

    """

    def __init__(self, what: str, limit_s: float) -> None:
        self._what = what
        self._limit_s = limit_s
        self._done = threading.Event()
        self._error: BaseException | None = None

    def finish(self, error: BaseException | None = None) -> None:
        """Mark the message as sent, or as failed."""
        self._error = error
        self._done.set()

    def wait(self) -> None:
        """Wait until the message has been sent.

        Raises:
            RuntimeError: sending it failed, or it was not sent in time.

        """
        if not self._done.wait(self._limit_s):
            raise RuntimeError(
                f"{self._what} was not sent in {self._limit_s:g} s (exchange.timeout_s): the GPU "
                "has not computed it, or the receiver has no room"
            )
        if self._error is not None:
            raise RuntimeError(f"{self._what} was not sent: {self._error}") from self._error


class SendingThread:
    """Sends messages in the order in which they are handed over, outside of the caller's thread.

    A message that fails is the last one: those behind it would be taken for it.

    Args:
        limit_s: longest wait for one message (exchange.timeout_s).

    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._work: queue.SimpleQueue[tuple[Callable[[], None], Sent]] = queue.SimpleQueue()
        self._error: BaseException | None = None
        threading.Thread(target=self._run, daemon=True, name="StageBoundarySend").start()

    def put(self, send: Callable[[], None], what: str) -> Sent:
        """Hand a message over.

        Args:
            send: waits for the GPU, and sends.
            what: names the message and its receiver in errors.

        Raises:
            RuntimeError: a message before it was not sent.

        """
        sent = Sent(what, self._limit_s)
        if self._error is not None:
            sent.finish(self._error)
            sent.wait()
        self._work.put((send, sent))
        return sent

    def _run(self) -> None:
        while True:
            send, sent = self._work.get()
            if self._error is None:
                try:
                    send()
                except BaseException as error:  # noqa: BLE001  (raised where it is waited for)
                    self._error = error
            sent.finish(self._error)

"""A `vllm serve` process whose log is kept in a file and read while it starts."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from ray_hetero.cli.serving.start_display import PREFIX, StartDisplay
from ray_hetero.errors import StartupError

STARTED = re.compile(r"Starting vLLM server on (https?)://(\S+):(\d+)")
ANY_HOST = ("0.0.0.0", "[::]", "::")  # noqa: S104
REASON = "ray_hetero"
"""Beginning of the lines in which this package tells the reason of an end."""
LAST_LINES = 30
EVERY_S = 0.25
"""Interval of the questions whether a server answers, in seconds."""
ASK_S = 5.0
"""Longest wait for an answer of a server, in seconds."""
STOP_S = 120.0
"""Longest wait for a server to end after SIGINT, in seconds."""
PR_SET_PDEATHSIG = 1


class ServerProcess:
    """A server that runs until it is stopped, or ends with this process.

    Args:
        command: with its arguments.
        log: file for all of its lines, mode 0600; None keeps none.
        weight_bytes: of the model, for the display of the start; 0 where they are unknown.
        on_line: called from another thread with each line after the start.

    """

    def __init__(
        self,
        command: Sequence[str],
        log: Path | None = None,
        weight_bytes: int = 0,
        on_line: Callable[[str], object] = lambda line: None,
    ) -> None:
        self._last: deque[str] = deque(maxlen=LAST_LINES)
        self._reason = ""
        self._on_line = on_line
        self._display = StartDisplay(weight_bytes)
        self._is_ready = False
        self.address = ""
        """URL of the server on this host, once its log has told it."""
        self._file = None
        if log is not None:
            log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
            self._file = os.fdopen(descriptor, "w", encoding="utf-8")
        # Ctrl-C in a terminal reaches all processes of its group: here it is handed on, once.
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace", start_new_session=True, preexec_fn=_end_with_parent,
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True, name="ServerLog")
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            if self._file is not None:
                self._file.write(line)
                self._file.flush()
            self._last.append(line)
            text = PREFIX.sub("", line)
            if text.startswith(REASON):
                self._reason = text.strip()
            if found := STARTED.search(text):
                host = "127.0.0.1" if found[2] in ANY_HOST else found[2]
                self.address = f"{found[1]}://{host}:{found[3]}"
            if self._is_ready:
                self._on_line(line)
            else:
                self._display.saw(line)

    def wait_until_healthy(self, timeout_s: float = float("inf")) -> float:
        """Wait until `/health` answers; the seconds that it took.

        Args:
            timeout_s: longest wait; the engine's own limits end a start without one.

        Raises:
            StartupError: the server has ended, or the time is over.

        """
        start = time.monotonic()
        try:
            while not self._is_healthy():
                if self.process.poll() is not None:
                    raise StartupError(
                        f"vllm serve ended with status {self.process.returncode}: {self.reason()}"
                    )
                if time.monotonic() - start > timeout_s:
                    raise StartupError(f"no answer from /health in {timeout_s:g} s:\n{self.end()}")
                self._display.tick()
                time.sleep(EVERY_S)
        finally:
            self._display.end()
        self._is_ready = True
        return time.monotonic() - start

    def _is_healthy(self) -> bool:
        if not self.address.startswith("http:"):
            # Its certificate need not be one for this host's address.
            return bool(self.address)
        return fetched(f"{self.address}/health") is not None

    def end(self) -> str:
        """Last lines of the log."""
        self._reader.join(timeout=2)
        return "".join(self._last)

    def reason(self) -> str:
        """Reason of an end: the line in which this package tells it, else the log's last lines."""
        last = self.end()
        return self._reason or f"its last lines are\n{last}"

    def interrupt(self) -> None:
        """Ask the server to end, as Ctrl-C does."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)

    def stop(self, timeout_s: float = STOP_S) -> int:
        """Interrupt the server, if it still runs, and return its exit status.

        Raises:
            StartupError: it did not end in time, and was killed.

        """
        self.interrupt()
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise StartupError(
                f"the server was still there {timeout_s:g} s after SIGINT and was killed:\n"
                f"{self.end()}"
            ) from None


def free_port() -> int:
    """A TCP port of this host that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def fetched(url: str) -> bytes | None:
    """Body of a server's answer with a status of success; None for any other or no answer.

    Args:
        url: on this host, which no proxy leads to.

    """
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=ASK_S) as answer:
            body: bytes = answer.read()
            return body
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return None


def _end_with_parent() -> None:
    """Let the kernel send SIGTERM to the server should this process be killed."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)

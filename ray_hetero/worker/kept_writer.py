"""Files of packed experts, written behind a load in threads that no end of a process waits for.

A folder may belong to several hosts, and its file system may not answer for as long as it likes: so
each file that is being written has a name that no other process gives, and whoever waits for it
does so up to a limit.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from placement.host.sysfs import machine_id
from placement.units import GIB
from ray_hetero.log import logger

ENDING = ".packed"
"""End of a file's name."""
PART = 16 << 20
"""Bytes that have a digest, and are read or written in one go."""
WRITERS = 4
"""Threads that write a file."""
STALL_S = 300.0
"""Seconds in which something has to be written, or what is missing is given up: a disk of 14 MB/s
brings a file of 4 GiB out of the page cache in this time, without a sign of it."""
LEFT_S = 3600.0
"""Seconds after which a file that another host began and did not go on with is removed."""
SAID_S = 10.0
"""Seconds between two lines while others wait."""
_LOOK_S = 0.1
STOP_S = 5.0
"""Seconds for a part to be written when nobody wants the file any more."""
_NOT_THERE = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)
"""Errors of file systems that cannot do what would only be better."""

End = Callable[[list[str]], bytes]
"""Gives the end of a file, of the digests of its parts."""


class _StoppedError(Exception):
    """Nobody wants the file any more."""


class KeptWriter:
    """Writes files one after the other.

    Args:
        folder: of the files.
        until: monotonic clock until which somebody may wait for them.
        limit: what the clock is of, to be said when it has passed.

    """

    def __init__(self, folder: Path, until: float, limit: str) -> None:
        self._folder = folder
        self._until, self._limit = until, limit
        self._asked: queue.SimpleQueue[tuple[Path, list[torch.Tensor], End] | None] = (
            queue.SimpleQueue()
        )
        self._thread: threading.Thread | None = None
        self._stop, self._ended = threading.Event(), threading.Event()
        self._giving_up = threading.Lock()
        self._moved = 0.0
        """Monotonic clock of the last part that was written."""
        self._files, self._kept, self._written, self._wanted = 0, 0, 0, 0

    @property
    def has_failed(self) -> bool:
        """Whether nothing more is written."""
        return self._stop.is_set()

    def add(self, path: Path, parts: list[torch.Tensor], end: End) -> None:
        """Write a file behind the others.

        Args:
            path: its name, which it gets once it is on the disk as a whole.
            parts: uint8, one behind the other; they stay as they are until `finish` has returned.
            end: of the file.

        """
        self._files += 1
        self._wanted += sum(map(len, parts))
        self._asked.put((path, parts, end))
        if self._thread is None:
            self._moved = time.monotonic()
            self._thread = threading.Thread(target=self._run, daemon=True, name="ray_hetero-keep")
            self._thread.start()

    def give_up(self, why: str) -> None:
        """Write nothing more, and say so once."""
        with self._giving_up:
            if self._stop.is_set():
                return
            self._stop.set()
        what = "the packed experts are not kept"
        if self._kept:
            what = f"the packed experts of {self._kept} of {self._files} layers only are kept"
        logger.warning("experts.keep_packed: %s in %s: %s", what, self._folder, why)

    def finish(self, *, is_wanted: bool) -> None:
        """Wait until all is written, and say so; or until the limit.

        Args:
            is_wanted: whether the load has succeeded; otherwise no more than a moment is waited.

        """
        if self._thread is None:
            return
        self._asked.put(None)
        if not is_wanted:
            self._stop.set()
            self._ended.wait(STOP_S)
            return
        began = said = time.monotonic()
        while not self._ended.wait(_LOOK_S):
            now = time.monotonic()
            state = f"{self._written / GIB:.1f} of {self._wanted / GIB:.1f} GiB are written"
            if now - max(self._moved, began) > STALL_S:
                self.give_up(
                    f"nothing was written in {STALL_S:g} s, {state}. See whether the file system "
                    f"answers: stat -f {self._folder}"
                )
                return
            if now > self._until:
                self.give_up(
                    f"it takes longer than {self._limit}, {state}. The next start goes on with it"
                )
                return
            if now - said > SAID_S:
                said = now
                logger.info("experts.keep_packed: %s into %s", state, self._folder)
        if self._kept and not self._stop.is_set():
            logger.info(
                "experts.keep_packed: %.1f GiB of packed experts are kept in %s",
                self._written / GIB, self._folder,
            )  # fmt: skip

    def _run(self) -> None:
        try:
            while (asked := self._asked.get()) is not None:
                if self._stop.is_set():
                    continue
                try:
                    self._write(*asked)
                    self._kept += 1
                except _StoppedError:
                    continue
                except OSError as error:
                    # Without it the engine runs as well.
                    self.give_up(error.strerror or str(error))
        finally:
            self._ended.set()

    def _write(self, path: Path, parts: list[torch.Tensor], end: End) -> None:
        """Write a file under another name, and give it its own once it is on the disk.

        Raises:
            OSError: it cannot be written; nothing is left of it.
            _StoppedError: likewise.

        """
        self._folder.mkdir(parents=True, exist_ok=True)
        other = path.with_name(f"{path.name}.{host_id()}-{os.getpid()}-{secrets.token_hex(4)}.tmp")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        descriptor = os.open(other, flags, 0o600)
        try:
            if not self._kept:
                # By the clock of whoever keeps the files.
                remove_leftovers(self._folder, os.fstat(descriptor).st_mtime)
            size = sum(map(len, parts))
            with _unless_not_there():
                # A disk that has not this much room says so here.
                os.posix_fallocate(descriptor, 0, size)
            last = end(self._put_all(descriptor, list(parts_of(*parts))))
            _write_fully(descriptor, memoryview(last), size)
            os.fsync(descriptor)
            self._moved = time.monotonic()
            if self._stop.is_set():
                raise _StoppedError
            os.replace(other, path)
        except BaseException:
            with contextlib.suppress(OSError):
                other.unlink()
            raise
        finally:
            os.close(descriptor)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            with _unless_not_there():
                os.fsync(folder)
        finally:
            os.close(folder)

    def _put_all(self, descriptor: int, parts: list[tuple[int, torch.Tensor]]) -> list[str]:
        """Write parts in threads, and give their digests."""
        digests, errors, taking = [""] * len(parts), list[OSError](), threading.Lock()
        left = iter(enumerate(parts))

        def work() -> None:
            while not self._stop.is_set() and not errors:
                with taking:
                    found = next(left, None)
                if found is None:
                    return
                number, (begin, part) = found
                try:
                    digests[number] = _put(descriptor, begin, part)
                except OSError as error:
                    errors.append(error)
                    return
                with taking:
                    self._written += len(part)
                self._moved = time.monotonic()

        threads = [threading.Thread(target=work, daemon=True) for _ in range(WRITERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()  # `finish` has the limit
        if errors:
            raise errors[0]
        if not all(digests):
            raise _StoppedError
        return digests


def parts_of(*tensors: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Parts of what lies one behind the other in a file, with their places there."""
    begin = 0
    for tensor in tensors:
        for at in range(0, len(tensor), PART):
            yield begin + at, tensor[at : at + PART]
        begin += len(tensor)


@contextlib.contextmanager
def _unless_not_there() -> Iterator[None]:
    """Go on where a file system cannot do something."""
    try:
        yield
    except OSError as error:
        if error.errno not in _NOT_THERE:
            raise


def _put(descriptor: int, begin: int, part: torch.Tensor) -> str:
    """Write a part, and give its digest."""
    content = part.numpy()
    _write_fully(descriptor, memoryview(content), begin)
    return hashlib.sha256(content).hexdigest()


def _write_fully(descriptor: int, view: memoryview, begin: int) -> None:
    while view:
        written = os.pwrite(descriptor, view, begin)
        view, begin = view[written:], begin + written


def host_id() -> str:
    """Name of a PID namespace of a machine: equal for processes that see each other's numbers."""
    numbers = os.stat("/proc/self/ns/pid").st_ino
    return hashlib.sha256(f"{machine_id()} {numbers}".encode()).hexdigest()[:8]


def remove_leftovers(folder: Path, now: float) -> None:
    """Remove what processes have begun to write and do not go on with.

    Args:
        folder: where it lies.
        now: in seconds, by the clock of the folder's file system.

    """
    for path in folder.glob(f"*{ENDING}.*.tmp"):
        host, _, more = path.name.split(".")[-2].partition("-")
        process = more.partition("-")[0]
        # Other hosts cannot be asked for their processes.
        is_gone = host == host_id() and process.isdigit() and not Path("/proc", process).exists()
        with contextlib.suppress(OSError):
            if is_gone or now - path.stat().st_mtime > LEFT_S:
                path.unlink()

"""Lock files in a directory that other users cannot turn against us; `claims` is built on them."""

from __future__ import annotations

import fcntl
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from placement.errors import ClaimError

DIRECTORY_VARIABLE = "RAY_HETERO_CLAIM_DIR"
MUTEX = "mutex"
MUTEX_TIMEOUT_S = 10.0


def prepare(directory: Path) -> None:
    """Make the directory (mode 0700), or make sure that no other user has planted it.

    Raises:
        ClaimError: it cannot be made, is a symbolic link or belongs to another user than root.

    """
    try:
        with suppress(FileExistsError):
            directory.mkdir(mode=0o700, parents=True)
        found = directory.lstat()
    except OSError as error:
        raise unusable(directory, error) from None
    if not stat.S_ISDIR(found.st_mode):
        raise ClaimError(f"{directory}: expected a directory, not a link or file; {_remedy()}")
    if found.st_uid not in (0, os.getuid()):
        raise ClaimError(f"{directory}: belongs to user {found.st_uid}, not to you; {_remedy()}")


@contextmanager
def mutex(directory: Path, timeout_s: float = MUTEX_TIMEOUT_S) -> Iterator[None]:
    """Held while claims are compared and made, which takes milliseconds.

    Raises:
        ClaimError: another process does not let go of it in time.

    """
    path = directory / MUTEX
    descriptor = open_private(path)
    try:
        _lock_within(path, descriptor, timeout_s)
        yield
    finally:
        os.close(descriptor)


def open_private(path: Path) -> int:
    """Descriptor of a lock file, made if needed with the permissions of its directory.

    Raises:
        ClaimError: it cannot be opened, or is a symbolic link.

    """
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        # Two steps: in a sticky directory the kernel refuses O_CREAT on another user's file.
        with suppress(FileNotFoundError):
            return os.open(path, flags)
        with suppress(FileExistsError):
            descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
            os.fchmod(descriptor, path.parent.stat().st_mode & 0o666)
            return descriptor
        return os.open(path, flags)
    except OSError as error:
        raise unusable(path, error) from None


def unusable(path: Path, error: OSError) -> ClaimError:
    """The error for a file or directory that the system refuses."""
    return ClaimError(f"{path}: cannot be used for claims: {error.strerror}; {_remedy()}")


def _lock_within(path: Path, descriptor: int, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        with suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        if time.monotonic() > deadline:
            raise ClaimError(
                f"{path}: locked by another process for {timeout_s:g} s; is it stopped? "
                f"`fuser {path}` names it"
            )
        time.sleep(0.01)


def _remedy() -> str:
    return f"set {DIRECTORY_VARIABLE} to a directory on this host that you may write to"

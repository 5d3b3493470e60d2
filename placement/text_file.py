"""Text files that people write, in whatever language, and how much of a file is read at most."""

from __future__ import annotations

import os
from pathlib import Path

MOST_BYTES = 1 << 20
"""Limit of a configuration or a description of machines; the largest known has a few kilobytes."""
_AT_ONCE = 1 << 20


class FileError(ValueError):
    """The file cannot be read, is not in its language, or has no single meaning."""


class MissingFileError(FileError):
    """There is no such file."""


def read_bytes(path: str | Path, most: int) -> bytes:
    """Content of a file of limited size; a pipe is read to its end, one without a writer is empty.

    Args:
        path: the file.
        most: limit of its size in bytes.

    Raises:
        MissingFileError: there is none.
        FileError: it cannot be read, or is larger, like /dev/zero.

    """
    parts: list[bytes] = []
    left = most + 1
    try:
        with open(path, "rb", buffering=0, opener=_without_waiting) as file:
            while left and (part := file.read(min(left, _AT_ONCE))):
                parts.append(part)
                left -= len(part)
    except FileNotFoundError as error:
        raise MissingFileError(f"the file cannot be read: {error.strerror}") from None
    except OSError as error:
        raise FileError(f"the file cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise FileError(f"the file cannot be read: {error}") from None
    if not left:
        raise FileError(f"the file has more than {most:,} bytes; is it the right one?")
    return b"".join(parts)


def _without_waiting(path: str, flags: int) -> int:
    """Open a file; a pipe that nobody writes into would be waited for otherwise."""
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    os.set_blocking(descriptor, True)
    return descriptor


def read_text(path: str | Path, most: int = MOST_BYTES) -> str:
    """Content of a file in UTF-8.

    Args:
        path: the file.
        most: limit of its size in bytes.

    Raises:
        MissingFileError: there is none.
        FileError: it cannot be read, is larger, or is not in UTF-8.

    """
    try:
        return read_bytes(path, most).decode("utf-8")
    except UnicodeDecodeError as error:
        raise FileError(f"the file cannot be read: not in UTF-8: {error.reason} at byte "
                        f"{error.start:,}") from None  # fmt: skip

"""Text files that people write, in whatever language."""

from __future__ import annotations

from pathlib import Path


class FileError(ValueError):
    """The file cannot be read, is not in its language, or has no single meaning."""


def read_text(path: str | Path) -> str:
    """Content of a file in UTF-8.

    Raises:
        FileError: it cannot be read.

    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise FileError(f"the file cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise FileError(f"the file cannot be read: {error}") from None

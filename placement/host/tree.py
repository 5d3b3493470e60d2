"""Small files of /sys and /proc below a root that tests can choose, with errors that name them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from placement.errors import TopologyError
from placement.given import file_shown, shown
from placement.host.cpulist import parse_cpulist
from placement.text_file import FileError, MissingFileError, read_bytes

MOST_BYTES = 1 << 26
"""Limit of a file; /proc/cpuinfo has 12 MB on a machine with 8,192 CPUs."""
MOST_DIGITS = 20
"""Limit of a number; the kernel writes up to 2^64."""


@dataclass(frozen=True)
class Tree:
    """A directory that stands for `/`."""

    root: Path

    def exists(self, path: str) -> bool:
        """Whether the file or directory is there and may be looked at."""
        try:
            return (self.root / path).exists()
        except OSError:
            return False

    def find_text(self, path: str) -> str | None:
        """Content of a file; None if it is not there.  Raises TopologyError if unreadable."""
        try:
            return read_bytes(self.root / path, MOST_BYTES).decode(errors="replace")
        except MissingFileError:
            return None
        except FileError as error:
            raise TopologyError(f"{self._shown(path)}: {error}") from None

    def text(self, path: str) -> str:
        """Content of a file that must be there."""
        content = self.find_text(path)
        if content is None:
            raise TopologyError(f"{self._shown(path)}: expected a file, found none")
        return content

    def find_integer(self, path: str) -> int | None:
        """A file with one integer; None if it is not there."""
        content = self.find_text(path)
        if content is None:
            return None
        number = integer(content.strip().removeprefix("-"))
        if number is None:
            raise self.wrong(path, "one integer", content)
        return -number if content.strip().startswith("-") else number

    def find_list(self, path: str) -> tuple[int, ...] | None:
        """A file with a list such as 0-3,8; None if it is not there."""
        content = self.find_text(path)
        return None if content is None else self.parse_list(path, content)

    def parse_list(self, path: str, content: str) -> tuple[int, ...]:
        """Numbers of a list such as 0-3,8 that stood in the file."""
        try:
            return parse_cpulist(content)
        except ValueError as error:
            raise self.wrong(path, f"a list such as 0-3,8 ({error})", content) from None

    def wrong(self, path: str, expected: str, content: str) -> TopologyError:
        """The error for a file whose content is not what the kernel writes there."""
        return TopologyError(
            f"{self._shown(path)}: expected {expected}, found {shown(content.strip())}"
        )

    def _shown(self, path: str) -> str:
        return file_shown(self.root / path)


def integer(text: str) -> int | None:
    """The number that these digits are, of at most `MOST_DIGITS`; None for any other text."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= MOST_DIGITS else None


def one_line(text: str) -> str:
    """A name that the system gives, cut where it is long, with what cannot be printed escaped."""
    return file_shown(text.strip())

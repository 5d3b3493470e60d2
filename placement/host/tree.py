"""Small files of /sys and /proc below a root that tests can choose, with errors that name them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from placement.errors import TopologyError
from placement.host.cpulist import parse_cpulist


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
            return (self.root / path).read_text(errors="replace")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise TopologyError(f"{self.root / path}: cannot be read: {error.strerror}") from None

    def text(self, path: str) -> str:
        """Content of a file that must be there."""
        content = self.find_text(path)
        if content is None:
            raise TopologyError(f"{self.root / path}: expected a file, found none")
        return content

    def find_integer(self, path: str) -> int | None:
        """A file with one integer; None if it is not there."""
        content = self.find_text(path)
        if content is None:
            return None
        try:
            return int(content)
        except ValueError:
            raise self.wrong(path, "one integer", content) from None

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
        shown = content.strip()
        if len(shown) > 60:
            shown = shown[:60] + "…"
        return TopologyError(f"{self.root / path}: expected {expected}, found {shown!r}")

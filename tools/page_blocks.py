"""A part of a page that a tool writes, between two marks; the text around it is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |"
                     for line in lines)  # fmt: skip


def replaced(page: str, begin: str, end: str, content: str) -> str:
    """A page with what is between two marks written anew.

    Raises:
        ValueError: the page has lost one of the marks.

    """
    before, found_begin, rest = page.partition(begin)
    _, found_end, after = rest.partition(end)
    if not (found_begin and found_end):
        raise ValueError(f"expected the lines {begin!r} and {end!r} in the page")
    return f"{before}{begin}\n\n{content}\n\n{end}{after}"


def rewrite(page: Path, written: Callable[[str], str]) -> None:
    """Write a page anew.

    Args:
        page: its file.
        written: function that gives the page's text from the one that it has.

    """
    page.write_text(written(page.read_text(encoding="utf-8")), encoding="utf-8")

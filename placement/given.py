"""A user's input as error messages show it: on one line, and short whatever it was."""

from __future__ import annotations

import reprlib

MOST_PROBLEMS = 10
MOST_LETTERS = 200
"""Limit of a value in a message."""


class _Short(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 3
        self.maxlist = self.maxtuple = self.maxset = self.maxdict = 6
        self.maxstring = self.maxother = 160
        self.maxlong = 40


_SHORT = _Short()


def shown(value: object) -> str:
    """The value as Python writes it, cut where it is long or deep."""
    try:
        text = _SHORT.repr(value)
    except ValueError:
        # Python writes no whole number of more than 4300 digits.
        return "a number of thousands of digits"
    return text if len(text) <= MOST_LETTERS else f"{text[: MOST_LETTERS - 2]} …"


def file_shown(path: object) -> str:
    """A path as it is, cut in the middle where it is long; line breaks and the like are escaped."""
    text = str(path)
    text = text if text.isprintable() else repr(text)[1:-1]
    half = MOST_LETTERS // 2
    return text if len(text) <= 2 * MOST_LETTERS else f"{text[:half]} … {text[-half:]}"


def key_of(parts: tuple[object, ...]) -> str:
    """A key by its sections, like cpu.cores; line breaks and the like are escaped."""
    names = (str(part) if str(part).isprintable() else shown(str(part)) for part in parts)
    return ".".join(name if len(name) <= _SHORT.maxstring else shown(name) for name in names)


def numbers(text: str) -> tuple[int, ...] | None:
    """Whole numbers with commas between them; None for a text that is anything else."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        return None


def listed(problems: list[str]) -> str:
    """Problems with semicolons between them; the first few where there are many."""
    rest = len(problems) - MOST_PROBLEMS
    return "; ".join(problems[:MOST_PROBLEMS]) + (f"; and {rest} more" if rest > 0 else "")

"""Modules that a quantised checkpoint's config.json leaves alone.

A list names modules, parts of their names, or has expressions behind `re:`.  Expressions come with
a checkpoint, from whoever wrote it, and some take for ever to fail: all of them together get a
limited time, which Python's own `re` cannot do.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import regex

from placement.given import shown
from placement.model.config import UnknownModelError

MATCHING_SECONDS = 5.0
"""Limit of processor time for all expressions and modules of a model; known ones take 0.01 s."""
MOST_LETTERS = 1000
"""Limit of one expression."""


@dataclass(frozen=True)
class Ignored:
    """The entries of a list; ask soon, as the time for expressions runs from its reading on."""

    names: frozenset[str]
    expressions: tuple[tuple[str, Any], ...]
    """Entries with the expressions in them."""
    deadline: float
    """End of the time for expressions, by `time.process_time`."""

    def has(self, module: str) -> bool:
        """Whether an entry is that module, whole parts of its name, or matches its beginning.

        Raises:
            UnknownModelError: an expression takes too long.

        """
        if not self.names.isdisjoint(_parts(module)):
            return True
        return any(self._matches(entry, one, module) for entry, one in self.expressions)

    def _matches(self, entry: str, expression: Any, module: str) -> bool:
        try:
            if (left := self.deadline - time.process_time()) <= 0:
                raise TimeoutError
            return expression.match(module, timeout=left) is not None
        except TimeoutError:
            raise UnknownModelError(
                f"quantization_config: comparing {shown(entry)} with the names of the modules "
                f"takes longer than {MATCHING_SECONDS:g} s; expected an expression without "
                "repeats in repeats; correct it in config.json, or plan from the checkpoint's "
                "safetensors files"
            ) from None


def ignored_from(entries: Sequence[str]) -> Ignored:
    """Read a list.

    Raises:
        UnknownModelError: an expression is none, or is too long.

    """
    written = [entry for entry in entries if entry.startswith("re:")]
    return Ignored(
        frozenset(entries) - set(written),
        tuple((entry, _compiled(entry)) for entry in dict.fromkeys(written)),
        time.process_time() + MATCHING_SECONDS,
    )


def _compiled(entry: str) -> Any:
    if len(entry) > MOST_LETTERS:
        raise UnknownModelError(
            f"quantization_config: {shown(entry)} has {len(entry):,} letters, at most "
            f"{MOST_LETTERS:,} are read"
        )
    try:
        return regex.compile(entry.removeprefix("re:"))
    except (regex.error, RecursionError, OverflowError) as error:
        raise UnknownModelError(
            f"quantization_config: {shown(entry)} is no regular expression: {error}"
        ) from None


def _parts(module: str) -> Iterator[str]:
    """Runs of whole parts of a name: `a.b` has `a`, `a.b` and `b`."""
    parts = module.split(".")
    for start in range(len(parts)):
        for end in range(start + 1, len(parts) + 1):
            yield ".".join(parts[start:end])

"""Errors on the command line: whole words in each row of a terminal, one line each elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def print_problem(problem: Exception, console: Console | None = None) -> None:
    """Print what is wrong.

    Args:
        problem: with a message for people.
        console: standard error without.

    """
    from rich.console import Console
    from rich.text import Text

    to = console or Console(stderr=True, highlight=False)
    to.print(Text(f"ray-hetero: {problem}"), soft_wrap=not to.is_terminal)

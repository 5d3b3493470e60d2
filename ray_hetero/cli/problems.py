"""Errors on the command line: whole words in each row of a terminal, one line each elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ray_hetero.errors import ConfigError

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


def write_picture(path: Path, text: str) -> None:
    """Write the file that `--svg` names.

    Raises:
        ConfigError: it cannot be written.

    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--svg {path}: the file cannot be written: {error.strerror}") from None

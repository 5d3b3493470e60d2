"""One row of what this backend cannot do: what is refused, when, why, and what to do instead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from ray_hetero.errors import UnsupportedError

Asked = TypeVar("Asked")
"""Type that a refusal looks at: arguments of vLLM's, or a part of its configuration."""


@dataclass(frozen=True)
class Refusal(Generic[Asked]):
    """One thing that does not work."""

    option: str
    """Option that is refused; `{found}` stands for what was asked for."""
    is_asked: Callable[[Asked], object]
    """Function that returns what was asked for; nothing, or something false, where it was not."""
    why: str
    instead: str = "Leave it out."
    seen: str = ""
    """Result of trying the option, for the compatibility page."""

    def check(self, asked: Asked) -> None:
        """Raise if it is asked for.

        Raises:
            UnsupportedError: says what, why, and what to do instead.

        """
        if found := self.is_asked(asked):
            what = self.option.format(found=found)
            raise UnsupportedError(
                f"{what} does not work with ray_hetero: {self.why}. {self.instead}"
            )


def refuse_first(rows: Sequence[Refusal[Asked]], asked: Asked) -> None:
    """Raise for the first row of a table that applies.

    Args:
        rows: such as `MODELS_OF_CPU_RANKS`.
        asked: what they look at.

    Raises:
        UnsupportedError: one applies.

    """
    for refusal in rows:
        refusal.check(asked)

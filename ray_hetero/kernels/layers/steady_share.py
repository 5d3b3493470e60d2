"""The share of decode steps that a GPU computes, from one step to the next."""

from __future__ import annotations

from ray_hetero.kernels.layers.decode_shares import Share

STEPS = 4
"""Steps one after the other that want another share before it is taken.

The weights of another share's columns all come anew, which takes as long as one or two steps.
Where the number of requests goes back and forth between two sizes, each step would have them come.
"""


class SteadyShare:
    """The share that steps take, which those of a few more or fewer tokens do not change."""

    def __init__(self) -> None:
        self._last: Share | None = None
        self._others = 0
        """Steps up to now, one after the other, that wanted another share than they took."""

    def following(self, wanted: Share) -> Share:
        """The share that the next step takes.

        Args:
            wanted: what was measured for its tokens.

        """
        last = self._last
        if last is None or not wanted.columns:
            return wanted
        is_other = wanted.columns != last.columns
        return last if is_other and self._others + 1 < STEPS else wanted

    def interrupt(self) -> None:
        """Have the next step take the share that it wants: its weights have to come anew anyway."""
        self._last, self._others = None, 0

    def take(self, wanted: Share) -> Share:
        """Begin a step; the share that it takes, argument as of `following`."""
        taken = self.following(wanted)
        self._others = self._others + 1 if taken.columns != wanted.columns else 0
        self._last = taken
        return taken

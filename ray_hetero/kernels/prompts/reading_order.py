"""The order in which steps use pieces of weights, so that the next ones come ahead of their use."""

from __future__ import annotations

from collections.abc import Callable

from ray_hetero.kernels.prompts.weight_pieces import Piece


class ReadingOrder:
    """The order in which steps of one kind use pieces, as the last one of them did.

    Steps of different kinds use different pieces, each with other ones after it; in one order for
    all, each step would be taken for a step of the kind before it.
    """

    def __init__(self) -> None:
        self._after: dict[Piece, Piece] = {}
        self._marks_first = False
        self._end: Piece | None = None
        """First piece of the last step, where nothing is to come behind its last one."""
        self.last: Piece | None = None
        """The one that was used last; None where what comes next does not follow it."""

    def begin(self, *, goes_round: bool) -> None:
        """Begin a step.

        Args:
            goes_round: whether what a step uses first comes behind what this one uses last.

        """
        # Until its first piece is used, that comes behind the last one of the step before.
        self._marks_first, self._end = not goes_round, None

    def use(self, piece: Piece) -> None:
        """Note that a piece is used, after the last one."""
        if self._marks_first:
            self._end, self._marks_first = piece, False
        if self.last is not None:
            self._after[self.last] = piece
        self.last = piece

    def after(
        self, piece: Piece, but: Callable[[Piece], bool] = lambda piece: False
    ) -> Piece | None:
        """What was used after a piece the last time, if anything was.

        Args:
            piece: a piece of this order.
            but: says which pieces are passed over.

        """
        following = self._after.get(piece)
        for _ in self._after:
            if following is None or following is self._end:
                return None
            if not but(following):
                return following
            following = self._after.get(following)
        return None

    def interrupt(self) -> None:
        """Have what comes next follow nothing; all that is known stays."""
        self.last = None

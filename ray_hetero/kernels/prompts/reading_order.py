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
        self._first: Piece | None = None
        """Piece that the last step began with."""
        self._begins = False
        self._goes_round = True
        self.last: Piece | None = None
        """The one that was used last; None where what comes next does not follow it."""

    def begin(self, *, goes_round: bool) -> None:
        """Begin a step.

        Args:
            goes_round: whether what a step uses first comes behind what this one uses last.

        """
        self._begins, self._goes_round = True, goes_round

    def use(self, piece: Piece) -> None:
        """Note that a piece is used, after the last one."""
        if self._begins:
            self._first, self._begins = piece, False
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
        following = self._next(piece)
        for _ in self._after:
            if following is None or not but(following):
                return following
            following = self._next(following)
        return None

    def _next(self, piece: Piece) -> Piece | None:
        following = self._after.get(piece)
        # What comes before the first piece of a step is still that step's.
        ends = not self._goes_round and not self._begins and following is self._first
        return None if ends else following

    def interrupt(self) -> None:
        """Have what comes next follow nothing; all that is known stays."""
        self.last = None

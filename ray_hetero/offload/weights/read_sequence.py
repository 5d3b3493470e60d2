"""The order in which steps use pieces of weights, so that the next ones come ahead of their use."""

from __future__ import annotations

from collections.abc import Callable

from ray_hetero.offload.weights.weight_pieces import Piece


class ReadSequence:
    """The order in which steps of one kind use pieces, as the last one of them did.

    Steps of different kinds use different pieces, each with other ones after it; in one order for
    all, each step would be taken for a step of the kind before it.
    """

    def __init__(self) -> None:
        self._after: dict[Piece, Piece] = {}
        self.last: Piece | None = None
        """The one that was used last; None before the first."""

    def use(self, piece: Piece) -> None:
        """Note that a piece is used, after the last one."""
        if self.last is not None:
            self._after[self.last] = piece
        self.last = piece

    def after(
        self, piece: Piece, but: Callable[[Piece], bool] = lambda piece: False
    ) -> Piece | None:
        """Piece that was used after another one the last time, if any was.

        Args:
            piece: a piece of this order.
            but: says which pieces are passed over.

        """
        following = self._after.get(piece)
        for _ in self._after:
            if following is None:
                return None
            if not but(following):
                return following
            following = self._after.get(following)
        return None

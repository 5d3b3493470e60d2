"""The rank of another stage that a stage boundary talks to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist


@dataclass(frozen=True)
class Neighbour:
    """The rank at the other end of a stage boundary."""

    rank: int
    """Global rank of the neighbour."""
    group: dist.ProcessGroup
    """Gloo group with both ranks in it."""

    def tell(self, what: Any) -> None:
        """Send the neighbour something that can be pickled.

        Raises:
            RuntimeError: the neighbour is late (the group's own limit), or has ended.

        """
        dist.send_object_list([what], dst=self.rank, group=self.group)

    def hear(self) -> Any:
        """Receive what the neighbour tells.

        Raises:
            RuntimeError: the neighbour is late (the group's own limit), or has ended.

        """
        heard: list[Any] = [None]
        dist.recv_object_list(heard, src=self.rank, group=self.group)
        return heard[0]


@dataclass(frozen=True)
class Neighbours:
    """The ranks of other stages that one rank of a pipeline exchanges with.

    Stages may have different numbers of ranks.  Every rank of a stage has whole hidden states, so
    a rank receives from one rank of the previous stage, and sends to as many ranks of the next
    stage as look to it: to none where the next stage has fewer ranks, to several where it has more.
    """

    stages: int
    """Stages of the pipeline."""
    previous: Neighbour | None = None
    """The rank that this rank receives from; None on the first stage."""
    following: tuple[Neighbour, ...] = ()
    """The ranks that this rank sends to; none on the last stage."""

    @classmethod
    def in_line(
        cls,
        group: dist.ProcessGroup,
        ranks: Sequence[int],
        stage: int,
        receivers: Sequence[int] | None = None,
    ) -> Neighbours:
        """The neighbours in a pipeline of one rank a stage.

        Args:
            group: Gloo group of the pipeline's ranks.
            ranks: their global ranks, by stage.
            stage: this rank's.
            receivers: ranks of the next stage that this rank sends to, where the stages differ in
                size; None is the next one of `ranks`.

        """
        before = Neighbour(ranks[stage - 1], group) if stage > 0 else None
        following = ranks[stage + 1 : stage + 2] if receivers is None else receivers
        return cls(len(ranks), before, tuple(Neighbour(rank, group) for rank in following))

"""An expert rank that serves whatever another process has written into their memory."""

from __future__ import annotations

import os
import socket
from types import SimpleNamespace

import torch

from ray_hetero.distributed.expert_meeting import Reached
from ray_hetero.distributed.expert_memory import Geometry, HandoverMemory, RemoteLayer, native
from ray_hetero.distributed.expert_service import ExpertService, HeldLayer

LAYERS = (RemoteLayer("native", 8, 2), RemoteLayer("python", 4, 3))
RANKS, OWN, TOKENS = 2, 0, 5
WORDS = 2 + 3 * RANKS
"""A word that says that the channel has failed, then requests, answers and counts, and one that
says which rows are no drafts."""
OTHERS = [0, *(1 + kind * RANKS + 1 - OWN for kind in range(3)), WORDS - 1]
"""Words that are not this expert rank's to change."""
NONE_OF = ("a request of layer", "a token of expert")
"""Beginnings of the errors that name what is none of what was agreed on."""


def _computed(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return x * (weights * ids).sum(1, keepdim=True).to(x.dtype)


class ExpertRank:
    """One of two expert ranks, of which one layer is computed natively and one in Python."""

    def __init__(self) -> None:
        self._native = native()
        echo = SimpleNamespace(function=self._native.ECHO, context=0, with_team=0)
        first, second = (
            HeldLayer(layer.hidden, torch.bfloat16, _computed, count=8) for layer in LAYERS
        )
        self._layers = {
            "native": HeldLayer(first.hidden, first.dtype, first.compute, call=echo, count=8),
            "python": second,
        }
        geometry = Geometry.of(LAYERS, ranks=RANKS, tokens=TOKENS, dtype=torch.bfloat16)
        descriptor = HandoverMemory.made(geometry)
        self._memory = HandoverMemory(descriptor, geometry)
        os.close(descriptor)
        self._ours, self._theirs = socket.socketpair()
        self._sender = self._native.Sender(self._memory.memory.data_ptr(), RANKS)

    def serve(self, content: bytes) -> str:
        """Serve once what a sender may have written.

        Args:
            content: first the words, 4 bytes each, then the experts of tokens, their weights, and
                the tokens, as far as it goes.

        Returns:
            "answered", "idle", or what ends the expert rank.

        """
        words, x, ids, weights, *_ = self._memory.parts
        self._memory.memory.zero_()
        given = torch.frombuffer(bytearray(content) or bytearray(1), dtype=torch.uint8)
        for at, word in enumerate(given[: 4 * WORDS].split(4)):
            words[self._native.WORD_BYTES * at :][: len(word)] = word
        rest, step = given[4 * WORDS :], 4 * TOKENS * 3
        for part, values in ((ids, rest), (weights, rest[step:]), (x, rest[2 * step :])):
            part[: len(values)] = values[: len(part)]
        before = self._all_words()
        service = ExpertService(self._layers, OWN)
        service.add(Reached(self._memory, LAYERS, self._ours))
        try:
            while asked := service._receiver.serve(0.0):
                service._compute(*asked)
        except RuntimeError as error:
            if not str(error).startswith(NONE_OF):
                raise
            return str(error)
        finally:
            after = self._all_words()
            assert [after[at] for at in OTHERS] == [before[at] for at in OTHERS]
            self._sender.owing()
        return "answered" if before[1 + OWN] else "idle"

    def _all_words(self) -> list[int]:
        words = self._memory.parts[0].view(torch.int32)
        return words[:: self._native.WORD_BYTES // 4][:WORDS].tolist()

    def close(self) -> None:
        """Close the connection."""
        self._ours.close()
        self._theirs.close()

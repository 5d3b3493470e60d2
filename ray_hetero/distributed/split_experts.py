"""Experts of a layer that the expert ranks compute while GPUs compute the others."""

from __future__ import annotations

from typing import Any

import torch

from ray_hetero.distributed.expert_channel import ExpertChannel
from ray_hetero.offload.weights.link_reader import current


class OtherExperts:
    """Handover of a layer some of whose experts the stage's GPUs compute.

    Tokens and sums go through a stream of their own: the stream of the products would wait for the
    sockets between two pieces of weights, where they have no room for all tokens at once.

    Args:
        device: the GPU; for tests the CPU, which does one thing after the other.
        channel: to the expert ranks.

    """

    def __init__(self, device: torch.device, channel: ExpertChannel) -> None:
        self._module: Any = torch.cuda if device.type == "cuda" else torch.cpu
        self._channel = channel
        # Before the products' kernels, which fill the GPU: what is written is little.
        self._stream = self._module.Stream(priority=-1)
        self._given, self._summed = self._module.Event(), self._module.Event()
        self._ids: torch.Tensor | None = None

    def begin(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        layer: int,
        is_here: torch.Tensor,
    ) -> None:
        """Hand tokens over without the experts that GPUs compute.

        Args:
            x: [M, hidden]; like the others unchanged until `sums` of the same.
            weights: [M, chosen].
            ids: [M, chosen]; a negative one is none.
            layer: its number.
            is_here: [experts of the layer], whether a GPU computes each.

        """
        self._ids = ids.masked_fill(is_here[ids.clamp(min=0)], -1)
        self._given.record(self._module.current_stream())
        with current(self._stream):
            self._stream.wait_event(self._given)
            self._channel.begin(x, weights, self._ids, layer)

    def sums(self, x: torch.Tensor, weights: torch.Tensor, layer: int) -> torch.Tensor:
        """Sums [M, hidden] of these experts, for which the products' stream waits from here on.

        Raises:
            RankError: an expert rank is late; on a GPU that is known behind the step only.
            torch.distributed.DistNetworkError: an expert rank has ended; as above.

        """
        assert self._ids is not None, "they were handed over"
        with current(self._stream):
            found = self._channel.sums(x, weights, self._ids, layer)
            self._summed.record(self._stream)
        # What lies in memory of this stream is not given away before that: `begin` waits for it.
        self._module.current_stream().wait_event(self._summed)
        return found

"""An expert rank's end of the handover: layers of experts, and the loop that computes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ray_hetero.distributed.expert_meeting import Reached
from ray_hetero.distributed.expert_memory import (
    ROUTE_BYTES,
    RemoteLayer,
    TokenViews,
    native,
)
from ray_hetero.errors import AgreementError
from ray_hetero.kernels.experts.routed_experts import RoutedExperts

TURN_SECONDS = 1.0
"""Seconds that the native loop goes on before it lets Python look at signals."""
Compute = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Sums [M, hidden] from tokens [M, hidden], weights and ids [M, chosen]."""


@dataclass(frozen=True)
class HeldLayer:
    """The experts of a layer that this rank holds its slices of."""

    hidden: int
    """Size of a token."""
    dtype: torch.dtype
    """Data type of tokens and sums."""
    compute: Compute
    call: Any = None
    """The native `ExpertCall` that computes the same without Python; None where there is none."""
    experts: RoutedExperts | None = None
    """Kernels that compute the experts here; None where vLLM's kernel does."""
    chosen: int = 0
    """Experts of a token."""
    count: int = 0
    """Experts of the layer; 0 where it is not known, and slots for it are not counted."""


class ExpertService:
    """All channels of an expert rank.

    Args:
        layers: by vLLM's name.
        number: of this rank among the expert ranks.

    """

    def __init__(self, layers: Mapping[str, HeldLayer], number: int) -> None:
        self._layers = layers
        self._number = number
        calls = [held.call for held in layers.values() if held.call is not None]
        # All of one module, whose threads they compute with.
        self._receiver = native().Receiver(calls[0].with_team if calls else 0)
        self._computed: list[Sequence[tuple[HeldLayer, TokenViews]]] = []
        self._channels: list[Reached] = []

    def add(self, reached: Reached) -> None:
        """Serve a channel.

        Raises:
            AgreementError: it asks for a layer that is not here, or has other sizes.

        """
        geometry = reached.memory.geometry
        found = []
        for layer in reached.layers:
            held = self._layers.get(layer.name)
            if held is None or (held.hidden, held.dtype) != (layer.hidden, geometry.dtype):
                here = "none of that name" if held is None else f"{held.dtype} of {held.hidden}"
                raise AgreementError(
                    f"experts of {layer.name}: a stage hands over {geometry.dtype} of "
                    f"{layer.hidden}, this expert rank holds {here}"
                )
            found.append((held, TokenViews.of(geometry, layer, reached.memory.parts)))
        words, x, ids, weights, *results = reached.memory.parts
        self._receiver.add(
            memory=words.data_ptr(),
            ranks=geometry.ranks,
            rank=self._number,
            connection=reached.connection.fileno(),
            x=x.data_ptr(),
            ids=ids.data_ptr(),
            weights=weights.data_ptr(),
            y=results[self._number].data_ptr(),
            capacity=geometry.capacity,
            elements=min(x.nbytes, results[self._number].nbytes) // geometry.dtype.itemsize,
            routes=min(ids.nbytes, weights.nbytes) // ROUTE_BYTES,
            layers=[
                (*_function_of(held), layer.hidden, layer.chosen, held.count)
                for (held, _), layer in zip(found, reached.layers, strict=True)
            ],
        )
        self._computed.append(found)
        self._channels.append(reached)

    @property
    def totals(self) -> dict[str, Any]:
        """Totals of all steps so far: steps, tokens, layers, layer_tokens, experts,
        computing_s, waiting_s; and the fields of `StepTotals` whose names begin with slot_."""
        found: dict[str, Any] = self._receiver.totals
        return found

    @property
    def layers(self) -> Sequence[tuple[RemoteLayer, int]]:
        """Layers of all channels in the order of their numbers, each with its experts."""
        return [
            (layer, held.count)
            for reached, found in zip(self._channels, self._computed, strict=True)
            for layer, (held, _) in zip(reached.layers, found, strict=True)
        ]

    def keep_routes(self) -> None:
        """Keep the experts that tokens of small steps choose, for `take_routes`."""
        self._receiver.keep_routes()

    def take_routes(self, *, close: bool) -> tuple[bytes, int]:
        """Take the records since the last call, and the number of those there was no room for.

        Args:
            close: whether to keep none from now on.

        """
        found: tuple[bytes, int] = self._receiver.take_routes(close)
        return found

    def serve(self) -> None:
        """Compute what comes, until a sender ends.

        Raises:
            torch.distributed.DistNetworkError: a rank of a stage has ended.
            RuntimeError: a layer cannot be computed.

        """
        while True:
            try:
                asked = self._receiver.serve(TURN_SECONDS)
            except IndexError:
                raise dist.DistNetworkError(
                    "a rank that hands tokens over has closed the connection"
                ) from None
            if asked is not None:
                self._compute(*asked)

    def _compute(self, channel: int, layer: int, tokens: int) -> None:
        held, views = self._computed[channel][layer]
        with torch.inference_mode():
            sums = held.compute(views.x[:tokens], views.weights[:tokens], views.ids[:tokens])
            views.results[self._number][:tokens].copy_(sums)
        self._receiver.finish(channel)


def _function_of(held: HeldLayer) -> tuple[int, int]:
    """Address of the native function of a layer, and its context; zeros where Python computes."""
    return (0, 0) if held.call is None else (held.call.function, held.call.context)

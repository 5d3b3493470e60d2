"""What expert ranks hold, and what the stages of the same engine do not."""

from __future__ import annotations

from dataclasses import replace

from placement.errors import DoesNotFitError
from placement.model.shape import ModelShape
from placement.model.tensors import Layer
from placement.units import GIB
from ray_hetero.config import ExpertsConfig
from ray_hetero.world import World


def first_remote_layer(experts: ExpertsConfig, layers: int) -> int:
    """The first of a model's layers whose experts lie on expert ranks.

    Args:
        experts: how many layers those are.
        layers: decoder layers of the model.

    """
    return 0 if experts.layers == "all" else max(0, layers - experts.layers)


def shape_of_stages(shape: ModelShape, experts: ExpertsConfig) -> ModelShape:
    """The model without the experts that expert ranks hold."""
    if not experts.ranks:
        return shape
    first = first_remote_layer(experts, len(shape.layers))
    return replace(
        shape,
        layers=tuple(
            layer if layer.index < first else _without_experts(layer) for layer in shape.layers
        ),
    )


def _without_experts(layer: Layer) -> Layer:
    return replace(layer, tensors=tuple(one for one in layer.tensors if one.role != "expert"))


def bytes_of_expert_rank(shape: ModelShape, experts: ExpertsConfig) -> int:
    """Bytes of the experts that one expert rank holds, as the checkpoint has them."""
    if not experts.ranks:
        return 0
    there = sum(layer.nbytes for layer in shape.layers)
    left = sum(layer.nbytes for layer in shape_of_stages(shape, experts).layers)
    return -(-(there - left) // experts.ranks)


def check_room(world: World, needed: int) -> None:
    """Compare what each expert rank will hold with the free memory of its socket.

    Args:
        world: of the engine.
        needed: bytes of one expert rank.

    Raises:
        DoesNotFitError: a socket has less.

    """
    for seat in world.experts:
        free = None if seat.socket is None else seat.socket.free_bytes
        if free is not None and needed > free:
            ranks = len(world.experts)
            raise DoesNotFitError(
                f"{world.describe(seat.rank)} is to hold 1 / {ranks} of the experts, "
                f"{needed / GIB:.1f} GiB, but {free / GIB:.1f} GiB are free there. Leave more of "
                "them to the stages (experts.layers), or take more sockets (experts.ranks)."
            )

"""Expert ranks in the plan: how many, of how many layers they hold the experts, their room."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from placement.cluster.assignment import Node
from placement.errors import DoesNotFitError
from placement.model.shape import ModelShape
from placement.plan.cost import layer_step
from placement.plan.devices import Links, RankDevice, StageDevices
from placement.plan.passes import prefill_pass
from placement.units import GIB
from ray_hetero.config import ExpertsConfig, HeteroConfig
from ray_hetero.errors import ConfigError
from ray_hetero.planning.prefill_memory import BF16_BYTES, ExpertSizes
from ray_hetero.world import World

DOWN = re.compile(r"(^|\.)(down_proj|w2|output_linear|linear_2)(_|\.|$)")
"""Names of an expert's matrix behind its activation."""
MOST_NAMED = 16
"""Largest number of expert ranks that an error proposes."""


def with_expert_ranks(config: HeteroConfig, ranks: int) -> HeteroConfig:
    """The configuration with this number of expert ranks written out."""
    experts = config.experts.model_copy(update={"ranks": ranks})
    return config.model_copy(update={"experts": experts})


def sockets_for_experts(nodes: Sequence[Node], gpus: int, shape: ModelShape) -> int:
    """Most expert ranks beside so many GPUs, 0 for none.

    They are sockets of a node that has these GPUs, as many as divide an expert equally.
    """
    sockets = max((len(node.sockets) for node in nodes if node.gpus >= gpus), default=0)
    suited = (ranks for ranks in range(sockets, 0, -1) if shape.expert_parts % ranks == 0)
    return next(suited, 0) if shape.experts else 0


def asked_layers(experts: ExpertsConfig, layers: int) -> int | None:
    """Layers whose experts are to lie on expert ranks; None where they are planned.

    Args:
        experts: what was asked for.
        layers: decoder layers of the model.

    """
    if experts.layers == "auto":
        return None
    return layers if experts.layers == "all" else min(experts.layers, layers)


def fewest_layers(layers: int, fits: Callable[[int], bool]) -> int | None:
    """The smallest number of layers without experts with which a model fits; None where none does.

    Args:
        layers: decoder layers of the model.
        fits: whether it does with this number; if so, then with every larger one.

    """
    if not fits(layers):
        return None
    least, most = 0, layers
    while least < most:
        middle = (least + most) // 2
        if fits(middle):
            most = middle
        else:
            least = middle + 1
    return most


def check_experts(world: World, shape: ModelShape | None) -> None:
    """Refuse expert ranks that there is nothing for.

    Args:
        world: with expert ranks.
        shape: the model; None where its sizes are unknown.

    Raises:
        ConfigError: the stages are not GPUs in equal numbers, or the model has no experts, or some
            that cannot be divided by so many.

    """
    ranks = len(world.experts)
    if shape is not None:
        check_has_experts(ranks, shape)
    if shape is not None and shape.expert_parts % ranks:
        parts = shape.expert_parts
        suited = ", ".join(str(n) for n in range(1, MOST_NAMED + 1) if parts % n == 0)
        raise ConfigError(
            f"experts.ranks: {ranks} sockets are to hold equal slices of every expert, but an "
            f"expert of this model consists of {parts} indivisible parts, and {parts} / {ranks} is "
            f"no whole number. Give one of {suited}."
        )
    if not world.is_stock:
        raise ConfigError(
            f"experts.ranks: {ranks} sockets can hold experts only for stages of GPUs, all of "
            f"one size, but the layout is {world.layout}. Write a layout of GPUs, for example "
            '"layout": [["gpu"]], or leave experts.ranks out.'
        )


def check_has_experts(ranks: int, shape: ModelShape) -> None:
    """Refuse a number of expert ranks for a model that is no mixture.

    Raises:
        ConfigError: it has no experts.

    """
    if ranks and not shape.experts:
        raise ConfigError(
            f"experts.ranks: {ranks} sockets are to hold routed experts, but a model "
            f"of the type {shape.model_type} has none. Leave experts.ranks out."
        )


def bytes_of_expert_rank(shape: ModelShape, ranks: int) -> int:
    """Bytes of the experts that one of so many expert ranks holds, as the checkpoint has them.

    Args:
        shape: the model, of which stages leave some layers' experts out.
        ranks: expert ranks.

    """
    return -(-shape.remote_bytes // ranks)


def expert_sizes(shape: ModelShape, ranks: Sequence[RankDevice]) -> ExpertSizes:
    """Bytes of a GPU that an expert takes which it reads over its link.

    Args:
        shape: the model, with experts.
        ranks: the devices of the expert ranks.

    """
    tensors = max(
        ([one for one in layer.tensors if one.role == "expert"] for layer in shape.layers), key=len
    )
    share = max(
        1.0 if not one.is_16_bit_matrix else rank.figures.read_share
        for one in tensors
        for rank in ranks
    )
    expanded = BF16_BYTES * sum(one.rank_weights(1) for one in tensors) // shape.experts
    downs = sum(one.rank_weights(1) for one in tensors if DOWN.search(one.name))
    downs = BF16_BYTES * downs // shape.experts
    return ExpertSizes(
        count=shape.experts,
        stored=int(share * sum(one.nbytes for one in tensors)) // shape.experts,
        expanded=expanded,
        # Gate and up are one weight; without a gate, up is as large as down.
        largest=max(downs, expanded - downs) // len(ranks),
        tables=0,
    )


def with_expert_buffer(
    stage: StageDevices,
    experts: ExpertsConfig,
    shape: ModelShape,
    tokens: int,
    links: Links | None,
) -> StageDevices:
    """A stage whose GPUs have room for experts that they read over their links.

    Where nothing says from how many tokens on they are to, they have none if expert ranks are
    predicted to be faster in every step.

    Args:
        stage: with expert ranks.
        experts: what was asked for.
        shape: the model, with experts.
        tokens: most of a step.
        links: the ways between ranks; None is what is assumed of them.

    """
    buffer = expert_sizes(shape, stage.experts).budget(experts.prefill_gpu_gib)
    found = replace(stage, expert_buffer_bytes=buffer)
    if experts.prefill_on_gpu is True or experts.prefill_on_gpu_tokens != "auto":
        return found
    remote = shape.with_remote_experts(len(shape.layers))
    layer = next(layer for layer in remote.layers if layer.remote)
    with_buffer, without = (
        layer_step(remote, layer, one, prefill_pass(tokens), links or Links())
        for one in (found, stage)
    )
    return found if with_buffer.total < without.total else stage


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
                f"{world.describe(seat.rank)} is to hold 1 / {ranks} of the experts of "
                f"{world.expert_layers} layers, {needed / GIB:.1f} GiB, but {free / GIB:.1f} GiB "
                "are free there. Leave more of them to the stages (experts.layers), or take more "
                "sockets (experts.ranks)."
            )

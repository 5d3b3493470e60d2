"""Slots for experts in the memory of a stage's GPU, as the configuration asks for them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from placement.plan.devices import DeviceFigures
from placement.plan.expert_slots import SlotRates
from placement.units import GIB
from ray_hetero.config import ExpertsConfig
from ray_hetero.distributed.expert_channel import ExpertChannel
from ray_hetero.distributed.expert_memory import RemoteLayer
from ray_hetero.distributed.expert_offers import Offer
from ray_hetero.distributed.expert_prompts import readable_slices
from ray_hetero.errors import UnsupportedError
from ray_hetero.kernels.experts.expert_rates import random_tokens
from ray_hetero.kernels.formats import FORMATS
from ray_hetero.log import logger
from ray_hetero.offload.experts.expert_slots import ExpertSlots
from ray_hetero.offload.experts.linked_experts import LinkedSlice
from ray_hetero.offload.experts.slot_switch import SLOT_TOKENS, SlotSwitch


def made(
    config: ExpertsConfig,
    device: torch.device,
    layers: Sequence[RemoteLayer],
    offers: Sequence[Offer],
    channel: ExpertChannel | None,
    gpu: DeviceFigures | None,
    *,
    dtype: torch.dtype,
    ranks: int,
) -> ExpertSlots | None:
    """The slots of a stage's GPU; None where none are asked for, or the stage has no such layers.

    Args:
        config: whether to, how they are used, and how much memory of the GPU they may take.
        device: the GPU; for tests the CPU.
        layers: of the stage.
        offers: of the expert ranks, in the order of their numbers.
        channel: to them, in the stage's first rank.
        gpu: what is known of the GPU.
        dtype: of tokens.
        ranks: of the stage.

    Raises:
        UnsupportedError: they cannot be had.

    """
    if not config.slots_gib or not layers or channel is None:
        return None
    if ranks > 1:
        raise UnsupportedError(
            f"experts.slots_gib is {config.slots_gib:g}, but a stage has {ranks} GPUs: slots are "
            "for stages of one GPU. Set it to 0."
        )
    try:
        slices = readable_slices(layers, offers, dtype)
        rates = None if gpu is None else _rates(next(one for one in slices if one), gpu)
        slots = ExpertSlots(
            device,
            slices,
            int(config.slots_gib * GIB),
            channel.slot_orders,
            SlotSwitch(rates) if config.slots == "auto" else None,
            is_fixed=config.slots == "fixed",
        )
    except UnsupportedError as error:
        raise UnsupportedError(f"experts.slots_gib is {config.slots_gib:g}: {error}") from None
    _build_kernels(slots, layers, device)
    logger.info(
        "the GPU has slots for %d of %d experts of each of %d layers in %.2f GiB; in steps of up "
        "to %d tokens it computes those that are there while expert ranks compute the others; "
        "slots are %s (experts.slots_gib, experts.slots)",
        slots.slots,
        max(slots.counts),
        sum(count > 0 for count in slots.counts),
        slots.gpu_bytes / GIB,
        SLOT_TOKENS,
        _USES[config.slots],
    )
    return slots


_USES = {
    "auto": "used while steps are measured to be faster with them",
    "always": "always used, and filled with the experts that are used most",
    "fixed": "always used, and hold the first experts of each layer",
}


def _rates(slices: Sequence[LinkedSlice], gpu: DeviceFigures) -> SlotRates | None:
    """Rates of a GPU for the experts of one layer."""
    halves = [half for one in slices for half in one.halves]
    return SlotRates.of(
        sum(half.memory.numel() for half in halves) / slices[0].count,
        sum(outputs * inputs for outputs, inputs in (half.shape for half in halves)),
        gpu,
        is_16_bit=halves[0].stacks[0].format in FORMATS,
    )


def _build_kernels(slots: ExpertSlots, layers: Sequence[RemoteLayer], device: torch.device) -> None:
    """Compute steps of all sizes that have a kernel of their own, before somebody waits for it."""
    chosen = max(layer.chosen for layer in layers)
    for number, tokens in slots.kernel_tokens(chosen):
        layer = layers[number]
        given = random_tokens(tokens, layer.hidden, slots.counts[number], layer.chosen)
        x, weights, ids = (tensor.to(device) for tensor in given)
        slots.sums(x, weights, ids, number)

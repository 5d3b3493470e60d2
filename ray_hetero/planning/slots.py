"""Slots for experts in the plan, beside whole layers in the same memory."""

from __future__ import annotations

from placement.model.shape import ModelShape
from placement.plan.cost import distinct_experts
from placement.plan.expert_slots import SlotCounts, SlotRates, least_hits
from placement.plan.stage_plan import Split
from placement.plan.step_time import PICO
from placement.words import plural
from ray_hetero.planning.expert_ranks import expert_sizes
from ray_hetero.planning.prefill_memory import BF16_BYTES


def slots_remark(shape: ModelShape, split: Split, layers: int) -> str | None:
    """Say what slots hold, and from which hits on they are predicted to be worth their memory.

    Args:
        shape: the model.
        split: the plan of its layers.
        layers: whose experts are on expert ranks.

    Returns:
        Sentences; None without slots.

    """
    devices = split.stages[0].devices
    if not devices.slot_bytes or not devices.experts or not layers:
        return None
    most, sizes = _most_of_a_stage(split, layers), expert_sizes(shape, devices.experts)
    slots = sizes.slots(devices.slot_bytes, most * sizes.expanded)
    if slots < 1:
        return (
            f"experts.slots_gib has no room for one slot of each of {plural(most, 'layer')}, and "
            "the engine will not start with it."
        )
    held = (
        f"Slots (experts.slots_gib) hold {slots} of {shape.experts} experts of each of "
        f"{plural(layers, 'layer')}."
    )
    experts = [one for one in shape.layers[-1].tensors if one.role == "expert"]
    rates = SlotRates.of(
        sizes.stored,
        sizes.expanded / BF16_BYTES,
        devices.ranks[0].figures,
        is_16_bit=all(one.is_16_bit_matrix for one in experts),
    )
    if rates is None:
        return held
    sockets = sum(stage.decode.experts for stage in split.stages) / PICO
    read = layers * distinct_experts(shape.experts, shape.active_experts, split.work.batch)
    counts = SlotCounts(sockets, max(0.0, split.step_s - sockets), layers, read, 0, 0)
    share = slots / shape.experts
    whole = layers * rates.layers_of(share)
    hits = least_hits(counts, rates, share)
    until = (
        "whatever a step finds in slots"
        if hits is None
        else f"unless a step finds at least {100 * hits:.0f} % of its experts in slots"
    )
    return (
        f"{held} In as much memory, the GPU would hold the experts of {whole:.1f} layers, which is "
        f"predicted to be faster {until}."
    )


def _most_of_a_stage(split: Split, layers: int) -> int:
    """Most layers of a stage whose experts are on expert ranks: the last ones of the model."""
    ends = [sum(split.layers[: stage + 1]) for stage in range(len(split.layers))]
    first = ends[-1] - layers
    return max(end - max(first, end - own) for end, own in zip(ends, split.layers, strict=True))

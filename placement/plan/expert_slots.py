"""Decode steps whose experts lie on sockets, if slots in the memory of a GPU held some of them.

Sockets compute the experts that a step does not find in slots while the GPU computes the others.
An expert that is copied into a slot is read from the sockets' memory once more, and crosses the
link behind the step.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SlotCounts:
    """Averages of a decode step, and what slots of one size would have held of its experts."""

    computing_s: float
    """Seconds in which the sockets compute experts."""
    others_s: float
    """Seconds of the rest of the step."""
    layers: float
    """Layers whose experts are on sockets."""
    read: float
    """Experts that these read, each once a layer."""
    hits: float
    """Part of `read` that slots would have held."""
    copies: float
    """Experts that would have been copied into slots."""


@dataclass(frozen=True)
class SlotRates:
    """Rates of the GPU that would have the slots."""

    expert_bytes: float
    """Bytes of one expert of a layer, as it is stored."""
    gpu_bandwidth: float
    """Bytes per second that the GPU reads its memory with."""
    link_bandwidth: float
    """Bytes per second over its link."""
    layer_s: float
    """Seconds that a computation of the GPU takes for a layer beside its reads; as long again is
    taken to be the handover."""


def step_with_slots(counts: SlotCounts, rates: SlotRates) -> float:
    """Seconds of the step with slots.

    Args:
        counts: of the step; it reads at least one expert.
        rates: of the GPU.

    """
    sockets = counts.computing_s * (counts.read - counts.hits + counts.copies) / counts.read
    read_s = rates.expert_bytes / rates.gpu_bandwidth
    gpu = counts.layers * rates.layer_s + counts.hits * read_s
    copying = counts.copies * rates.expert_bytes / rates.link_bandwidth
    return max(counts.others_s + max(sockets, gpu), copying)


def step_with_layers(counts: SlotCounts, rates: SlotRates, share: float) -> float:
    """Seconds of the step if the same memory held all experts of some layers.

    Args:
        counts: of the step.
        rates: of the GPU.
        share: of the layers, from 0 to 1, as slots hold of the experts.

    """
    gpu = share * counts.read * rates.expert_bytes / rates.gpu_bandwidth
    # The GPU computes these layers instead of handing their tokens over.
    return counts.others_s + (1 - share) * counts.computing_s + gpu

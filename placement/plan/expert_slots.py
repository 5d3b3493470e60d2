"""Decode steps whose experts lie on sockets, if slots in the memory of a GPU held some of them.

Sockets compute the experts that a step does not find in slots while the GPU computes the others.
An expert that is copied into a slot is read from the sockets' memory once more, and crosses the
link behind the step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from placement.plan.devices import DeviceFigures, Links

SLOT_WEIGHT_BYTES = 2
"""Bytes of a weight in a slot."""


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
    slot_bytes: float
    """Bytes of one in a slot, in 16 bits."""
    own_bytes: float
    """Bytes of one in a GPU's own layer, as the checkpoint has it."""
    gpu_bandwidth: float
    """Bytes per second that the GPU reads its memory with."""
    link_bandwidth: float
    """Bytes per second over its link."""
    layer_s: float
    """Seconds that a computation of the GPU takes for a layer beside its reads; as long again is
    taken to be the handover."""

    @classmethod
    def of(
        cls, stored: float, weights: float, gpu: DeviceFigures, *, is_16_bit: bool
    ) -> SlotRates | None:
        """Rates for experts of one size; None for a device without a link to its host.

        Args:
            stored: bytes of one expert as it is stored, all slices together.
            weights: of one.
            gpu: that has the slots.
            is_16_bit: whether the checkpoint has these weights in 16 bits.

        """
        if gpu.host_link is None:
            return None
        in_slot = SLOT_WEIGHT_BYTES * weights
        return cls(
            expert_bytes=stored,
            slot_bytes=in_slot,
            own_bytes=in_slot if is_16_bit else stored,
            gpu_bandwidth=gpu.read_bandwidth,
            link_bandwidth=gpu.host_link,
            layer_s=Links().handover.latency_s,
        )

    def layers_of(self, share: float) -> float:
        """Share of the layers that fit in the memory of slots for a share of each one's experts."""
        return min(1.0, share * self.slot_bytes / self.own_bytes)


def step_with_slots(counts: SlotCounts, rates: SlotRates) -> float:
    """Seconds of the step with slots.

    Args:
        counts: of the step; it reads at least one expert.
        rates: of the GPU.

    """
    sockets = counts.computing_s * (counts.read - counts.hits + counts.copies) / counts.read
    read_s = rates.slot_bytes / rates.gpu_bandwidth
    gpu = counts.layers * rates.layer_s + counts.hits * read_s
    copying = counts.copies * rates.expert_bytes / rates.link_bandwidth
    return max(counts.others_s + max(sockets, gpu), copying)


def least_hits(counts: SlotCounts, rates: SlotRates, share: float) -> float | None:
    """Least share of the experts read that slots have to hold to be faster than whole layers in the
    same memory, in hundredths; None where they are slower even if they hold all of them.

    Args:
        counts: of the step; its hits and copies do not matter, as nothing is copied.
        rates: of the GPU.
        share: of the experts that slots hold, from 0 to 1.

    """
    layers = step_with_layers(counts, rates, share)
    shares = (hundredths / 100 for hundredths in range(101))
    return next(
        (
            hits
            for hits in shares
            if step_with_slots(replace(counts, hits=hits * counts.read, copies=0), rates) < layers
        ),
        None,
    )


def step_with_layers(counts: SlotCounts, rates: SlotRates, share: float) -> float:
    """Seconds of the step if the same memory held all experts of some layers.

    Args:
        counts: of the step.
        rates: of the GPU.
        share: of the experts, from 0 to 1, that slots hold; of the layers, more in a format that
            takes fewer bytes than slots do.

    """
    layers = rates.layers_of(share)
    gpu = layers * counts.read * rates.own_bytes / rates.gpu_bandwidth
    # The GPU computes these layers instead of handing their tokens over.
    return counts.others_s + (1 - layers) * counts.computing_s + gpu

"""Slots for experts in a GPU's memory: what they would save, from what an expert rank reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from placement.plan.expert_slots import (
    SlotCounts,
    SlotRates,
    step_with_layers,
    step_with_slots,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ray_hetero.observability.step_clock import StepTotals

PERCENTS = (5, 10, 25)
"""Sizes of the slots in hundredths of a layer's experts, as csrc/handover/shadow.h has them."""


@dataclass(frozen=True)
class SlotForecast:
    """Slots of one size."""

    percent: int
    """Hundredths of each layer's experts."""
    hit_share: float
    """Share of the experts read that slots would have held."""
    copies: float
    """Experts that would have been copied into slots in a step, behind it."""
    held_share: float
    """Share of the experts read that a GPU has computed from slots that it has; of all sizes the
    same."""
    step_ms: float
    """Time of a step without slots: measured, or if the GPU has slots, with the sockets' time for
    the experts in them added."""
    slots_ms: float | None
    """Predicted time of a step with slots; None where nothing is known of the GPU."""
    layers_ms: float | None
    """Predicted time of a step with experts of whole layers in as much memory; None as above."""

    @classmethod
    def of(cls, totals: StepTotals, rates: SlotRates | None) -> tuple[SlotForecast, ...]:
        """Forecasts of all sizes; none where no step was counted.

        Args:
            totals: of an expert rank.
            rates: of the GPU; None where nothing is known of it.

        """
        if not totals.slot_steps or not totals.slot_experts:
            return ()
        return tuple(cls._of(totals, rates, percent) for percent in PERCENTS)

    @classmethod
    def _of(cls, totals: StepTotals, rates: SlotRates | None, percent: int) -> SlotForecast:
        steps, read = totals.slot_steps, totals.slot_experts
        counts = SlotCounts(
            # The sockets' time goes with the experts that they compute.
            computing_s=totals.slot_computing_s / steps * read / max(1, read - totals.slot_held),
            others_s=totals.slot_waiting_s / steps,
            layers=totals.slot_layers / steps,
            read=read / steps,
            hits=getattr(totals, f"slot_hits_{percent}") / steps,
            copies=getattr(totals, f"slot_copies_{percent}") / steps,
        )
        return cls(
            percent,
            counts.hits / counts.read,
            counts.copies,
            totals.slot_held / read,
            1000 * (counts.computing_s + counts.others_s),
            None if rates is None else 1000 * step_with_slots(counts, rates),
            None if rates is None else 1000 * step_with_layers(counts, rates, percent / 100),
        )


def described(forecasts: Sequence[SlotForecast]) -> str:
    """One line for people.

    Args:
        forecasts: of one rank, at least one.

    """

    def listed(values: Sequence[float], digits: int) -> str:
        return ", ".join(f"{value:.{digits}f}" for value in values)

    percents = listed([one.percent for one in forecasts], 0)
    shares = listed([100 * one.hit_share for one in forecasts], 0)
    held = 100 * forecasts[0].held_share
    line = f"GPU slots for {percents} % of each layer's experts would hold {shares} % of those read"
    if held:
        line = f"the GPU has computed {held:.0f} % of the experts from its slots; {line}"
    slots = [one.slots_ms for one in forecasts if one.slots_ms is not None]
    layers = [one.layers_ms for one in forecasts if one.layers_ms is not None]
    if not slots:
        return line
    return (
        f"{line}; a step of {forecasts[0].step_ms:.2f} ms is predicted to take {listed(slots, 2)} "
        f"ms with them, and {listed(layers, 2)} ms with whole layers in as much memory"
    )

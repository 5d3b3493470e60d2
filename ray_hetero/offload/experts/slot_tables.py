"""Tables of the experts that slots of a GPU hold, which steps read on the GPU."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

UPLOADS = 4
"""Copies of the tables in locked memory, so that one can be written while others cross the link."""
IN_SLOT = -2
"""Number of expert 0 for expert ranks if it is in a slot; that of expert e is e less."""


class SlotTables:
    """Slot of each expert, by layer.

    What steps read lies on the device, always in the same memory, and changes in the order of the
    stream that steps are ordered on.  The host's copy says what it becomes.

    Args:
        device: the GPU; for tests the CPU.
        module: that makes its events.
        counts: experts of each layer; 0 of a layer without slots.

    """

    def __init__(self, device: torch.device, module: Any, counts: Sequence[int]) -> None:
        self._module = module
        width = max(counts)
        self._experts = torch.arange(width, dtype=torch.int32).expand(len(counts), width)
        self.places = torch.full((len(counts), width), -1, dtype=torch.int32)
        """[layers, experts]: slot of each expert, -1 for none, as the device is to have it next."""
        shape = (len(counts), 2 * width + 1)
        is_gpu = device.type == "cuda"
        self._uploads = itertools.cycle(
            [
                (torch.empty(shape, dtype=torch.int32, pin_memory=is_gpu), module.Event())
                for _ in range(UPLOADS)
            ]
        )
        self._memory = torch.empty(shape, dtype=torch.int32, device=device)
        self._ends = torch.tensor(counts)
        self.slots = [row[:count] for row, count in zip(self._memory, counts, strict=True)]
        """[experts], int32, of each layer, on the device: slot of each expert, -1 for none."""
        self.told = [
            row[width : width + count + 1] for row, count in zip(self._memory, counts, strict=True)
        ]
        """[experts + 1], int32, of each layer, on the device: number that expert ranks get for each
        expert, which is below -1 if a slot holds it; the last one is -1, for no expert."""
        self.upload(is_empty=True)

    def upload(self, *, is_empty: bool) -> None:
        """Give steps that are ordered from now on what the host's copy says.

        Args:
            is_empty: whether they are to find no expert in a slot, whatever it says.

        """
        rows, sent = next(self._uploads)
        sent.synchronize()
        places, width = self.places, self.places.shape[1]
        is_held = torch.zeros_like(places, dtype=torch.bool) if is_empty else places >= 0
        rows[:, :width] = torch.where(is_held, places, -1)
        rows[:, width : 2 * width] = torch.where(is_held, IN_SLOT - self._experts, self._experts)
        rows[:, 2 * width] = -1
        # Behind the last expert of a layer that has fewer than others.
        rows[torch.arange(len(rows)), width + self._ends] = -1
        self._memory.copy_(rows, non_blocking=True)
        sent.record(self._module.current_stream())

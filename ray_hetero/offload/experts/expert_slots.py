"""Slots in a GPU's memory for experts of expert ranks, each with one expert of a layer in bf16.

A step of few tokens reads two tables on the GPU: which experts are in slots, and what expert ranks
are told of each (slot_tables.py).  The GPU computes those in slots while the sockets compute the
others; so the step's kernels are the same whatever the slots hold, and can be captured.

An expert rank keeps the book that says which expert comes next (csrc/handover/shadow.h).  Between
steps, the host clears the entries of the experts that make room, has the copies follow behind that
on a stream of their own, and makes the new entries once the copies are there.  All entries change
in the order of the stream of steps: memory is overwritten when no step reads it any more, and read
when it is complete.  A book that is ahead costs hits, never a result.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch

from placement.units import GIB
from ray_hetero.compat.models.fused_experts import fused_experts, kernel_tokens
from ray_hetero.errors import AgreementError, UnsupportedError
from ray_hetero.kernels.experts.expert_matrices import ExpertMatrices
from ray_hetero.kernels.experts.experts_one_by_one import multiplied_one_by_one
from ray_hetero.offload.experts.expert_expansion import ExpertExpansion, LinkedLayer, sizes_of
from ray_hetero.offload.experts.expert_pieces import ExpertReader, Piece
from ray_hetero.offload.experts.gpu_experts import Multiply, without_none
from ray_hetero.offload.experts.linked_experts import LinkedSlice, check
from ray_hetero.offload.experts.slot_switch import SLOT_TOKENS, Phase, SlotSums, SlotSwitch
from ray_hetero.offload.experts.slot_tables import SlotTables
from ray_hetero.offload.weights.link_reader import current
from ray_hetero.planning.prefill_memory import BF16_BYTES

COPY_BYTES = 64 << 20
"""Bytes of experts that are on their way to slots at once, unless one has more; 1.2 ms of a link of
55 GB/s.  The next ones are ordered once these are there, so that a step's own words and sums never
queue behind many of them."""


class SlotOrders(Protocol):
    """Orders of the book of an expert rank: the native `Sender` of the channel."""

    def make_slots(self, slots: int) -> None:
        """Say how many slots each layer has."""

    def follow(self, is_following: bool) -> None:
        """Begin an empty book that gives orders, or let it go on by itself."""

    def take_orders(self, most: int) -> Sequence[Sequence[int]]:
        """Oldest orders, up to so many: layer, expert, slot."""

    @property
    def slot_sums(self) -> Sequence[int]:
        """Values of `SlotSums.of`."""


class ExpertSlots:
    """The slots of a GPU, as many for each layer.

    Args:
        device: the GPU; for tests the CPU, with the same sequence of copies and products.
        layers: slices of each layer by the number of the expert rank; None is one without slots.
        budget: bytes of the GPU that may be taken.
        orders: of the book.
        switch: turns the slots on and off; None where they are always on.
        is_fixed: whether slots hold each layer's first experts for ever, and follow no book.

    Raises:
        UnsupportedError: the budget is too small, the GPU has no memory left, or the pages of the
            host cannot be locked.
        AgreementError: the slices of a layer have different shapes.

    """

    def __init__(
        self,
        device: torch.device,
        layers: Sequence[Sequence[LinkedSlice] | None],
        budget: int,
        orders: SlotOrders,
        switch: SlotSwitch | None = None,
        *,
        is_fixed: bool = False,
    ) -> None:
        self._device = device
        self._module: Any = torch.cuda if device.type == "cuda" else torch.cpu
        self._orders, self._switch, self._is_fixed = orders, switch, is_fixed
        given = {number: tuple(one) for number, one in enumerate(layers) if one is not None}
        for slices in given.values():
            check(slices)
        self.counts = [0 if one is None else one[0].count for one in layers]
        """Experts of each layer; 0 of a layer without slots."""
        self.slots, self.gpu_bytes = slots_within(budget, list(given.values()))
        try:
            if device.type == "cuda":
                for one in (one for slices in given.values() for one in slices):
                    one.lock(range(one.count))
            self._allocate(given)
        except RuntimeError as error:
            reason = str(error).splitlines()[0].rstrip(".")
            raise UnsupportedError(
                f"slots need {self.gpu_bytes / GIB:.2f} GiB of the GPU and page-locked memory of "
                f"the host: {reason}"
            ) from None
        self._held = {number: [-1] * self.slots for number in given}
        """Expert of each slot, or on its way there, by layer; -1 for none."""
        self._coming: list[tuple[int, int, int]] = []
        self._phase = Phase.OFF
        self.copied = 0
        """Experts that were copied into slots."""
        if is_fixed:
            self._fill()
        else:
            orders.make_slots(self.slots)
            if switch is None:
                self._turn(Phase.ON)

    def _allocate(self, given: dict[int, tuple[LinkedSlice, ...]]) -> None:
        device, every = self._device, list(given.values())
        sizes = sizes_of(every)
        # A link's batch of copies; `slots_within` has counted what they take.
        self._most = max(1, COPY_BYTES // sizes.stored)
        self._expansion = ExpertExpansion(device, every, sizes, 1)
        starts, nbytes = self._expansion.starts, self._expansion.stored_bytes
        self._reader = ExpertReader(device, self._module, starts, nbytes)
        self._cleared, self._arrived = self._module.Event(), self._module.Event()
        self._layers = {number: LinkedLayer.of(one, device) for number, one in given.items()}

        def memory(*shape: int) -> torch.Tensor:
            # Slots that hold nothing are multiplied with no token.
            return torch.empty((self.slots, *shape), dtype=torch.bfloat16, device=device)

        self._weights, self._biases = {}, {}
        for number, layer in self._layers.items():
            ranks = len(layer.slices)
            gate_up, down = ranks * layer.outputs, ranks * layer.inner
            self._weights[number] = memory(gate_up, layer.hidden), memory(layer.hidden, down)
            has_bias = layer.biases[0] is not None
            self._biases[number] = (
                (memory(gate_up), memory(layer.hidden)) if has_bias else (None, None)
            )
        self._tables = SlotTables(device, self._module, self.counts)
        self._multiply: Multiply = fused_experts if device.type == "cuda" else multiplied_one_by_one

    def holds(self, tokens: int, layer: int) -> bool:
        """Whether steps of so many tokens look for experts of a layer in slots."""
        return tokens <= SLOT_TOKENS and layer in self._layers

    def told(self, ids: torch.Tensor, layer: int) -> torch.Tensor:
        """Numbers that expert ranks get in place of experts, which they leave out if negative.

        Args:
            ids: [M, chosen]; -1 is none.
            layer: its number.

        """
        return self._tables.told[layer][ids]

    def sums(
        self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, layer: int
    ) -> torch.Tensor:
        """Sums [M, hidden] over those experts of each token that are in slots.

        Args:
            x: [M, hidden], bf16.
            weights: [M, chosen], float32.
            ids: [M, chosen]; -1 is none, and adds nothing.
            layer: its number.

        """
        linked, (weights, ids) = self._layers[layer], without_none(weights, ids)
        matrices = ExpertMatrices(*self._weights[layer], *self._biases[layer])
        return self._multiply(
            x.contiguous(), matrices, weights, ids,
            activation=linked.activation, count=linked.count, places=self._tables.slots[layer],
        )  # fmt: skip

    def begin_step(self, tokens: int) -> None:
        """Make entries of copies that are there, and order the next ones, before a step is ordered.

        Args:
            tokens: of the step.

        """
        if self._is_fixed:
            return
        if self._switch is not None:
            sums = SlotSums.of(self._orders.slot_sums)
            self._turn(self._switch.step(tokens, time.perf_counter(), sums))
        if self._phase is not Phase.ON:
            return
        has_changed = False
        if self._coming and self._arrived.query():
            for layer, expert, slot in self._coming:
                self._tables.places[layer, expert] = slot
            self._coming, has_changed = [], True
        wanted = [] if self._coming else self._wanted()
        if has_changed or wanted:
            self._tables.upload(is_empty=False)
        if wanted:
            self._cleared.record(self._module.current_stream())
            self._copy(wanted)

    def _turn(self, phase: Phase) -> None:
        """Go on in another phase."""
        before, self._phase = self._phase, phase
        if phase is before:
            return
        if phase is Phase.OFF:
            # Copies that are on their way end in slots that have no entry.
            self._tables.places.fill_(-1)
            self._held = {number: [-1] * self.slots for number in self._held}
            self._coming = []
        if Phase.OFF in (before, phase):
            self._orders.follow(phase is not Phase.OFF)
        self._tables.upload(is_empty=phase is not Phase.ON)

    def _wanted(self) -> list[tuple[int, int, int]]:
        """Layer, expert and slot of the experts to be copied now, whose slots have no entry."""
        slots: dict[tuple[int, int], int] = {}
        for layer, expert, slot in self._orders.take_orders(self._most):
            if layer < len(self.counts) and not self.counts[layer]:
                # The book has one whose experts cannot be read from here.
                continue
            if not self._is_possible(layer, expert, slot):
                raise AgreementError(
                    f"an expert rank wants expert {expert} of layer {layer} in slot {slot}; there "
                    f"are {self.slots} slots for the experts {self.counts}"
                )
            held = self._held[layer]
            if expert in held:
                continue
            if held[slot] >= 0:
                self._tables.places[layer, held[slot]] = -1
            held[slot] = expert
            slots[layer, slot] = expert
        return [(layer, expert, slot) for (layer, slot), expert in slots.items()]

    def _is_possible(self, layer: int, expert: int, slot: int) -> bool:
        return layer in self._held and expert < self.counts[layer] and slot < self.slots

    def _copy(self, wanted: Sequence[tuple[int, int, int]]) -> None:
        """Order copies into slots, behind all steps that may read what is there."""
        self._reader.copying.wait_event(self._cleared)
        with current(self._reader.copying):
            for layer, expert, slot in wanted:
                self._put(layer, expert, slot)
            self._arrived.record(self._reader.copying)
        self._coming = list(wanted)
        self.copied += len(wanted)

    def _put(self, layer: int, expert: int, slot: int) -> None:
        """Copy an expert over the link, and expand it into a slot, on the current stream."""
        linked, run = self._layers[layer], ((expert, expert + 1),)
        stored = self._reader.all_slots[0].memory
        self._reader.copy(Piece(linked.slices, run, None), stored)
        parts = (
            *zip(self._weights[layer], self._expansion.expanded(linked, stored, run), strict=True),
            *zip(self._biases[layer], self._expansion.biases_of(linked, run), strict=True),
        )
        for slots, found in parts:
            if slots is not None:
                assert found is not None, "slots have biases where the layer has"
                slots[slot].copy_(found[0])

    def _fill(self) -> None:
        """Copy the first experts of each layer, for ever."""
        wanted = [
            (layer, number, number)
            for layer in self._layers
            for number in range(min(self.slots, self.counts[layer]))
        ]
        self._cleared.record(self._module.current_stream())
        self._copy(wanted)
        self._arrived.synchronize()
        for layer, expert, slot in wanted:
            self._tables.places[layer, expert] = slot
        self._coming = []
        self._tables.upload(is_empty=False)

    def kernel_tokens(self, chosen: int) -> Iterator[tuple[int, int]]:
        """Layers and numbers of tokens whose steps use all forms of the kernel; none where it is
        not compiled.

        Args:
            chosen: experts of a token.

        """
        if self._device.type != "cuda":
            return
        shapes = set()
        for number, (w13, w2) in self._weights.items():
            if (w13.shape, w2.shape) not in shapes:
                shapes.add((w13.shape, w2.shape))
                gate_up, down = tuple(w13.shape), tuple(w2.shape)
                for tokens in kernel_tokens(gate_up, down, chosen, 1, SLOT_TOKENS):
                    yield number, tokens


def slots_within(budget: int, layers: Sequence[Sequence[LinkedSlice]]) -> tuple[int, int]:
    """How many slots of each layer a budget has room for, at least one, and the bytes they take.

    Args:
        budget: bytes.
        layers: slices of each layer with slots.

    Raises:
        UnsupportedError: not one.

    """
    sizes, every = sizes_of(layers), sum(map(expert_bytes, layers))
    slots = sizes.slots(budget, every)
    if slots < 1:
        raise UnsupportedError(
            f"one slot for each of {len(layers)} layers needs "
            f"{sizes.slot_bytes(1, every) / GIB:.2f} GiB of the GPU, "
            f"{sizes.slot_bytes(0, every) / GIB:.2f} of it for experts that are on their way, but "
            f"experts.slots_gib is {budget / GIB:.2f}"
        )
    return slots, sizes.slot_bytes(slots, every)


def expert_bytes(slices: Sequence[LinkedSlice]) -> int:
    """Bytes of an expert of a layer in a slot."""
    shapes = [half.shape for one in slices for half in one.halves]
    weights = sum(outputs * inputs for outputs, inputs in shapes)
    biases = sum(int(one.biases[0].shape[1]) for one in slices if one.biases[0] is not None)
    hidden = slices[0].halves[0].shape[1] if slices[0].biases[1] is not None else 0
    return BF16_BYTES * (weights + biases + hidden)

"""Slots for experts on streams that run whenever they like: no step reads what is being written.

Copies, uploads of tables and steps wait in queues, in the order in which the host ordered them; a
seed draws which queue goes on next, what the book orders, and when slots are turned on and off.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from linked_layers import EXPERTS, Layer, routed  # noqa: E402
from native_module import native  # noqa: E402

from ray_hetero.offload.experts.expert_expansion import sizes_of  # noqa: E402
from ray_hetero.offload.experts.expert_slots import ExpertSlots, expert_bytes  # noqa: E402
from ray_hetero.offload.experts.slot_switch import Phase  # noqa: E402

if native is None:
    pytest.skip("needs the native module", allow_module_level=True)

SLOTS, STEPS = 3, 120
SEEDS = range(3)


class Stream:
    """A queue of what the host has ordered."""

    def __init__(self) -> None:
        self.ordered: deque[Callable[[], bool]] = deque()

    def order(self, work: Callable[[], object]) -> None:
        def done() -> bool:
            work()
            return True

        self.ordered.append(done)

    def wait_event(self, event: Event) -> None:
        mark = event.mark
        self.ordered.append(lambda: mark.is_done)

    def go_on(self) -> bool:
        """Do what comes next; whether that was possible."""
        if not self.ordered or not self.ordered[0]():
            return False
        self.ordered.popleft()
        return True


class Mark:
    """A place in a stream, which an event stands for until it is recorded again."""

    is_done = False


class Event:
    """An event of a machine's."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.mark = machine, Mark()
        self.mark.is_done = True

    def record(self, stream: Stream) -> None:
        self.mark = mark = Mark()
        stream.order(lambda: setattr(mark, "is_done", True))

    def query(self) -> bool:
        return self.mark.is_done

    def synchronize(self) -> None:
        while not self.mark.is_done:
            assert self.machine.go_on(), "a wait that nothing ends"


class Machine:
    """Two streams, and a choice of which goes on."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.steps, self.copies = Stream(), Stream()

    def go_on(self) -> bool:
        both = [self.steps, self.copies]
        self.draw.shuffle(both)
        return any(stream.go_on() for stream in both)

    def current_stream(self) -> Stream:
        return self.steps


class Book:
    """Orders that agree with nothing but the numbers that there are."""

    def __init__(self, draw: random.Random) -> None:
        self.draw, self.slot_sums = draw, [0] * 7
        self.given = 0

    def make_slots(self, slots: int) -> None:
        pass

    def follow(self, is_following: bool) -> None:
        pass

    def take_orders(self, most: int) -> Sequence[Sequence[int]]:
        draw = self.draw
        found = [
            (draw.randrange(2), draw.randrange(EXPERTS), draw.randrange(SLOTS))
            for _ in range(min(most, draw.randrange(5)))
        ]
        self.given += len(found)
        return found


class Switch:
    """Phases in any order."""

    def __init__(self, draw: random.Random) -> None:
        self.draw, self.phase = draw, Phase.OFF
        self.seen: set[tuple[Phase, Phase]] = set()

    def step(self, *_: Any) -> Phase:
        before = self.phase
        if self.draw.random() < 0.15:
            self.phase = self.draw.choice((Phase.OFF, Phase.ON, Phase.ON, Phase.ON, Phase.PAUSED))
        self.seen.add((before, self.phase))
        return self.phase


class Late:
    """The tables' memory on the device, written when its stream gets there."""

    def __init__(self, memory: torch.Tensor, stream: Stream) -> None:
        self.memory, self.stream = memory, stream

    def copy_(self, rows: torch.Tensor, non_blocking: bool) -> None:
        assert non_blocking
        self.stream.order(lambda: self.memory.copy_(rows))


def made(machine: Machine, layers: Sequence[Layer], book: Book, switch: Switch) -> ExpertSlots:
    """Slots whose work waits in the machine's streams."""
    slices = [layer.slices for layer in layers]
    sizes = sizes_of(slices)
    budget = sizes.beside + sizes.each + SLOTS * sum(map(expert_bytes, slices))
    slots: Any = ExpertSlots(torch.device("cpu"), slices, budget, book, switch)  # type: ignore[arg-type]
    assert slots.slots == SLOTS
    slots._module, slots._reader.copying = machine, machine.copies
    slots._cleared, slots._arrived = Event(machine), Event(machine)
    tables, put = slots._tables, slots._put
    tables._module = machine
    tables._memory = Late(tables._memory, machine.steps)
    uploads = [(rows, Event(machine)) for rows, _ in (next(tables._uploads) for _ in range(4))]
    tables._uploads = iter(uploads * STEPS)

    def late(layer: int, expert: int, slot: int) -> None:
        def begin() -> None:
            for weights in slots._weights[layer]:
                weights[slot].fill_(float("nan"))

        machine.copies.order(begin)
        machine.copies.order(lambda: put(layer, expert, slot))

    slots._put = late
    found: ExpertSlots = slots
    return found


def whole(layers: Sequence[Layer]) -> ExpertSlots:
    """Slots that hold all experts."""
    slices = [layer.slices for layer in layers]
    budget = 1 << 30
    book = Book(random.Random(0))
    return ExpertSlots(torch.device("cpu"), slices, budget, book, is_fixed=True)


@pytest.mark.parametrize("seed", SEEDS)
def test_sums_are_right_whenever_streams_go_on(seed: int) -> None:
    torch.manual_seed(seed)
    machine = Machine(seed)
    layers = [Layer("packed", 1), Layer("fp8", 1)]
    book, switch = Book(machine.draw), Switch(machine.draw)
    slots = made(machine, layers, book, switch)
    every = whole(layers)
    held: list[int] = []

    def step(given: Any) -> None:
        x, weights, ids = given
        for number in range(len(layers)):
            told = slots.told(ids, number)
            is_here = told < -1
            assert torch.equal(told, torch.where(is_here, -2 - ids, ids))
            held.append(int(is_here.sum()))
            found = slots.sums(x, weights, ids, number)
            # By the same operators, of experts that never move.
            assert torch.equal(found, every.sums(x, weights * is_here, ids, number))

    for _ in range(STEPS):
        given = routed(4)
        slots.begin_step(4)
        machine.steps.order(lambda given=given: step(given))  # type: ignore[misc]
        for _ in range(machine.draw.choice((0, 1, 2, 5, 20))):
            machine.go_on()
    while machine.go_on():
        pass
    assert not machine.steps.ordered
    assert not machine.copies.ordered
    # Not a test if slots have held nothing, or all.
    assert 0 < sum(count > 0 for count in held) < len(held) == 2 * STEPS
    assert slots.copied > 10
    assert len(switch.seen) > 6

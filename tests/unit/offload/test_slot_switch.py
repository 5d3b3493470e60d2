"""Slots are used where they pay, and only there; on a clock of the test's own."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest

from placement.plan.expert_slots import SlotRates
from ray_hetero.offload.experts.slot_switch import (
    CHECK_STEPS,
    FILL_STEPS,
    FIRST_REST,
    PAUSE_STEPS,
    SLOT_TOKENS,
    Phase,
    SlotSums,
    SlotSwitch,
    size_of,
)

RATES = SlotRates(10e6, 10e6, 10e6, 3e12, 50e9, 13e-6)
LAYERS, READ = 20, 160
OTHERS_S = 4e-3


@dataclass
class Engine:
    """An engine whose steps take what it says, and the book that an expert rank keeps."""

    sockets_s: float = 8e-3
    """Seconds of the sockets for all experts of a step of one token."""
    hits: float = 0.7
    """Share of the experts that the book says are in slots."""
    found: float | None = None
    """Share that really is; as the book has it unless given."""
    extra_s: float = 0.0
    """Seconds that a step takes longer with slots."""
    copies: float = 1.0
    rates: SlotRates | None = RATES
    noise: float = 0.02
    now: float = 100.0
    sums: SlotSums = field(default_factory=SlotSums)
    seen: list[tuple[Phase, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.switch = SlotSwitch(self.rates)
        self.rng = random.Random(1)

    def run(self, steps: int, tokens: int = 1) -> float:
        """Seconds of so many steps."""
        began = self.now
        for _ in range(steps):
            phase = self.switch.step(tokens, self.now, self.sums)
            sockets = self.sockets_s * tokens**0.5
            taken = OTHERS_S + sockets
            if phase is Phase.ON:
                here = self.hits if self.found is None else self.found
                taken = OTHERS_S + self.extra_s + (1 - here) * sockets
            taken *= 1 + self.noise * self.rng.random()
            self.seen.append((phase, taken))
            self.now += taken
            self.sums = SlotSums(
                self.sums.steps + 1, self.sums.layers + LAYERS, self.sums.computing_s + sockets,
                self.sums.waiting_s + OTHERS_S, self.sums.experts + READ,
                self.sums.hits + round(self.hits * READ), self.sums.copies + round(self.copies),
            )  # fmt: skip
        return self.now - began

    def count(self, phase: Phase) -> int:
        return sum(one is phase for one, _ in self.seen)


def test_slots_that_are_promised_to_pay_are_used_soon() -> None:
    engine = Engine()
    engine.run(4 * CHECK_STEPS)
    assert engine.seen[-1][0] is Phase.ON
    assert engine.count(Phase.OFF) <= 3 * CHECK_STEPS
    # Pauses aside, for ever, and at next to no cost.
    engine.seen.clear()
    taken = engine.run(20_000)
    assert engine.count(Phase.OFF) == 0
    assert 5 * (PAUSE_STEPS - 1) < engine.count(Phase.PAUSED) < 0.01 * 20_000
    best = sum(seconds for phase, seconds in engine.seen if phase is Phase.ON)
    assert taken < 1.02 * best * 20_000 / engine.count(Phase.ON)


@pytest.mark.parametrize("hits", [0.0, 0.05, 0.1])
def test_slots_that_promise_little_are_never_used(hits: float) -> None:
    engine = Engine(hits=hits)
    engine.run(10_000)
    assert engine.count(Phase.OFF) == 10_000


def test_a_slow_link_is_not_asked_for_many_copies() -> None:
    engine = Engine(copies=20, rates=replace(RATES, link_bandwidth=10e9))
    engine.run(2000)
    assert engine.count(Phase.ON) == 0


@pytest.mark.parametrize("extra_s", [4e-3, 6e-3, 20e-3])
def test_slots_that_do_not_pay_are_given_up_and_seldom_tried_again(extra_s: float) -> None:
    engine = Engine(found=0.5, extra_s=extra_s)
    engine.run(4 * CHECK_STEPS)
    assert engine.seen[-1][0] is Phase.ON
    engine.run(2 * FILL_STEPS)
    assert engine.seen[-1][0] is Phase.OFF
    before = engine.count(Phase.ON)
    engine.run(200_000)
    # The rest doubles: five more times.
    assert 4 * before < engine.count(Phase.ON) < 7 * before
    taken = sum(seconds for _, seconds in engine.seen)
    assert taken < 1.02 * len(engine.seen) * (OTHERS_S + engine.sockets_s) * (1 + engine.noise)


def test_a_load_for_which_slots_do_not_pay_ends_them_and_another_begins_them() -> None:
    engine = Engine()
    engine.run(3000)
    assert engine.seen[-1][0] is Phase.ON
    # Thirty-two requests find next to nothing there.
    engine.hits, engine.extra_s = 0.05, 1e-3
    engine.seen.clear()
    engine.run(2000, tokens=32)
    assert engine.seen[-1][0] is Phase.OFF
    # Steps of that size were not known without slots: a pause was made for them.
    assert engine.count(Phase.PAUSED) >= PAUSE_STEPS - 1
    engine.hits, engine.extra_s = 0.7, 0.0
    engine.run(FIRST_REST + 4 * CHECK_STEPS)
    assert engine.seen[-1][0] is Phase.ON


def test_without_figures_of_the_gpu_slots_are_tried() -> None:
    engine = Engine(rates=None, hits=0.0, extra_s=1e-3)
    engine.run(4 * CHECK_STEPS + 2 * FILL_STEPS)
    assert engine.count(Phase.ON) > FILL_STEPS
    assert engine.seen[-1][0] is Phase.OFF
    engine = Engine(rates=None)
    engine.run(3000)
    assert engine.seen[-1][0] is Phase.ON


def test_pauses_between_requests_and_prompts_are_no_steps() -> None:
    engine = Engine()
    engine.run(4 * CHECK_STEPS)
    for _ in range(200):
        engine.run(8)
        engine.now += 5.0
        engine.run(1, tokens=SLOT_TOKENS + 900)
    assert engine.seen[-1][0] is not Phase.OFF
    assert max(seconds for times in engine.switch._times.values() for seconds in times) < 0.02


def test_sizes_are_exact_for_few_tokens() -> None:
    assert [size_of(tokens) for tokens in range(1, 9)] == list(range(1, 9))
    sizes = [size_of(tokens) for tokens in range(1, SLOT_TOKENS + 1)]
    assert sizes == sorted(sizes)
    assert len(set(sizes)) == 20
    assert all(size <= tokens < 1.34 * size for tokens, size in enumerate(sizes, 1))

"""When slots for experts are used: predicted from a book that nobody follows, then measured.

Steps with slots are compared with steps without, of as many tokens, by the host's clock between
their beginnings.  While slots are used, a few steps now and then find none in them, so that both
are of the same time.
"""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from enum import Enum

from placement.plan.expert_slots import SlotCounts, SlotRates, step_with_slots
from ray_hetero.log import logger

SLOT_TOKENS = 64
"""Tokens of the largest step that finds experts in slots.  Larger ones use nearly all experts of a
layer, of which slots hold few; the books do not count them either."""
PROMISE = 0.9
"""Share of the time of a step without slots, at most, that one with them has to be predicted to
take before they are tried."""
GAIN = 0.97
"""Share that it has to be measured to take for them to go on."""
CHECK_STEPS = 64
"""Steps without slots between two predictions, each of as many steps."""
FILL_STEPS = 256
"""Steps in which slots are filled before their steps are measured; and between two comparisons."""
PAUSE_STEPS = 10
"""Steps without slots among those with them, to compare with."""
PAUSE_EVERY = 2048
"""Steps from one such pause to the next."""
FIRST_REST, LONGEST_REST = 4096, 1 << 17
"""Steps before slots are tried again that were not worth it: at first, and after several times,
each of which doubles the rest."""
UNSETTLED = 2
"""Steps behind a change that are not measured: others were on their way."""
KEPT, NEEDED = 16, 6
"""Measured steps of a size that are kept, as many as of two pauses, and least number to compare."""
EXACT = 8
"""Tokens up to which each number of them is a size; then there are four to each doubling."""
LONGEST_S = 1.0
"""Longest time between two steps, in seconds, that can be a step's: else nothing was asked for."""


class Phase(Enum):
    """How steps use slots."""

    OFF = "off"
    """Not at all: they are given up."""
    ON = "on"
    PAUSED = "paused"
    """Steps find none of the experts that slots hold."""


@dataclass(frozen=True)
class SlotSums:
    """Sums over the steps that an expert rank has counted, and the hits of its book of slots."""

    steps: int = 0
    layers: int = 0
    computing_s: float = 0.0
    """Seconds in which the sockets compute experts."""
    waiting_s: float = 0.0
    """Seconds of the rest of these steps."""
    experts: int = 0
    hits: int = 0
    copies: int = 0

    @classmethod
    def of(cls, given: Sequence[int]) -> SlotSums:
        """Sums from the words of a channel, whose times are in nanoseconds."""
        steps, layers, computing_ns, waiting_ns, experts, hits, copies = given
        return cls(steps, layers, 1e-9 * computing_ns, 1e-9 * waiting_ns, experts, hits, copies)

    def __sub__(self, before: SlotSums) -> SlotSums:
        pairs = zip(astuple(self), astuple(before), strict=True)
        return SlotSums(*(now - then for now, then in pairs))

    @property
    def of_a_step(self) -> SlotCounts:
        """Averages; there is at least one step."""
        return SlotCounts(
            computing_s=self.computing_s / self.steps,
            others_s=self.waiting_s / self.steps,
            layers=self.layers / self.steps,
            read=self.experts / self.steps,
            hits=self.hits / self.steps,
            copies=self.copies / self.steps,
        )


class SlotSwitch:
    """Turns slots on and off.

    Args:
        rates: of the GPU; None where nothing is known of it, and slots are tried without a
            prediction.

    """

    def __init__(self, rates: SlotRates | None) -> None:
        self._rates = rates
        self._phase = Phase.OFF
        self._steps = 0
        self._since = 0
        self._last_at: float | None = None
        self._last_tokens = 0
        self._checked: SlotSums | None = None
        self._next_try, self._rest = CHECK_STEPS, FIRST_REST
        self._times: dict[tuple[bool, int], deque[float]] = {}
        self._recent: Counter[int] = Counter()
        self._is_filled = False
        self._paused_at = 0

    def step(self, tokens: int, now: float, sums: SlotSums) -> Phase:
        """Phase of the step that begins now.

        Args:
            tokens: of it.
            now: in seconds, of a clock that only goes forward.
            sums: so far.

        """
        self._measure(now)
        self._steps += 1
        self._last_at, self._last_tokens = now, tokens
        if tokens <= SLOT_TOKENS:
            self._recent[size_of(tokens)] += 1
        if self._phase is Phase.OFF:
            self._look(sums)
        elif self._phase is Phase.PAUSED:
            if self._age > PAUSE_STEPS:
                self._go_on(Phase.ON)
        elif self._age % FILL_STEPS == 0:
            self._judge()
        return self._phase

    @property
    def _age(self) -> int:
        return self._steps - self._since

    def _measure(self, now: float) -> None:
        """Count the step that has passed."""
        if self._last_at is None or self._age < UNSETTLED or now - self._last_at > LONGEST_S:
            return
        if self._last_tokens > SLOT_TOKENS:
            return
        key = self._phase is Phase.ON, size_of(self._last_tokens)
        self._times.setdefault(key, deque(maxlen=KEPT)).append(now - self._last_at)

    def _go_on(self, phase: Phase) -> None:
        self._phase, self._since = phase, self._steps

    def _look(self, sums: SlotSums) -> None:
        """Try slots if the book without orders promises enough."""
        if self._steps < self._next_try:
            return
        self._next_try = self._steps + CHECK_STEPS
        before_these, self._checked = self._checked, sums
        if before_these is None:
            return
        new = sums - before_these
        if new.steps < CHECK_STEPS // 2 or not new.experts:
            return
        counts = new.of_a_step
        before = counts.computing_s + counts.others_s
        after = PROMISE * before
        if self._rates is not None:
            after = step_with_slots(counts, self._rates)
        if after > PROMISE * before:
            return
        logger.info(
            "slots for experts are used from now on: they would hold %.0f %% of the experts that "
            "%.1f ms of a step read (experts.slots)",
            100 * counts.hits / counts.read,
            1000 * before,
        )
        self._go_on(Phase.ON)
        self._paused_at, self._is_filled = self._steps, False

    def _judge(self) -> None:
        """Compare steps with slots and without; give slots up that do not pay."""
        if not self._is_filled:
            # What was measured meanwhile are steps that found few experts.
            self._is_filled = True
            self._times = {key: times for key, times in self._times.items() if not key[0]}
            self._recent.clear()
            return
        found, is_known = self._compared()
        self._recent.clear()
        if found > GAIN:
            logger.info(
                "slots for experts are given up for %d steps: with them a step takes %.2f times as "
                "long as without (experts.slots)",
                self._rest,
                found,
            )
            self._next_try, self._checked = self._steps + self._rest, None
            self._rest = min(2 * self._rest, LONGEST_REST)
            self._go_on(Phase.OFF)
        elif self._steps - self._paused_at >= (PAUSE_EVERY if is_known else 2 * FILL_STEPS):
            self._paused_at = self._steps
            self._go_on(Phase.PAUSED)

    def _compared(self) -> tuple[float, bool]:
        """Time of the steps since the last comparison as a share of the time without slots, 0 if
        nothing can be compared; and whether most of them could be.
        """
        taken = without = 0.0
        known = 0
        for size, count in self._recent.items():
            pair = [self._times.get((is_on, size), ()) for is_on in (True, False)]
            if min(map(len, pair)) < NEEDED:
                continue
            known += count
            taken += count * statistics.median(pair[0])
            without += count * statistics.median(pair[1])
        is_known = 2 * known >= self._recent.total()
        return (taken / without if without else 0.0), is_known


def size_of(tokens: int) -> int:
    """Least tokens of the steps that are compared with one of so many."""
    step = max(1, (1 << (tokens - 1).bit_length()) // EXACT)
    return tokens if tokens <= EXACT else (tokens - 1) // step * step + 1

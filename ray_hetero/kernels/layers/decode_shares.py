"""Shares of layers that a GPU computes in decode steps, and how the fastest are found.

The steps themselves are in shared_decode.py, which measures them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ray_hetero.kernels.layers.layer_parts import KeptBlocks
from ray_hetero.log import logger

LATE_LAYERS = 2
"""Most layers that are measured as the last ones: those that the GPU has room for."""
COLUMN_PARTS = 16
"""Parts that the columns of an MLP are shared out in."""
OUTPUT_PARTS = 12
"""Sixteenths of the outputs of an MLP that can be given away behind all of its columns."""
MOST_PARTS = COLUMN_PARTS + OUTPUT_PARTS
"""Most parts of both."""
COARSE = 4
"""Numbers of layers, or of parts of columns, of which one is measured before those beside it."""
WORSE = 1.03
"""Factor on the best time up to then, beyond which no more layers are tried.  Of columns all coarse
numbers are tried: there are few, and one that another program has slowed down ends nothing."""
GAIN = 0.9
"""Share of the time of the cores alone above which nothing is given away.  A start beside other
programs measured 0.93 at one token; in the engine, whose requests use memory and link too, such
steps took 1.17 times as long as those of two ranks that gave nothing away."""
CONFIRMED = 2
"""Most choices that are measured again."""
CONFIRMATIONS = 3
"""Times that a choice is measured again beside the cores alone, in turns: another program that used
the cores for a moment has made one of the two slow, and would decide for as long as the engine
runs."""

SLOWER = 1.15
"""Factor on the time of the cores alone with more tokens, above which the same with fewer is not
believed: a virtual machine's host had taken cores away for seconds, which no process here shows.  A
start that took 150 ms for a step of one token, and 31 for one of eight, gave away eight layers."""

OWN_CORES = 0.8
"""Least share of its threads' cores that a step of the cores alone must have had to be believed."""
JUDGED_S = 0.005
"""Least seconds of a step of which that is known: the kernel accounts for a core at its ticks."""

TRIES = 20
"""Steps that are measured again all together because other programs had some of the cores."""
PAUSE_S = 0.25
"""Pause before one is measured again, in seconds."""


class DisturbedError(Exception):
    """Error of a measurement during which other programs compute on the same cores."""


@dataclass(frozen=True)
class Share:
    """What is given away in steps of some number of tokens."""

    tokens: int
    """Tokens of the step that was measured."""
    of_layers: float = 0.0
    """Share of all layers, which are evenly among them."""
    last: int = 0
    """Number of the last layers that are given away instead.

    The GPU has room for the weights of about two layers, which come while other stages compute.
    The last layers take these, and nothing crosses the link while the cores read theirs.
    """
    columns: int = 0
    """Parts, of `COLUMN_PARTS`, of the columns of every layer's gate and up instead.

    The GPU computes them while the cores compute the others, and no core waits for whole layers.
    What is more are sixteenths of the MLP's outputs, besides all columns.
    """
    gain_s: float = field(default=0.0, compare=False)
    """Seconds of each layer of a step that it takes less than with the cores alone, measured."""

    def __str__(self) -> str:
        """For people."""
        given = f"the last {self.last}" if self.last else f"{100 * self.of_layers:.0f} %"
        if self.columns:
            given = parts_text(self.columns, " of every gate and up")
        return f"{self.tokens}: {given}"


@dataclass(frozen=True)
class Shares:
    """Share of the layers that is given away, by tokens of a step."""

    measured: tuple[Share, ...]
    """Shares that were measured, by tokens, ascending."""

    def of(self, tokens: int) -> Share:
        """The share for a step of so many tokens: that of the nearest size, by their ratio.

        None is given away of a step with fewer tokens than were measured.
        """
        if not self.measured or tokens < self.measured[0].tokens:
            return Share(0)
        return min(self.measured, key=lambda one: max(one.tokens, tokens) / min(one.tokens, tokens))

    @property
    def is_empty(self) -> bool:
        """Whether no step gives anything away."""
        return not any(one.of_layers or one.last or one.columns for one in self.measured)

    def __str__(self) -> str:
        """For people, by tokens."""
        return "; ".join(map(str, self.measured))


Way = Literal["evenly", "last", "columns"]
"""Kind of what is given away: layers evenly among all, the last ones, or parts of all columns."""

Seconds = Callable[[int, int, Way], float]
"""Function that gives the seconds of a step by its tokens, and by how much of what it gives away;
infinite where other programs had some of the cores."""


def most_parts(output_blocks: int) -> int:
    """Most parts that can be given away of MLPs with so many blocks of outputs to share out."""
    return MOST_PARTS if output_blocks > 1 else COLUMN_PARTS


def kept_blocks(columns: int, outputs: int, parts: int) -> KeptBlocks:
    """Blocks that the cores compute of MLPs of which the GPU has so many parts.

    Args:
        columns: blocks of an MLP's columns.
        outputs: blocks of its outputs that can be shared out.
        parts: as of `Share.columns`.

    """
    own = _left(columns, min(parts, COLUMN_PARTS))
    more = min(parts, most_parts(outputs)) - COLUMN_PARTS
    return KeptBlocks(own) if more <= 0 else KeptBlocks(own, _left(outputs, more))


def _left(blocks: int, parts: int) -> int:
    """Blocks that are left of all where so many parts are given away; at least one, and not all."""
    return min(max(1, blocks - round(blocks * parts / COLUMN_PARTS)), blocks - 1)


def parts_text(parts: int, of: str = "") -> str:
    """Parts of columns, and of outputs, for people.

    Args:
        parts: as of `Share.columns`.
        of: text behind those of columns.

    """
    more = f", {parts - COLUMN_PARTS} of {COLUMN_PARTS} of down" if parts > COLUMN_PARTS else ""
    return f"{min(parts, COLUMN_PARTS)} of {COLUMN_PARTS} parts{of}{more}"


def had_cores(passed_s: float, used_s: float, threads: int) -> bool:
    """Whether threads had their cores for themselves in a step.

    Args:
        passed_s: seconds of the step; short ones are not judged.
        used_s: processor seconds that this process has used meanwhile.
        threads: that compute, and look for work all the time.

    """
    return passed_s < JUDGED_S or used_s >= OWN_CORES * threads * passed_s


def undisturbed(seconds: Seconds, pause: Callable[[float], None] = time.sleep) -> Seconds:
    """Measure a step again, after a pause, where other programs had some of the cores.

    Another engine that starts on the same cores makes steps take several times as long for half a
    minute, and what was chosen then would stay for as long as this engine runs.

    Args:
        seconds: measures a step; in a group the same on all ranks.
        pause: waits for so many seconds.

    Returns:
        The same for finite times.  It raises DisturbedError after `TRIES` others.

    """
    tries = 0

    def measured(tokens: int, count: int, way: Way) -> float:
        nonlocal tries
        while math.isinf(found := seconds(tokens, count, way)):
            if tries == TRIES:
                raise DisturbedError
            tries += 1
            pause(PAUSE_S)
        return found

    return measured


def best_shares(
    seconds: Seconds, layers: int, asked: Sequence[int], parts: int = 0
) -> Shares:  # fmt: skip
    """Choose shares by the time of steps, and say so.

    Args:
        seconds: measures a step.
        layers: of the step.
        asked: tokens of steps, ascending.  The more tokens, the more is given away.
        parts: most parts of columns that can be given away.

    """
    found: dict[int, _Choice] = {}

    def choice(place: int) -> _Choice:
        fewer = [one for at, one in found.items() if at < place]
        least = max([1, *(one.evenly for one in fewer)])
        least_parts = max([1, *(one.count for one in fewer if one.way == "columns")])
        tokens = asked[place]
        return _choice(lambda *step: seconds(tokens, *step), (least, layers), (least_parts, parts))

    # Where two sizes give the same away, one in between does so too and is not measured.
    for place in [*range(0, len(asked), 2), *range(1, len(asked), 2)]:
        below, above = place - 1, place + 1
        if place % 2 and above < len(asked) and found[below].same(found[above]):
            found[place] = found[below]
            continue
        found[place] = choice(place)
    for place in reversed(range(len(asked) - 1)):
        if found[place].alone > SLOWER * found[place + 1].alone:
            found[place] = choice(place)
        if (
            found[place].alone > SLOWER * found[place + 1].alone
            # Fewer tokens never take longer with what more of them give away.
            or found[place].best > found[place + 1].best
        ):
            found[place] = found[place + 1]
    chosen = [found[place] for place in range(len(asked))]
    logger.info(
        "decode steps of %d layers take least time if the GPU computes the output and MLP matrices "
        "of this many of them, or these parts of every gate and up, by number of tokens: %s "
        "(cpu.decode_gpu_share)",
        layers,
        "; ".join(f"{tokens}: {one}" for tokens, one in zip(asked, chosen, strict=True)),
    )
    return Shares(
        tuple(one.share(tokens, layers) for tokens, one in zip(asked, chosen, strict=True))
    )


@dataclass(frozen=True)
class _Choice:
    """What a size of steps gives away."""

    count: int
    way: Way
    alone: float
    """Seconds of the cores alone."""
    best: float

    @property
    def evenly(self) -> int:
        """Layers that are evenly among all."""
        return self.count if self.way == "evenly" else 0

    def same(self, other: _Choice) -> bool:
        """Whether both give the same away."""
        return (self.count, self.way) == (other.count, other.way)

    def share(self, tokens: int, layers: int) -> Share:
        """The share of steps of about so many tokens."""
        gain_s = (self.alone - self.best) / layers
        if self.way == "evenly":
            return Share(tokens, self.count / layers, gain_s=gain_s)
        return Share(tokens, **{self.way: self.count}, gain_s=gain_s)

    def __str__(self) -> str:
        way = {
            "evenly": f"{self.count}",
            "last": f"{self.count} (the last)",
            "columns": parts_text(self.count),
        }[self.way]
        return f"{way}, {1e3 * self.alone:.1f} to {1e3 * self.best:.1f} ms"


def _choice(
    seconds: Callable[[int, Way], float], layers: tuple[int, int], parts: tuple[int, int]
) -> _Choice:
    """The choice for steps of one size.

    Args:
        seconds: measures one.
        layers: least and most that are evenly given away.
        parts: of columns, likewise; none where the most is 0.

    """
    alone = seconds(0, "evenly")
    late = {
        count: seconds(count, "last") for count in range(1, min(LATE_LAYERS, layers[1]) + 1)
    }  # fmt: skip
    taken: dict[Way, dict[int, float]] = {
        "last": late,
        "evenly": _by_count(lambda count: seconds(count, "evenly"), *layers, worse=WORSE),
        "columns": _by_count(lambda count: seconds(count, "columns"), *parts) if parts[1] else {},
    }
    # The best one of each way, of which two are measured again.
    found = {
        (min(times, key=times.__getitem__), way): min(times.values())
        for way, times in taken.items()
        if times
    }
    ahead = sorted(found, key=found.__getitem__)[:CONFIRMED]
    found = {step: found[step] for step in ahead if found[step] <= GAIN * alone}
    for _ in range(CONFIRMATIONS if found else 0):
        alone = min(alone, seconds(0, "evenly"))
        found = {step: min(best, seconds(*step)) for step, best in found.items()}
    (count, way), best = min(found.items(), key=lambda one: one[1], default=((0, "evenly"), alone))
    if best > GAIN * alone:
        return _Choice(0, "evenly", alone, alone)
    return _Choice(count, way, alone, best)


def _by_count(
    seconds: Callable[[int], float], least: int, most: int, worse: float = math.inf
) -> dict[int, float]:
    """Time of steps by number of layers or parts: of every fourth number, until that takes `worse`
    times as long as the best, and of those beside the best one, first two away and then one."""
    taken: dict[int, float] = {}
    best = float("inf")
    for count in sorted({*range(max(COARSE, least), most + 1, COARSE), most}):
        taken[count] = seconds(count)
        if taken[count] > worse * best:
            break
        best = min(best, taken[count])
    for distance in (2, 1):
        count = min(taken, key=lambda one: taken[one])
        for beside in (count - distance, count + distance):
            if least <= beside <= most and beside not in taken:
                taken[beside] = seconds(beside)
    return taken

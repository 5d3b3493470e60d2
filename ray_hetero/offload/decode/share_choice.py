"""Shares of MLPs that a GPU computes in decode steps, and how the fastest are found.

The steps themselves are in shared_decode.py, which measures them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ray_hetero.kernels.layers.layer_parts import CpuBlocks
from ray_hetero.log import logger

COLUMN_PARTS = 16
"""Parts that the columns of an MLP are shared out in."""
OUTPUT_PARTS = 12
"""Sixteenths of the outputs of an MLP that can be given away behind all of its columns."""
MOST_PARTS = COLUMN_PARTS + OUTPUT_PARTS
"""Most parts of both."""
COARSE = 4
"""Number of parts of columns, of which one is measured before those beside it."""
GAIN = 0.9
"""Share of the time of the cores alone above which nothing is given away.  A start beside other
programs measured 0.93 at one token; in the engine, whose requests use memory and link too, such
steps took 1.17 times as long as those of two ranks that gave nothing away."""
CONFIRMATIONS = 3
"""Times that a choice is measured again beside the cores alone, in turns: another program that used
the cores for a moment has made one of the two slow, and would decide for as long as the engine
runs."""

SLOWER = 1.15
"""Factor on the time of the cores alone with more tokens, above which the same with fewer is not
believed: a virtual machine's host had taken cores away for seconds, which no process here shows.  A
start took 150 ms for a step of one token, and 31 for one of eight."""

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
    """Share of a decode step of some number of tokens that the GPU computes."""

    tokens: int
    """Tokens of the step that was measured."""
    columns: int = 0
    """Parts, of `COLUMN_PARTS`, of the columns of every layer's gate and up.

    The GPU computes them while the cores compute the others.  What is more are sixteenths of the
    MLP's outputs, besides all columns.
    """
    gain_s: float = field(default=0.0, compare=False)
    """Seconds of each layer of a step that it takes less than with the cores alone, measured."""

    def __str__(self) -> str:
        """For people."""
        given = parts_text(self.columns, " of every gate and up") if self.columns else "nothing"
        return f"{self.tokens}: {given}"


@dataclass(frozen=True)
class Shares:
    """Share of every MLP that is given away, by tokens of a step."""

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
        return not any(one.columns for one in self.measured)

    def __str__(self) -> str:
        """For people, by tokens."""
        return "; ".join(map(str, self.measured))


Seconds = Callable[[int, int], float]
"""Function that gives the seconds of a step by its tokens, and by the parts that it gives away;
infinite where other programs had some of the cores."""


def most_parts(output_blocks: int) -> int:
    """Most parts that can be given away of MLPs with so many blocks of outputs to share out."""
    return MOST_PARTS if output_blocks > 1 else COLUMN_PARTS


def kept_blocks(columns: int, outputs: int, parts: int) -> CpuBlocks:
    """Blocks that the cores compute of MLPs of which the GPU has so many parts.

    Args:
        columns: blocks of an MLP's columns.
        outputs: blocks of its outputs that can be shared out.
        parts: as of `Share.columns`.

    """
    own = _left(columns, min(parts, COLUMN_PARTS))
    more = min(parts, most_parts(outputs)) - COLUMN_PARTS
    return CpuBlocks(own) if more <= 0 else CpuBlocks(own, _left(outputs, more))


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

    def measured(tokens: int, parts: int) -> float:
        nonlocal tries
        while math.isinf(found := seconds(tokens, parts)):
            if tries == TRIES:
                raise DisturbedError
            tries += 1
            pause(PAUSE_S)
        return found

    return measured


def best_shares(seconds: Seconds, layers: int, asked: Sequence[int], parts: int) -> Shares:
    """Choose shares by the time of steps, and say so.

    Args:
        seconds: measures a step.
        layers: of the step.
        asked: tokens of steps, ascending.  The more tokens, the more is given away.
        parts: most parts that can be given away.

    """
    found: dict[int, _Choice] = {}

    def choice(place: int) -> _Choice:
        least = max([1, *(one.parts for at, one in found.items() if at < place)])
        return _choice(lambda given: seconds(asked[place], given), least, parts)

    # Where two sizes give the same away, one in between does so too and is not measured.
    for place in [*range(0, len(asked), 2), *range(1, len(asked), 2)]:
        below, above = place - 1, place + 1
        if place % 2 and above < len(asked) and found[below].parts == found[above].parts:
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
        "decode steps of %d layers take least time if the GPU computes these parts of every gate "
        "and up, by number of tokens: %s (cpu.decode_gpu_share)",
        layers,
        "; ".join(f"{tokens}: {one}" for tokens, one in zip(asked, chosen, strict=True)),
    )
    return Shares(
        tuple(one.share(tokens, layers) for tokens, one in zip(asked, chosen, strict=True))
    )


@dataclass(frozen=True)
class _Choice:
    """Parts that a size of steps gives away."""

    parts: int
    alone: float
    """Seconds of the cores alone."""
    best: float

    def share(self, tokens: int, layers: int) -> Share:
        """The share of steps of about so many tokens."""
        return Share(tokens, self.parts, gain_s=(self.alone - self.best) / layers)

    def __str__(self) -> str:
        given = parts_text(self.parts) if self.parts else "none"
        return f"{given}, {1e3 * self.alone:.1f} to {1e3 * self.best:.1f} ms"


def _choice(seconds: Callable[[int], float], least: int, most: int) -> _Choice:
    """The choice for steps of one size.

    Args:
        seconds: measures one that gives so many parts away.
        least: parts that are given away, if any are.
        most: the same.

    """
    alone = seconds(0)
    taken = _by_parts(seconds, least, most)
    parts = min(taken, key=taken.__getitem__)
    best = taken[parts]
    for _ in range(CONFIRMATIONS if best <= GAIN * alone else 0):
        alone = min(alone, seconds(0))
        best = min(best, seconds(parts))
    return _Choice(parts, alone, best) if best <= GAIN * alone else _Choice(0, alone, alone)


def _by_parts(seconds: Callable[[int], float], least: int, most: int) -> dict[int, float]:
    """Time of steps by parts: of every fourth number, and of those beside the best one, first two
    away and then one.

    All numbers of the first are tried: there are few, and one that another program has slowed down
    ends nothing.
    """
    coarse = sorted({*range(max(COARSE, least), most + 1, COARSE), most})
    taken = {parts: seconds(parts) for parts in coarse}
    for distance in (2, 1):
        parts = min(taken, key=taken.__getitem__)
        for beside in (parts - distance, parts + distance):
            if least <= beside <= most and beside not in taken:
                taken[beside] = seconds(beside)
    return taken

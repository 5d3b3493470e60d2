"""Run the warm-up schedule on all ranks and watch every step of it.

Each stage runs its own list of steps without waiting for the other stages.  A rank that is late,
or acknowledges another step than it was sent, is named together with the step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ray_hetero.errors import RankError
from ray_hetero.executor.rank_set import RankSet
from ray_hetero.observability.progress import StartupProgress
from ray_hetero.worker import warmup_schedule
from ray_hetero.worker.warmup_schedule import Phase, Step, WarmupSizes
from ray_hetero.world import World

POLL_SECONDS = 0.05


@dataclass
class _Progress:
    done: int
    since: float


def run_schedule(
    ranks: RankSet,
    world: World,
    steps: Sequence[Sequence[Step]],
    *,
    step_timeout_s: float,
    on_step: Callable[[int, Step], None] = lambda rank, step: None,
    look: Callable[[], str] = lambda: "",
) -> dict[int, dict[int, Any]]:
    """Run all steps and collect their values.

    Args:
        ranks: the connection to the ranks.
        world: who is on which stage.
        steps: the schedule, by stage.
        step_timeout_s: longest wait for one step on one rank.
        on_step: called with rank and step as each is done.
        look: what the ranks are doing, for the message about a late one.

    Returns:
        Values by rank and step number.

    Raises:
        RankError: a rank is late, on another step, or answered with an error.

    """
    ranks.send_steps(steps)
    values: dict[int, dict[int, Any]] = {seat.rank: {} for seat in world.seats}
    progress = {seat.rank: _Progress(0, time.monotonic()) for seat in world.seats}
    while pending := [s for s in world.seats if progress[s.rank].done < len(steps[s.stage])]:
        for seat in pending:
            state = progress[seat.rank]
            step = steps[seat.stage][state.done]
            try:
                answer = ranks.next_answer(seat.rank, POLL_SECONDS)
            except TimeoutError:
                _check_late(world, progress, seat.rank, step, step_timeout_s, look)
                continue
            _check_same(world, seat.rank, step, answer.step)
            values[seat.rank][step.number] = answer.value
            progress[seat.rank] = _Progress(state.done + 1, time.monotonic())
            on_step(seat.rank, step)
    return values


def _check_same(world: World, rank: int, expected: Step, acknowledged: int) -> None:
    if acknowledged != expected.number:
        raise RankError(
            f"warm-up: {world.describe(rank)} acknowledged step {acknowledged}, "
            f"expected {expected}. The ranks run different schedules."
        )


def _check_late(
    world: World,
    progress: dict[int, _Progress],
    rank: int,
    step: Step,
    timeout_s: float,
    look: Callable[[], str],
) -> None:
    waited = time.monotonic() - progress[rank].since
    if waited <= timeout_s:
        return
    others = ", ".join(
        f"rank {other}: {state.done} steps done" for other, state in sorted(progress.items())
    )
    raise RankError(
        f"warm-up: {world.describe(rank)} did not finish {step} in {waited:.0f} s "
        f"(warmup.step_timeout_s = {timeout_s:g}). {others}. Look at that rank's log, or raise "
        f"the limit. {look()}"
    )


def warm_up(
    ranks: RankSet,
    world: World,
    sizes: WarmupSizes,
    phase: Phase,
    progress: StartupProgress,
    step_timeout_s: float,
) -> dict[int, dict[int, Any]]:
    """Run a phase of the schedule on all ranks.

    Args:
        ranks: those that are connected.
        world: who is on which stage.
        sizes: of the engine, which the schedule depends on.
        phase: which half of it.
        progress: where it is shown.
        step_timeout_s: longest wait for one step on one rank.

    Returns:
        Values by rank and step number.

    Raises:
        RankError: a rank is late, or fails; all ranks are ended then.

    """
    steps = warmup_schedule.schedule(world.layout, sizes, phase, has_boundary=world.has_boundary)
    total = len(steps[0]) * world.layout.world_size
    with progress.step("warm up", total=total) as bar:
        bar.outcome = phase.value
        progress.times.ranks_begin()

        def is_done(rank: int, step: Step) -> None:
            bar.advance()
            progress.times.rank_is_done("warm up", step.action.value, rank)

        try:
            answers = run_schedule(
                ranks,
                world,
                steps,
                step_timeout_s=step_timeout_s,
                on_step=is_done,
                look=ranks.look,
            )
        except RankError as error:
            raise ranks.fail(str(error)) from None
    ranks.warmed_up()
    return answers

"""The warm-up of all ranks as the driver runs it: with a bar, times, and an error that ends it."""

from __future__ import annotations

from typing import Any

from ray_hetero.errors import RankError
from ray_hetero.executor.lockstep import run_schedule
from ray_hetero.executor.rank_set import RankSet
from ray_hetero.observability.progress import StartupProgress
from ray_hetero.worker import warmup_schedule
from ray_hetero.worker.warmup_schedule import Phase, Step, WarmupSizes
from ray_hetero.world import World


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

"""The driver's side of warm-up: who is late, and who is on another step, is named."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from worlds import world

from ray_hetero.errors import RankError
from ray_hetero.executor.lockstep import run_schedule
from ray_hetero.worker.warmup_actions import Acknowledged
from ray_hetero.worker.warmup_schedule import Phase, Step, WarmupSizes, schedule
from ray_hetero.world import World

SIZES = WarmupSizes(max_num_batched_tokens=512, max_num_seqs=64, cpu_compiles=True)


class FakeRanks:
    """Ranks that do their steps at once, unless `fault` says otherwise for a rank and a step."""

    def __init__(self, world: World, fault: Callable[[int, Step], Any] = lambda rank, step: step):
        self.world, self.fault, self.todo = world, fault, {}

    def send_steps(self, per_stage: Sequence[Sequence[Step]]) -> None:
        self.todo = {seat.rank: deque(per_stage[seat.stage]) for seat in self.world.seats}

    def next_answer(self, rank: int, timeout_s: float) -> Acknowledged:
        done = self.fault(rank, self.todo[rank][0])
        if done is None:
            time.sleep(timeout_s)
            raise TimeoutError
        self.todo[rank].popleft()
        return Acknowledged(rank, done.number, (rank, done.number))


def run(ranks: FakeRanks, phase: Phase = Phase.MEMORY, **options: Any) -> dict[int, dict[int, Any]]:
    steps = schedule(ranks.world.layout, SIZES, phase, has_boundary=True)
    return run_schedule(ranks, ranks.world, steps, **{"step_timeout_s": 0.3, **options})


@pytest.mark.parametrize("stages", [("c",), ("c", "g"), ("gc", "gg"), ("cc", "gc", "gg")])
@pytest.mark.parametrize("phase", Phase)
def test_all_values_come_back_by_rank_and_step(stages: tuple[str, ...], phase: Phase) -> None:
    ranks, seen = FakeRanks(world(*stages)), []
    values = run(ranks, phase, on_step=lambda rank, step: seen.append((rank, step.number)))
    assert values == {
        rank: {number: (rank, number) for number in range(1, len(steps) + 1)}
        for rank, steps in (
            (seat.rank, schedule(ranks.world.layout, SIZES, phase, has_boundary=True)[seat.stage])
            for seat in ranks.world.seats
        )
    }
    assert sorted(seen) == sorted((rank, step) for rank, done in values.items() for step in done)
    assert not any(ranks.todo.values())


def test_a_late_rank_is_named_with_its_step() -> None:
    ranks = FakeRanks(world("gc", "cc"), lambda rank, step: None if (rank, step.number) == (3, 2)
                      else step)  # fmt: skip
    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        run(ranks)
    assert time.monotonic() - start < 5
    message = str(caught.value)
    assert ranks.world.describe(3) in message
    assert "rank 3 (cpu, socket 2" in message
    assert "step 2: size the KV cache" in message
    assert "warmup.step_timeout_s = 0.3" in message
    assert "rank 0: 2 steps done" in message
    assert "rank 3: 1 steps done" in message


def test_a_slow_rank_in_time_is_no_error() -> None:
    slow_until = time.monotonic() + 0.3
    ranks = FakeRanks(
        world("c", "g"),
        lambda rank, step: None if rank == 1 and time.monotonic() < slow_until else step,
    )
    assert set(run(ranks, step_timeout_s=5)) == {0, 1}


def test_a_rank_on_another_step_is_named() -> None:
    ranks = FakeRanks(
        world("c", "g"), lambda rank, step: Step(step.number + rank, step.action, step.tokens)
    )
    with pytest.raises(RankError, match=r"rank 1 \(gpu.*acknowledged step 2, expected step 1"):
        run(ranks)

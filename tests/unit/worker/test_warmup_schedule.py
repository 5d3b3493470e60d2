"""The warm-up schedule: ranks of a group in lockstep, stages by themselves."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from worlds import layout

from ray_hetero.worker.warmup_schedule import Action, Phase, Step, WarmupSizes, runs_ahead, schedule

EAGER = WarmupSizes(max_num_batched_tokens=512, max_num_seqs=64, cpu_compiles=False)
COMPILED = WarmupSizes(max_num_batched_tokens=512, max_num_seqs=64, cpu_compiles=True)
LAYOUTS = [
    stages
    for count in (1, 2, 3)
    for stages in product(("c", "g"), repeat=count)
] + [
    stages for count in (1, 2) for stages in product(("cc", "gg", "cg", "gc"), repeat=count)
]  # fmt: skip


def actions(steps: tuple[Step, ...]) -> list[tuple[Action, int]]:
    return [(step.action, step.tokens) for step in steps if step.action is not Action.IDLE]


@pytest.mark.parametrize("stages", LAYOUTS, ids="-".join)
@pytest.mark.parametrize("sizes", [EAGER, COMPILED], ids=["eager", "compiled"])
@pytest.mark.parametrize("phase", Phase)
def test_every_stage_answers_equally_often_and_counts_from_one(
    stages: tuple[str, ...], sizes: WarmupSizes, phase: Phase
) -> None:
    steps = schedule(layout(*stages), sizes, phase, has_boundary=True)
    assert len(steps) == len(stages)
    assert len({len(one) for one in steps}) == 1
    for one in steps:
        assert [step.number for step in one] == list(range(1, len(one) + 1))


@pytest.mark.parametrize("stages", LAYOUTS, ids="-".join)
@pytest.mark.parametrize("sizes", [EAGER, COMPILED], ids=["eager", "compiled"])
def test_every_stage_runs_the_model_once_and_sizes_its_kv_cache_once(
    stages: tuple[str, ...], sizes: WarmupSizes
) -> None:
    # Stock vLLM 0.32 leaves a CPU stage without buffers to receive into when it never runs.
    for one in schedule(layout(*stages), sizes, Phase.MEMORY, has_boundary=True):
        done = [step.action for step in one]
        assert {Action.MEASURE_MEMORY, Action.FORWARD} & set(done)
        answers = [a for a in done if a in (Action.MEASURE_MEMORY, Action.KV_BUDGET)]
        assert len(answers) == 1


@pytest.mark.parametrize(
    ("stages", "expected"),
    [
        (("c", "g"), [True, True]),
        (("g", "c", "g"), [True, True, True]),
        (("cc", "gg"), [True, True]),
        # The ranks of a mixed stage run in lockstep, by the schedule.
        (("cg", "g"), [False, True]),
        (("g", "cg"), [True, False]),
        # Ranks of one kind are ready at the same time.
        (("g", "gg"), [False, False]),
        (("c", "c"), [False, False]),
    ],
)
def test_stages_compile_as_soon_as_they_are_loaded(
    stages: tuple[str, ...], expected: list[bool]
) -> None:
    def ahead(**other: bool) -> list[bool]:
        asked = {"compiles": True, "has_others": False} | other
        return [runs_ahead(layout(*stages), at, **asked) for at in range(len(stages))]

    assert ahead() == expected
    # Nobody would answer such a pass.
    assert not any(ahead(has_others=True))
    # There is nothing to compile.
    assert not any(ahead(compiles=False))


def test_an_eager_cpu_stage_makes_one_short_pass() -> None:
    (steps,) = schedule(layout("cc"), EAGER, Phase.MEMORY, has_boundary=False)
    assert actions(steps) == [(Action.FORWARD, 1), (Action.KV_BUDGET, 0)]


def test_a_compiled_cpu_stage_compiles_at_the_largest_batch() -> None:
    (steps,) = schedule(layout("c"), COMPILED, Phase.MEMORY, has_boundary=False)
    assert actions(steps)[0] == (Action.FORWARD, 512)


@pytest.mark.parametrize("sizes", [EAGER, COMPILED], ids=["eager", "compiled"])
def test_a_mixed_group_never_does_what_only_one_kind_does(sizes: WarmupSizes) -> None:
    for phase in Phase:
        first, last = schedule(layout("gc", "cg"), sizes, phase, has_boundary=True)
        assert Action.STOCK_WARM_UP not in {step.action for step in (*first, *last)}
        assert Action.FORWARD not in {step.action for step in (*first, *last)}
    assert (Action.SAMPLE, 64) in actions(last)
    assert (Action.SAMPLE, 64) not in actions(first)


def test_no_more_requests_are_sampled_than_a_batch_holds() -> None:
    assert WarmupSizes(16, 64, cpu_compiles=False).sampled == 16
    assert WarmupSizes(64, 16, cpu_compiles=False).sampled == 16


def test_stages_that_cross_kinds_agree_on_their_boundary_behind_everything_else() -> None:
    for one in schedule(layout("g", "c"), EAGER, Phase.WARM_UP, has_boundary=True):
        assert [step.action for step in one] == [
            Action.STOCK_WARM_UP, Action.BOUNDARY, Action.FINISH
        ]  # fmt: skip
    (alone,) = schedule(layout("c"), EAGER, Phase.WARM_UP, has_boundary=False)
    assert Action.BOUNDARY not in {step.action for step in alone}


def test_a_shorter_list_is_filled_up() -> None:
    gpu, cpu = schedule(layout("g", "c"), EAGER, Phase.MEMORY, has_boundary=True)
    assert [step.action for step in gpu] == [Action.MEASURE_MEMORY, Action.IDLE]
    assert [step.action for step in cpu] == [Action.FORWARD, Action.KV_BUDGET]


def test_a_step_names_itself() -> None:
    step = Step(2, Action.FORWARD, 512)
    assert str(step) == "step 2: dummy forward pass of 512 tokens"
    assert str(Step(3, Action.FINISH)) == "step 3: finish"


def test_graphs_of_a_mixed_stage_are_captured_step_by_step_the_largest_first() -> None:
    sizes = replace(COMPILED, captured=(1, 2, 8))
    mixed, plain = schedule(layout("gc", "gg"), sizes, Phase.WARM_UP, has_boundary=True)
    captures = [(Action.CAPTURE, 8), (Action.CAPTURE, 2), (Action.CAPTURE, 1)]
    assert actions(mixed)[:3] == captures
    assert actions(plain)[0] == (Action.STOCK_WARM_UP, 0)
    assert not {action for action, _ in actions(plain)} & {Action.CAPTURE}

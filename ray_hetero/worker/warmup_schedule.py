"""The warm-up schedule: which dummy runs each stage makes, in which order.  Pure data.

Ranks that share a tensor-parallel group run the same steps with the same token counts; left to
their workers, a GPU rank profiles and captures where a CPU rank does nothing, and the first
all-reduce waits for ever.  Stages do not talk to each other during warm-up, so each stage runs
its own list without waiting for the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from placement.cluster.layout import Layout


class Action(Enum):
    """Action of a rank in one step."""

    MEASURE_MEMORY = "measure memory"
    """The worker's own memory measurement, with its profiling forward pass."""
    FORWARD = "dummy forward pass"
    """One forward pass of so many tokens, without attention metadata."""
    KV_BUDGET = "size the KV cache"
    """Answer how many bytes the KV cache may take; no forward pass."""
    SAMPLE = "dummy sampling"
    """One forward pass of so many one-token requests and the sampler on its output."""
    CAPTURE = "capture CUDA graphs"
    """GPU ranks of a mixed stage capture the parts of a step of so many tokens that lie between its
    collectives; CPU ranks make the same passes."""
    STOCK_WARM_UP = "compile and capture"
    """The worker's own warm-up: compile sizes, graph capture, sampler."""
    BOUNDARY = "agree on the stage boundary"
    """Agree with the neighbouring stages on what crosses between them; allocate its buffers."""
    FINISH = "finish"
    """Reset the seed that the dummy runs have used up."""
    IDLE = "nothing left to do"
    """Fills a shorter list up, so that every rank answers equally often."""


class Phase(Enum):
    """vLLM's two calls into the executor that warm-up belongs to."""

    MEMORY = "determine_available_memory"
    WARM_UP = "compile_or_warm_up_model"


@dataclass(frozen=True)
class Step:
    """One step of one stage."""

    number: int
    """Position in the stage's list, from 1; ranks acknowledge it."""
    action: Action
    tokens: int = 0

    def __str__(self) -> str:
        tokens = f" of {self.tokens} tokens" if self.tokens else ""
        return f"step {self.number}: {self.action.value}{tokens}"


@dataclass(frozen=True)
class WarmupSizes:
    """Sizes that the schedule depends on besides the layout."""

    max_num_batched_tokens: int
    max_num_seqs: int
    cpu_compiles: bool
    """Whether CPU ranks compile the model."""
    captured: tuple[int, ...] = ()
    """Tokens of the steps that GPU ranks of a mixed stage hold CUDA graphs of."""

    @property
    def sampled(self) -> int:
        """Most requests that are sampled in one step."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)


def runs_ahead(layout: Layout, stage: int, *, compiles: bool, has_others: bool) -> bool:
    """Whether the ranks of a stage make their largest forward pass as soon as they are loaded.

    They compile in it: GPU ranks while CPU ranks make their weights ready, and these while GPU
    ranks still compile.  All ranks of a stage are of one kind and answer alike, so that they meet
    in each other's collectives.  With expert ranks, or beside other engines of a data-parallel
    group, a pass would wait for those.

    Args:
        layout: kinds of all ranks.
        stage: of the ranks.
        compiles: whether they compile.
        has_others: whether there are such ranks or engines.

    """
    is_of_both = {"cpu", "gpu"} <= set(layout.kinds)
    return is_of_both and not layout.is_mixed(stage) and compiles and not has_others


def schedule(
    layout: Layout, sizes: WarmupSizes, phase: Phase, *, has_boundary: bool
) -> tuple[tuple[Step, ...], ...]:
    """The steps of each stage, by stage.

    Args:
        layout: kinds of all ranks.
        sizes: token counts.
        phase: before or after the KV cache exists.
        has_boundary: whether stages exchange tensors at the stage boundary.

    """
    last = len(layout.stages) - 1
    lists = [
        _memory(layout, stage, sizes)
        if phase is Phase.MEMORY
        else _warm_up(layout, stage, sizes, is_last=stage == last, has_boundary=has_boundary)
        for stage in range(len(layout.stages))
    ]
    longest = max(map(len, lists))
    return tuple(_numbered(steps + [(Action.IDLE, 0)] * (longest - len(steps))) for steps in lists)


def _memory(layout: Layout, stage: int, sizes: WarmupSizes) -> list[tuple[Action, int]]:
    if "gpu" in layout.stages[stage]:
        # GPU ranks profile at the largest batch inside their own measurement; CPU ranks of a
        # mixed stage make the same pass beside them.
        return [(Action.MEASURE_MEMORY, sizes.max_num_batched_tokens)]
    # A CPU stage that compiles nothing needs one short pass all the same: it makes the buffers that
    # later stages receive into, which stock vLLM 0.32 only makes on ranks that profile.
    tokens = sizes.max_num_batched_tokens if sizes.cpu_compiles else 1
    return [(Action.FORWARD, tokens), (Action.KV_BUDGET, 0)]


def _warm_up(
    layout: Layout, stage: int, sizes: WarmupSizes, *, is_last: bool, has_boundary: bool
) -> list[tuple[Action, int]]:
    steps: list[tuple[Action, int]] = []
    if layout.is_mixed(stage):
        # The largest first: smaller ones fit into the memory that it has taken.
        steps += [(Action.CAPTURE, tokens) for tokens in sorted(sizes.captured, reverse=True)]
        if is_last:
            steps.append((Action.SAMPLE, sizes.sampled))
    else:
        steps.append((Action.STOCK_WARM_UP, 0))
    if has_boundary:
        steps.append((Action.BOUNDARY, 0))
    return [*steps, (Action.FINISH, 0)]


def _numbered(actions: Sequence[tuple[Action, int]]) -> tuple[Step, ...]:
    return tuple(
        Step(number, action, tokens) for number, (action, tokens) in enumerate(actions, start=1)
    )

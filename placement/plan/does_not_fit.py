"""Message for a model that does not fit: the arithmetic of each rank and the nearest that fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from placement.plan.planner import Order, Planner
from placement.plan.stage_plan import RankPlan, Split
from placement.plan.workload import Workload, asked_sequences, asked_tokens
from placement.units import GIB
from placement.words import plural

MOST_STAGES = 4
"""Stages whose ranks are counted one by one in a message."""


def explain(planner: Planner, order: Order) -> str:
    """Message for a model that no split fits."""
    split = _least_wrong(planner, order)
    return "\n".join([*_lines(planner, split), _nearest(planner, order)])


def explain_given(planner: Planner, split: Split) -> str:
    """Message for a model that does not fit with the layers the user gave."""
    lines = _lines(planner, split)
    if len(split.layers) > 1:
        lines[0] = f"layers {list(split.layers)}: {lines[0]}"
    better = planner.best("fixed")
    if better is not None:
        fits = f'Type "layers": {list(better.layers)}, which fit, or leave layers out.'
        return "\n".join([*lines, fits])
    return "\n".join([*lines, _nearest(planner, "fixed")])


def brief(planner: Planner) -> str:
    """Message for a model that does not fit, without the arithmetic."""
    return f"{planner.shape.model_type} does not fit: {_asked(planner)}"


def _lines(planner: Planner, split: Split) -> list[str]:
    """The worst rank, what was asked for, and the arithmetic of each rank."""
    worst = max(split.ranks, key=lambda rank: rank.memory.total - rank.device.usable_bytes)
    head = (
        f"{planner.shape.model_type} does not fit: {_gib(worst.memory.total)} needed, "
        f"{_gib(worst.device.usable_bytes)} available on {worst.device.label} of "
        f"{worst.device.node}"
    )
    return [head, f"  asked for: {_asked(planner)}", *map(_arithmetic, split.ranks)]


def _asked(planner: Planner) -> str:
    work, shape = planner.work, planner.shape
    sizes = " and ".join(plural(stage.size, "rank") for stage in planner.stages[:MOST_STAGES])
    more = " and more" if len(planner.stages) > MOST_STAGES else ""
    return (
        f"{plural(len(shape.layers), 'layer')}, {_gib(shape.weight_bytes)} of weights, KV cache "
        f"for {plural(asked_sequences(work), 'sequence')} of {asked_tokens(work):,} tokens, on "
        f"{plural(len(planner.stages), 'stage')} of {sizes}{more}"
    )


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:,.1f} GiB"


def _arithmetic(rank: RankPlan) -> str:
    memory, device = rank.memory, rank.device
    parts = (
        f"weights {memory.weights / GIB:.1f} + KV {memory.kv / GIB:.1f} + activations "
        f"{memory.activations / GIB:.1f} + runtime {memory.runtime / GIB:.1f} = "
        f"{_gib(memory.total)}"
    )
    over = memory.total - device.usable_bytes
    verdict = f"{_gib(over)} short" if over > 0 else "fits"
    if device.kv_limit_bytes is not None and memory.kv > device.kv_limit_bytes:
        verdict = f"KV over its limit of {_gib(device.kv_limit_bytes)}"
    place = f"{device.node} {device.label}"
    return f"  rank {rank.rank} ({place}): {parts} of {_gib(device.usable_bytes)}: {verdict}"


def _least_wrong(planner: Planner, order: Order) -> Split:
    """The split with the smallest overrun of its worst rank, to show the arithmetic on."""

    # With room added to every rank in equal steps, the first split that fits is it.
    def with_more(extra: int) -> Planner:
        stages = tuple(
            replace(
                stage,
                ranks=tuple(
                    replace(
                        rank,
                        usable_bytes=rank.usable_bytes + extra,
                        kv_limit_bytes=None,
                    )
                    for rank in stage.ranks
                ),
            )
            for stage in planner.stages
        )
        return replace(planner, stages=stages)

    steps = _smallest(lambda i: with_more(i * GIB // 16).fits(order), _total_need(planner))
    found = with_more(steps * GIB // 16).best(order)
    assert found is not None
    return planner.build(found.order, found.layers)


def _total_need(planner: Planner) -> int:
    everything = planner.build(
        range(len(planner.stages)),
        (len(planner.shape.layers) - len(planner.stages) + 1,) + (1,) * (len(planner.stages) - 1),
    )
    return 16 * (1 + sum(rank.memory.total for rank in everything.ranks) // GIB)


def _smallest(is_enough: Callable[[int], bool], enough: int) -> int:
    """Smallest number in 0 … `enough` for which a monotone question is answered yes."""
    low, high = 0, enough
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle + 1, high)
    return low


def _nearest(planner: Planner, order: Order) -> str:
    work = planner.work
    options = []
    if order == "fixed" and planner.fits("auto"):
        options.append("another order of the stages (order auto)")
    length = _largest(lambda n: _fits(planner, order, _shorter(work, n)), asked_tokens(work))
    if length:
        options.append(f"--max-model-len {length} instead of {asked_tokens(work)}")
    sequences = _largest(
        lambda n: _fits(planner, order, _fewer(work, n)), asked_sequences(work) - 1
    )
    if sequences:
        options.append(f"{sequences} sequences at once instead of {asked_sequences(work)}")
    if options:
        return "Nearest that fits: " + "; or ".join(options) + "."
    return _more_memory(planner, order)


def _fits(planner: Planner, order: Order, work: Workload) -> bool:
    return replace(planner, work=work).fits(order)


def _largest(is_small_enough: Callable[[int], bool], most: int) -> int:
    """Largest number in 1 … `most` for which a monotone question is answered yes, or 0."""
    return _smallest(lambda n: not is_small_enough(n + 1), most)


def _shorter(work: Workload, length: int) -> Workload:
    return replace(work, max_model_len=length, context=min(work.context, length))


def _fewer(work: Workload, sequences: int) -> Workload:
    return replace(work, max_sequences=sequences, batch=min(work.batch, sequences))


def _more_memory(planner: Planner, order: Order) -> str:
    split = _least_wrong(planner, order)
    over = [max(0, rank.memory.total - rank.device.usable_bytes) for rank in split.ranks]
    return (
        f"No shorter context helps: {_gib(sum(over))} are missing in all. It takes "
        "another socket or GPU with a stage of its own (--pipeline-parallel-size), or a smaller "
        "or quantised model."
    )

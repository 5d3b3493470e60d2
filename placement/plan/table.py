"""A plan as a table for people."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from placement.plan.picture import shown_parts
from placement.plan.plan import Plan
from placement.plan.stage_plan import ExpertPlan, RankPlan, Split, StagePlan
from placement.units import GIB

COLUMNS = ("rank", "stage", "device", "layers", "weights", "KV", "other", "room", "step", "parts")
NUMBERS = frozenset(("rank", "stage", "weights", "KV", "other", "room", "step"))


def plan_table(plan: Plan) -> RenderableType:
    """One row a rank, sizes in GiB, times in milliseconds; the sum and the notes below.

    Weights, KV cache and other memory together are no more than the room that there is.
    """
    split = plan.split
    table = Table(title=f"{plan.model}: sizes in GiB, times in ms", title_justify="left")
    for column in COLUMNS:
        justify = "right" if column in NUMBERS else "left"
        table.add_column(column, justify=justify, no_wrap=column != "parts")  # type: ignore[arg-type]
    for number, stage in enumerate(split.stages):
        for place, rank in enumerate(stage.ranks):
            table.add_row(*_row(number, stage, rank, first=place == 0))
        table.add_section()
    for one in plan.experts:
        table.add_row(*_expert_row(one))
    return Group(table, *(Text(line) for line in summary(plan)))


def _row(number: int, stage: StagePlan, rank: RankPlan, *, first: bool) -> tuple[str, ...]:
    memory, device = rank.memory, rank.device
    last_layer = stage.first_layer + stage.layers - 1
    parts = ", ".join(f"{name} {1e3 * seconds:.2f}" for name, seconds in shown_parts(stage))
    return (
        str(rank.rank),
        str(number),
        f"{device.node} {device.label} ({device.figures.name})",
        f"{stage.first_layer}-{last_layer} ({stage.layers})",
        f"{memory.weights / GIB:.2f}",
        f"{rank.kv_bytes / GIB:.2f}",
        f"{(memory.activations + memory.runtime) / GIB:.2f}",
        f"{device.usable_bytes / GIB:.1f}",
        f"{1e3 * stage.decode.seconds:.2f}" if first else "",
        parts if first else "",
    )


def _on_gpu(split: Split) -> str:
    """What is said of the passes that a GPU computes for CPU ranks."""
    gpus = [one.devices.prompt_gpu for one in split.stages if one.devices.prompt_gpu is not None]
    if not gpus:
        return ""
    return f", with CPU stages' passes of {gpus[0].from_tokens} tokens and more computed by a GPU"


def _expert_row(one: ExpertPlan) -> tuple[str, ...]:
    device = one.device
    return (
        str(one.rank),
        "",
        f"{device.node} {device.label} ({device.figures.name})",
        f"experts of {one.layers}",
        f"{one.weight_bytes / GIB:.2f}",
        "",
        f"{device.runtime_bytes / GIB:.2f}",
        f"{device.usable_bytes / GIB:.1f}",
        "",
        "",
    )


def summary(plan: Plan) -> tuple[str, ...]:
    """The lines below the table."""
    split, work = plan.split, plan.split.work
    drafted = plan.speculation
    verifies = "" if drafted is None else f" that verifies {drafted.asked.drafts} drafts a request"
    speed = split.tokens_per_s * (1 if drafted is None else drafted.asked.tokens)
    step = (
        f"decode step{verifies} {1e3 * split.step_s:.2f} ms at batch {work.batch} and context "
        f"{work.context}: {speed:.1f} tokens/s"
    )
    if split.objective == "throughput":
        step += f" with a batch in flight per stage (slowest {1e3 * split.slowest_s:.2f} ms)"
    partition = ",".join(map(str, split.layers))
    return (
        step,
        f"prompt of {work.context} tokens: {1e3 * split.prefill_s:.0f} ms{_on_gpu(split)}",
        f"KV cache: {split.kv_tokens:,} tokens, room for "
        f"{split.kv_tokens / work.max_model_len:,.1f} sequences of {work.max_model_len:,}",
        f"layers of each stage: {partition} (the same as VLLM_PP_LAYER_PARTITION={partition})",
        *(() if drafted is None else drafted.lines()),
        *plan.notes,
    )

"""A plan as a picture: nodes, sockets and GPUs, the layers on them, and where a step's time goes.

One self-contained SVG without scripts, links or fonts of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from placement.cluster.layout import Kind
from placement.plan import svg
from placement.plan.devices import RankDevice
from placement.plan.plan import Plan
from placement.plan.stage_plan import ExpertPlan, RankPlan, Split, StagePlan
from placement.plan.svg import FAINT, INK, LINE, PANEL, PAPER, SOFT, Svg
from placement.units import GB, GIB
from placement.words import plural

WIDTH = 1120
MARGIN = 32
CARD_WIDTH = 243
CARD_HEIGHT = 258
IDLE_HEIGHT = 104
GAP = 16
PAD = 18
CARDS_IN_ROW = 4
MOST_NODES = 8
"""Nodes without a rank are drawn up to this many nodes; the rest is counted."""
CELLS_IN_ROW = 24
CELL = 9

KINDS: dict[Kind, str] = {"cpu": "#2f6fb0", "gpu": "#c46f16"}
"""Colours of CPU sockets and of GPUs, those of docs/architecture.svg as well."""
MEMORY = {
    "weights": "#51657a",
    "KV cache": "#7fb0a5",
    "activations": "#d8b26a",
    "runtime": "#b9c2cc",
}


def plan_svg(plan: Plan) -> str:
    """The picture as SVG text."""
    picture = Svg(WIDTH)
    y = _heading(picture, plan)
    for place, (node, devices) in enumerate(_nodes(plan)):
        y = _node(picture, plan, node, devices, y, with_legend=place == 0)
    left_out = len({d.node for d in plan.devices}) - len(_nodes(plan))
    if left_out:
        picture.text(
            MARGIN, y + 10, f"and {plural(left_out, 'more node')} without a rank", 13, SOFT
        )
        y += 28
    y = _timeline(picture, plan, y + 8)
    for note in plan.notes:
        for line in svg.wrapped(note, 12.5, WIDTH - 2 * MARGIN):
            picture.text(MARGIN, y, line, 12.5, SOFT)
            y += 18
    return picture.render(int(y) + 10)


def _heading(picture: Svg, plan: Plan) -> float:
    split, shape = plan.split, plan.shape
    picture.text(MARGIN, 46, svg.fitted(plan.model, 24, WIDTH - 2 * MARGIN), 24, INK, bold=True)
    facts = (
        plural(len(shape.layers), "layer"),
        f"{shape.weight_bytes / GIB:.1f} GiB of weights",
        f"{plural(len(split.stages), 'pipeline stage')} of {_sizes(split)}",
        f"KV cache for {split.kv_tokens:,} tokens",
    )
    picture.text(MARGIN, 72, "  ·  ".join(facts), 14, SOFT)
    step = f"{_time(split.step_s)} per decode step"
    rate = f"{split.tokens_per_s:,.1f} tokens/s"
    work = f"batch {split.work.batch}, context {split.work.context:,}, for {split.objective}"
    picture.text(MARGIN, 104, step, 17, INK, bold=True)
    x = MARGIN + svg.width(step, 17, bold=True) + 14
    picture.text(x, 104, svg.fitted(f"{rate}  ·  {work}", 14, WIDTH - MARGIN - x), 14, SOFT)
    return 126


def _memory_legend(picture: Svg, y: float) -> float:
    """Draw it at the right edge of a node; returns where it starts."""
    x: float = WIDTH - MARGIN - PAD
    for name, colour in reversed([*MEMORY.items(), ("free", PAPER)]):
        x -= svg.width(name, 12)
        picture.text(x, y, name, 12, SOFT)
        x -= 17
        picture.box(x, y - 10, 11, 11, colour, radius=2, line=LINE if colour == PAPER else None)
        x -= 14
    return x


def _nodes(plan: Plan) -> list[tuple[str, list[RankDevice]]]:
    used = {rank.device.node for rank in plan.split.ranks}
    nodes = [(name, list(devices)) for name, devices in groupby(plan.devices, lambda d: d.node)]
    if len(nodes) <= MOST_NODES:
        return nodes
    return [(name, devices) for name, devices in nodes if name in used]


def _node(
    picture: Svg,
    plan: Plan,
    name: str,
    devices: Sequence[RankDevice],
    y: float,
    *,
    with_legend: bool,
) -> float:
    rows = [devices[i : i + CARDS_IN_ROW] for i in range(0, len(devices), CARDS_IN_ROW)]
    idle = {(device.node, device.label) for device in plan.idle}
    heights = [
        IDLE_HEIGHT if all((d.node, d.label) in idle for d in row) else CARD_HEIGHT for row in rows
    ]
    height = 44 + sum(heights) + (len(rows) - 1) * GAP + PAD
    picture.box(MARGIN, y, WIDTH - 2 * MARGIN, height, PANEL, radius=12, line=LINE)
    end = _memory_legend(picture, y + 28) if with_legend else WIDTH - MARGIN - PAD
    label = svg.fitted(f"node {name}", 15, end - MARGIN - 2 * PAD)
    picture.text(MARGIN + PAD, y + 28, label, 15, INK, bold=True)
    top = y + 44
    for cards, tall in zip(rows, heights, strict=True):
        for column, device in enumerate(cards):
            x = MARGIN + PAD + column * (CARD_WIDTH + GAP)
            found = _rank_on(plan, device)
            if found is not None:
                _card(picture, plan, *found, x, top)
            elif (experts := plan.experts_on(device)) is not None:
                _expert_card(picture, experts, x, top)
            else:
                _idle_card(picture, device, x, top, tall)
        top += tall + GAP
    return y + height + GAP


def _rank_on(plan: Plan, device: RankDevice) -> tuple[int, RankPlan] | None:
    for number, stage in enumerate(plan.split.stages):
        for rank in stage.ranks:
            if (rank.device.node, rank.device.label) == (device.node, device.label):
                return number, rank
    return None


def _device_lines(picture: Svg, device: RankDevice, x: float, y: float, ink: str) -> None:
    figures = device.figures
    title = f"{device.label}  ·  {figures.name}"
    picture.text(x + 14, y + 30, svg.fitted(title, 15, CARD_WIDTH - 28), 15, ink, bold=True)
    speed = f"{figures.memory_bytes / GIB:.0f} GiB  ·  {figures.read_bandwidth / GB:,.0f} GB/s"
    source = {
        "table": "published",
        "measured": "measured",
        "configured": "given",
        "computed": "computed",
        "assumed": "assumed",
    }
    picture.text(x + 14, y + 50, f"{speed}, {source[figures.source]}", 12, SOFT)


def _idle_card(picture: Svg, device: RankDevice, x: float, y: float, height: float) -> None:
    picture.box(x, y, CARD_WIDTH, height, PANEL, radius=9, line=LINE, dashed=True)
    _device_lines(picture, device, x, y, FAINT)
    picture.text(x + 14, y + 80, "no rank, not asked to work", 13, FAINT)


def _expert_card(picture: Svg, experts: ExpertPlan, x: float, y: float) -> None:
    device = experts.device
    picture.box(x, y, CARD_WIDTH, CARD_HEIGHT, PAPER, radius=9, line=LINE)
    colour = KINDS[device.kind]
    picture.box(x, y, CARD_WIDTH, 6, colour, radius=3)
    _device_lines(picture, device, x, y, INK)
    picture.box(x + 14, y + 62, svg.width("experts", 12.5, bold=True) + 18, 22, colour, radius=11)
    picture.text(x + 23, y + 77, "experts", 12.5, PAPER, bold=True)
    end = x + 40 + svg.width("experts", 12.5, bold=True)
    picture.text(end, y + 77, f"rank {experts.rank}", 12.5, SOFT)
    layers = f"slices of {plural(experts.layers, 'layer')}"
    picture.text(x + 14, y + 108, layers, 13, INK, bold=True)
    held = f"{experts.weight_bytes / GIB:.1f} of {device.usable_bytes / GIB:.1f} GiB"
    picture.text(x + 14, y + 204, "memory", 12, SOFT)
    picture.text_end(x + CARD_WIDTH - 14, y + 204, held, 12, INK)


def _sizes(split: Split) -> str:
    sizes = [stage.devices.size for stage in split.stages]
    if len(set(sizes)) == 1:
        return plural(sizes[0], "rank")
    return f"{', '.join(map(str, sizes[:-1]))} and {plural(sizes[-1], 'rank')}"


def _card(picture: Svg, plan: Plan, number: int, rank: RankPlan, x: float, y: float) -> None:
    stage, colour = plan.split.stages[number], KINDS[rank.device.kind]
    picture.box(x, y, CARD_WIDTH, CARD_HEIGHT, PAPER, radius=9, line=LINE)
    picture.box(x, y, CARD_WIDTH, 6, colour, radius=3)
    _device_lines(picture, rank.device, x, y, INK)
    badge = f"stage {number}"
    picture.box(x + 14, y + 62, svg.width(badge, 12.5, bold=True) + 18, 22, colour, radius=11)
    picture.text(x + 23, y + 77, badge, 12.5, PAPER, bold=True)
    where = f"rank {rank.rank}"
    if stage.devices.size > 1:
        where += f", TP {rank.rank - stage.ranks[0].rank} of {stage.devices.size}"
    picture.text(x + 40 + svg.width(badge, 12.5, bold=True), y + 77, where, 12.5, SOFT)
    _layers(picture, plan, stage, colour, x + 14, y + 108)
    _memory(picture, rank, x + 14, y + 204)


def _layers(picture: Svg, plan: Plan, stage: StagePlan, colour: str, x: float, y: float) -> None:
    first, last = stage.first_layer, stage.first_layer + stage.layers - 1
    noun = "layer" if stage.layers == 1 else "layers"
    span = f"{noun} {first}" if first == last else f"{noun} {first} to {last}"
    picture.text(x, y, span, 13, INK, bold=True)
    total = len(plan.shape.layers)
    picture.text_end(x + CARD_WIDTH - 28, y, f"{stage.layers} of {total}", 12.5, SOFT)
    pitch = (CARD_WIDTH - 28) / CELLS_IN_ROW
    rows = -(-total // CELLS_IN_ROW)
    size = min(CELL, 72 / rows - 1)
    for index in range(total):
        inside = first <= index <= last
        picture.box(
            x + index % CELLS_IN_ROW * pitch,
            y + 12 + index // CELLS_IN_ROW * (size + 2),
            pitch - 1.6,
            size,
            colour if inside else "#e6ebf0",
            radius=1.5,
        )


def _memory(picture: Svg, rank: RankPlan, x: float, y: float) -> None:
    width, memory = CARD_WIDTH - 28, rank.memory
    usable = rank.device.usable_bytes
    parts = (memory.weights, rank.kv_bytes, memory.activations, memory.runtime)
    held = sum(parts)
    picture.text(x, y, "memory", 12, SOFT)
    picture.text_end(x + width, y, f"{held / GIB:.1f} of {usable / GIB:.1f} GiB", 12, INK)
    picture.box(x, y + 8, width, 14, PAPER, radius=2, line=LINE)
    at = x
    for nbytes, colour in zip(parts, MEMORY.values(), strict=True):
        share = width * nbytes / usable
        picture.box(at, y + 8, share, 14, colour)
        at += share
    sizes = f"weights {memory.weights / GIB:.1f}  ·  KV {rank.kv_bytes / GIB:.1f} GiB"
    picture.text(x, y + 41, sizes, 12, SOFT)


def _timeline(picture: Svg, plan: Plan, y: float) -> float:
    split = plan.split
    title = "One decode step, stage after stage"
    picture.text(MARGIN, y + 14, title, 15, INK, bold=True)
    if split.objective == "throughput":
        note = f"stages overlap over batches: a step leaves every {_time(split.slowest_s)}"
        picture.text_end(WIDTH - MARGIN, y + 14, note, 13, SOFT)
    width, at, total = WIDTH - 2 * MARGIN, float(MARGIN), split.step_s
    top = y + 28
    for number, stage in enumerate(split.stages):
        share = width * stage.decode.seconds / total
        _stage_box(picture, stage, at, top, max(share - 2, 0.5), 30, radius=3)
        label = f"stage {number}   {_time(stage.decode.seconds)}"
        if svg.width(label, 13, bold=True) + 16 < share:
            picture.text(at + 10, top + 20, label, 13, PAPER, bold=True)
        at += share
    y = top + 54
    for number, stage in enumerate(split.stages):
        _stage_line(picture, number, stage, y)
        y += 24
    return y + 8


def _stage_box(
    picture: Svg,
    stage: StagePlan,
    x: float,
    y: float,
    width: float,
    height: float,
    *,
    radius: float,
) -> None:
    """A box in the colour of the stage's kind; of a group of both kinds, half in each."""
    kinds = sorted(stage.devices.kinds)
    tall = height / len(kinds)
    for place, kind in enumerate(kinds):
        picture.box(x, y + place * tall, width, tall, KINDS[kind], radius=radius)


def _stage_line(picture: Svg, number: int, stage: StagePlan, y: float) -> None:
    _stage_box(picture, stage, MARGIN, y - 11, 12, 12, radius=2)
    picture.text(MARGIN + 22, y, f"stage {number}", 13, INK, bold=True)
    devices = _places(stage)
    picture.text(MARGIN + 88, y, svg.fitted(devices, 13, 260), 13, SOFT)
    picture.text_end(MARGIN + 430, y, _time(stage.decode.seconds), 13, INK, bold=True)
    parts = "  ·  ".join(f"{name} {_time(seconds)}" for name, seconds in shown_parts(stage))
    picture.text(MARGIN + 452, y, svg.fitted(parts, 13, WIDTH - 2 * MARGIN - 452), 13, SOFT)


def _places(stage: StagePlan) -> str:
    """Devices of a stage with their nodes, like "GPU 0, GPU 1 on a"."""
    nodes = groupby((rank.device for rank in stage.ranks), lambda device: device.node)
    return "; ".join(f"{', '.join(d.label for d in devices)} on {node}" for node, devices in nodes)


PART_NAMES = {
    "weights": "weights",
    "kv": "KV",
    "compute": "compute",
    "output": "output",
    "sampling": "sampling",
    "reduce": "all-reduce",
    "fixed": "launches",
    "draft": "drafts",
    "send": "send",
    "experts": "experts on sockets",
    "handover": "handover",
}


def shown_parts(stage: StagePlan) -> Iterator[tuple[str, float]]:
    """Parts of a stage's step that take any time: what to call them, and seconds."""
    for name, seconds in stage.decode.parts().items():
        if seconds > 0:
            yield PART_NAMES[name], seconds


def _time(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e3:.2f} ms"

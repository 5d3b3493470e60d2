"""Table and plot of what `side_by_side.py` has written.

    python benchmarks/side_by_side_report.py results.json --plot results.svg
    python benchmarks/side_by_side_report.py results.json --arrivals arrivals.svg

Needs nothing but the file, and matplotlib for the plots.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import math
import statistics
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

GB, GIB = 1e9, 1 << 30
COLUMNS = ("contender", "batch", "prompt", "output", "decode, ms", "floor, ms", "÷ floor",
           "prefill, s", "tokens/s", "GPU, GiB", "host, GiB")  # fmt: skip
ONE_STEP = 8192
"""Prompt tokens, all requests together, that are read in one step."""


def main() -> None:
    """Print the table, draw the plot."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("--plot", type=Path, help="a file to draw into, .svg or .png")
    parser.add_argument("--arrivals", type=Path,
                        help="another, of the gaps that an arriving prompt leaves")  # fmt: skip
    options = parser.parse_args()
    found = json.loads(options.results.read_text())
    print(table(found, width=130), end="")
    if options.plot:
        draw(found, options.plot)
    if options.arrivals:
        draw_arrivals(found, options.arrivals)


def floor_ms(found: dict[str, Any], outcome: dict[str, Any]) -> float | None:
    """Least time of a decode step: what is read ÷ the bandwidth of where it is read from.

    A socket and a GPU take turns; a link and a GPU could work at the same time.
    """
    outside = found["layers_outside"] * found["layer_bytes"]
    rest = (found["layers"] - found["layers_outside"]) * found["layer_bytes"] + found["head_bytes"]
    reads, gpu = outcome["reads"], found["gpu"]
    if reads in ("socket", "together", "in turn"):
        seconds = outside / statistics.median(b[reads] for b in outcome["bandwidths"])
        if gpu is None:
            return 1000 * seconds * (1 + found["head_bytes"] / outside)
        return 1000 * (seconds + rest / gpu["copy_bytes_per_s"])
    if reads == "link":
        return 1000 * max(outside / gpu["link_bytes_per_s"], rest / gpu["copy_bytes_per_s"])
    return 1000 * (outside + rest) / gpu["copy_bytes_per_s"]


def table(found: dict[str, Any], width: int) -> str:
    """All results, and what is to be said beside them."""
    title = (
        f"{found['shape']}: {found['layers_outside']} of {found['layers']} layers outside the GPU, "
        f"case {found['case']}"
    )
    shown = Table(title=title)
    for column in COLUMNS:
        shown.add_column(column, justify="left" if column == "contender" else "right")
    for name, outcome in found["contenders"].items():
        for point in outcome["points"]:
            drafts = point.get("drafts")
            label = f"{name}, {drafts} a request" if drafts else name
            shown.add_row(label, *cells(point, floor_ms(found, outcome), outcome["memory"]))
        if outcome["status"] != 0:
            shown.add_row(name, f"failed: {outcome['status']}")
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(shown)
    for line in notes(found):
        console.print(line, highlight=False)
    return console.export_text()


def cells(point: dict[str, Any], floor: float | None, memory: dict[str, Any] | None) -> list[str]:
    """One row of the table, after the name."""
    decode = point["decode_ms"]
    gpu = memory["gpu_bytes"] if memory else None
    # What a driver has pinned shows in the machine's figures only.
    host = memory["processes_bytes" if gpu is None else "host_bytes"] if memory else None
    return [
        str(point["batch"]),
        str(point["prompt"]),
        str(point["output"]),
        f"{decode:.1f}" if decode else "–",
        f"{floor:.1f}" if floor else "–",
        f"{decode / floor:.2f}" if decode and floor else "–",
        f"{point['prefill_s']:.2f}",
        f"{point['tokens_per_s']:.1f}",
        f"{gpu / GIB:.1f}" if gpu is not None else "–",
        f"{host / GIB:.1f}" if host is not None else "–",
    ]


STOLEN = 0.01
"""Share of the processors' time from which on the report warns."""


def notes(found: dict[str, Any]) -> list[str]:
    """Bandwidths of the run, points left out, where streaming overtakes, lost contenders."""
    lines = []
    probed = [b for outcome in found["contenders"].values() for b in outcome["bandwidths"]]
    for name in probed[0] if probed else ():
        rates = [b[name] / GB for b in probed]
        lines.append(f"CPU ranks read ({name}): {min(rates):.0f} to {max(rates):.0f} GB/s")
    stolen = [s for one in found["contenders"].values() for s in one.get("stolen_shares", ())]
    if stolen and max(stolen) >= STOLEN:
        lines.append(
            f"up to {max(stolen):.1%} of the processors' time was stolen from this machine: "
            "decode steps of CPU ranks say nothing"
        )
    if gpu := found["gpu"]:
        lines.append(
            f"{gpu['name']}: {gpu['copy_bytes_per_s'] / GB:.0f} GB/s, "
            f"link {gpu['link_bytes_per_s'] / GB:.1f} GB/s"
        )
    if found["points_left_out"]:
        lines.append(f"left out, too many prompt tokens: {', '.join(found['points_left_out'])}")
    return lines + crossings(found)


def steps(outcome: dict[str, Any]) -> list[tuple[int, float]]:
    """Tokens of a step and its seconds: decode steps, and prompts that were read in one step."""
    found: dict[int, list[float]] = {}
    for point in outcome["points"]:
        if point["decode_ms"]:
            found.setdefault(point["batch"], []).append(point["decode_ms"] / 1000)
        tokens = point["batch"] * point["prompt"]
        if tokens <= ONE_STEP:
            found.setdefault(tokens, []).append(point["prefill_s"])
    return sorted((tokens, statistics.median(seconds)) for tokens, seconds in found.items())


def crossings(found: dict[str, Any]) -> list[str]:
    """Tokens per step from which streaming weights is faster than computing where they lie."""
    by_name = {name: steps(outcome) for name, outcome in found["contenders"].items()}
    return [
        f"{theirs} is faster than {ours} above {crossing:.0f} tokens a step"
        for ours in by_name
        if ours.startswith("ray_hetero")
        for theirs in by_name
        if found["contenders"][theirs]["reads"] == "link"
        if (crossing := crossing_of(by_name[ours], by_name[theirs])) is not None
    ]


def crossing_of(ours: list[tuple[int, float]], theirs: list[tuple[int, float]]) -> float | None:
    """Where the two curves meet, straight lines between points of both on logarithmic axes."""
    other = dict(theirs)
    ratios = [(tokens, math.log(s / other[tokens])) for tokens, s in ours if tokens in other]
    for (a, low), (b, high) in itertools.pairwise(ratios):
        if low <= 0 < high:
            return math.exp(math.log(a) + (math.log(b) - math.log(a)) * -low / (high - low))
    return None


def draw(found: dict[str, Any], path: Path) -> None:
    """Decode steps beside their floors; seconds of a step over its tokens."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 5))
    shortest = min((p["prompt"] for o in found["contenders"].values() for p in o["points"]),
                   default=0)  # fmt: skip
    ran = {name: o for name, o in found["contenders"].items() if o["points"]}
    batches = sorted({p["batch"] for o in ran.values() for p in o["points"]
                      if p["prompt"] == shortest})  # fmt: skip
    width = 0.8 / max(1, len(ran))
    for number, (name, outcome) in enumerate(ran.items()):
        decode = {p["batch"]: p["decode_ms"] for p in outcome["points"] if p["prompt"] == shortest}
        places = [i + number * width - 0.4 + width / 2 for i in range(len(batches))]
        bars = left.bar(places, [decode.get(b) or 0 for b in batches], width, label=name)
        floor = floor_ms(found, outcome)
        if floor is not None:
            ends = [x - width / 2 for x in places], [x + width / 2 for x in places]
            left.hlines([floor] * len(places), *ends, color="black", linewidth=1.5)
        curve = steps(outcome)
        color = bars.patches[0].get_facecolor()
        right.loglog(*zip(*curve, strict=True), marker="o", label=name, color=color)
    left.set_xticks(range(len(batches)), [str(batch) for batch in batches])
    left.set_xlabel(f"requests in a batch (prompts of {shortest} tokens)")
    left.set_ylabel("decode step, ms (black: floor of memory or link)")
    right.set_xlabel("tokens in a step")
    right.set_ylabel("seconds")
    right.grid(visible=True, which="both", alpha=0.3)
    left.legend(fontsize=8)
    figure.suptitle(
        f"{found['shape']}: {found['layers_outside']} of {found['layers']} layers outside the GPU"
    )
    figure.tight_layout()
    figure.savefig(path)


Gaps = list[tuple[float, float]]
"""Seconds since a prompt arrived, and milliseconds between the last two tokens of requests that
decode."""


def arrivals(found: dict[str, Any]) -> dict[str, tuple[float, Gaps]]:
    """By contender, the usual milliseconds between two tokens, and the gaps once a prompt arrives.

    Of several rounds the one whose longest gap is the median.
    """
    chosen = {}
    for name, outcome in found["contenders"].items():
        rounds = [one for arrival in outcome["arrivals"] for one in arrival["rounds"]]
        if not rounds:
            continue
        rounds.sort(key=lambda one: one["longest_ms"])
        middle = rounds[len(rounds) // 2]
        ends = itertools.accumulate(ms / 1000 for ms in middle["gaps_ms"])
        chosen[name] = middle["usual_ms"], list(zip(ends, middle["gaps_ms"], strict=True))
    return chosen


def draw_arrivals(found: dict[str, Any], path: Path) -> None:
    """Gaps between tokens of requests that decode while a long prompt is read.

    Raises:
        SystemExit: no prompt arrived in this run.

    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    chosen = arrivals(found)
    if not chosen:
        raise SystemExit("no prompt arrived in this run: run side_by_side.py with --arrival TOKENS")
    figure, axes = plt.subplots(figsize=(8, 4.5))
    for name, (usual, gaps) in chosen.items():
        ends = [0.0, *(end for end, _ in gaps)]
        (line,) = axes.step(ends, [gaps[0][1], *(ms for _, ms in gaps)], where="pre",
                            marker="o", markersize=3, label=name)  # fmt: skip
        axes.axhline(usual, color=line.get_color(), linestyle=":", linewidth=1)
    axes.set_xlabel("seconds since the prompt arrived")
    axes.set_ylabel("ms between two tokens (dotted: before)")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    main()

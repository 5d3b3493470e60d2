"""Draw docs/grafana/ray_hetero.svg: the Grafana dashboard, with what a Prometheus answered.

    python tools/draw_dashboard.py                                    draw from the kept answers
    python tools/draw_dashboard.py --ask http://localhost:9090 --minutes 6    ask first, and keep

The picture is not Grafana's: panels are where the dashboard's JSON puts them, and lines are what
its expressions gave.  `docs/grafana/answers.json` keeps the answers of a Prometheus that scraped a
server; times in it begin at 0, and hosts are called node-1, node-2, ….
"""

from __future__ import annotations

import argparse
import json
import math
import re
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "docs/grafana"
DASHBOARD, ANSWERS, PICTURE = (
    FOLDER / name for name in ("ray_hetero.json", "answers.json", "ray_hetero.svg")
)
STEP_S = 5
RATE_INTERVAL = "20s"
"""Four scrapes, as Grafana's `$__rate_interval` has it."""
DIGITS = 4
COLUMN, UNIT, GAP = 50, 28, 8
"""Pixels of the grid's columns and rows, and between panels."""
TITLE, LEFT, RIGHT, LINE = 26, 66, 24, 13
MOST_NAMES = 6
"""Names of a legend; more are counted."""
COLOURS = ("#3274d9", "#e0752d", "#37872d", "#a352cc", "#c4162a", "#6b6b6b", "#1f78c1", "#ba43a9")
FACTORS = {"percentunit": (100, " %"), "ms": (1, " ms"), "s": (1000, " ms"), "Bps": (1e-3, " kB/s")}
"""Factors and signs by which values of a unit are shown; others are shown as they are."""

Series = dict[str, Any]
"""A line: `labels`, and `values` at every step, null where there are none."""


def asked(url: str, minutes: float, dashboard: Mapping[str, Any]) -> dict[str, Any]:
    """Answers of a Prometheus to all expressions of a dashboard, by number of the panel."""
    end = int(time.time())
    begin = end - int(60 * minutes)
    nodes: dict[str, str] = {}
    panels = {}
    for panel in dashboard["panels"]:
        found = []
        for target in panel["targets"]:
            expression = target["expr"].replace("$__rate_interval", RATE_INTERVAL)
            given = {"query": expression.replace("$engine", ".*"),
                     "start": begin, "end": end, "step": STEP_S}  # fmt: skip
            address = f"{url}/api/v1/query_range?{urllib.parse.urlencode(given)}"
            with urllib.request.urlopen(address, timeout=30) as answer:  # noqa: S310
                lines = json.load(answer)["data"]["result"]
            found.append([_kept(line, begin, end, nodes, target["legendFormat"]) for line in lines])
        panels[str(panel["id"])] = found
    return {"step_s": STEP_S, "steps": (end - begin) // STEP_S + 1, "panels": panels}


def _kept(
    line: Mapping[str, Any], begin: int, end: int, nodes: dict[str, str], legend: str
) -> Series:
    values: list[float | None] = [None] * ((end - begin) // STEP_S + 1)
    for at, text in line["values"]:
        value = float(text)
        if math.isfinite(value):
            values[round((at - begin) / STEP_S)] = float(f"{value:.{DIGITS}g}")
    labels = {name: line["metric"].get(name, "") for name in re.findall(r"{{(\w+)}}", legend)}
    if labels.get("node"):
        labels["node"] = nodes.setdefault(labels["node"], f"node-{len(nodes) + 1}")
    return {"labels": labels, "values": values}


def drawn(dashboard: Mapping[str, Any], answers: Mapping[str, Any]) -> str:
    """The picture of a dashboard, as SVG."""
    panels = dashboard["panels"]
    height = max(place["y"] + place["h"] for place in (panel["gridPos"] for panel in panels)) * UNIT
    width = 24 * COLUMN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="sans-serif" font-size="11">',
        f"<title>The dashboard {escape(dashboard['title'])}</title>",
        f'<rect width="{width}" height="{height}" fill="#f4f5f5"/>',
    ]
    for panel in panels:
        parts += _panel(panel, answers)
    return "\n".join([*parts, "</svg>", ""])


def _panel(panel: Mapping[str, Any], answers: Mapping[str, Any]) -> Iterator[str]:
    place = panel["gridPos"]
    x, y = place["x"] * COLUMN + GAP / 2, place["y"] * UNIT + GAP / 2
    width, height = place["w"] * COLUMN - GAP, place["h"] * UNIT - GAP
    yield f'<g transform="translate({x:g} {y:g})">'
    yield f'<rect width="{width}" height="{height}" fill="white" stroke="#d8d9da"/>'
    yield f'<text x="10" y="17" font-weight="bold">{escape(panel["title"])}</text>'
    lines = [
        (_name(target["legendFormat"], one["labels"]), one["values"])
        for target, found in zip(panel["targets"], answers["panels"][str(panel["id"])], strict=True)
        for one in found
        if any(value is not None for value in one["values"])
    ]
    if not lines:
        yield (
            f'<text x="{width / 2:g}" y="{height / 2:g}" text-anchor="middle" fill="#8e8e8e">'
            "No data</text>"
        )
    else:
        legend = min(len(lines), MOST_NAMES + (len(lines) == MOST_NAMES + 1))
        bottom = height - 24 - LINE * (legend + (legend < len(lines)))
        unit = panel.get("fieldConfig", {}).get("defaults", {}).get("unit", "none")
        yield from _plot(lines, unit, width, bottom, answers)
        yield from _legend([name for name, _ in lines], legend, bottom + 28)
    yield "</g>"


def _name(legend: str, labels: Mapping[str, str]) -> str:
    return re.sub(r"{{(\w+)}}", lambda found: labels[found[1]], legend)


def _plot(
    lines: Sequence[tuple[str, Sequence[float | None]]], unit: str, width: float, bottom: float,
    answers: Mapping[str, Any],
) -> Iterator[str]:  # fmt: skip
    factor, sign = FACTORS.get(unit, (1, ""))
    highest = max(factor * value for _, values in lines for value in values if value is not None)
    tick = _tick(highest)
    ticks = max(1, math.ceil(highest / tick - 1e-9))
    top, right = TITLE + 6, width - RIGHT
    for number in range(ticks + 1):
        y = bottom - (bottom - top) * number / ticks
        yield f'<path d="M{LEFT} {y:.1f}H{right:g}" stroke="#e6e6e6"/>'
        yield (
            f'<text x="{LEFT - 5}" y="{y + 4:.1f}" text-anchor="end" fill="#5a5a5a">'
            f"{number * tick:g}{sign}</text>"
        )
    seconds = (answers["steps"] - 1) * answers["step_s"]
    for minute in range(int(seconds // 60) + 1):
        x = LEFT + (right - LEFT) * 60 * minute / seconds
        yield (
            f'<text x="{x:.1f}" y="{bottom + 14:.1f}" text-anchor="middle" fill="#5a5a5a">'
            f"{minute} min</text>"
        )
    for number, (_, values) in enumerate(lines):
        path, is_down = [], False
        for step, value in enumerate(values):
            if value is not None:
                x = LEFT + (right - LEFT) * step / (answers["steps"] - 1)
                y = bottom - (bottom - top) * factor * value / (tick * ticks)
                path.append(f"{'L' if is_down else 'M'}{x:.1f} {y:.1f}")
            is_down = value is not None
        yield (
            f'<path d="{"".join(path)}" fill="none" stroke="{COLOURS[number % len(COLOURS)]}" '
            'stroke-width="1.5"/>'
        )


def _tick(highest: float) -> float:
    """A round distance of which two to five reach the highest value."""
    if highest <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(highest / 2))
    return next(power * one for one in (1, 2, 5, 10) if highest / (power * one) <= 5)


def _legend(names: Sequence[str], shown: int, y: float) -> Iterator[str]:
    for number, name in enumerate(names[:shown]):
        at = y + LINE * number
        colour = COLOURS[number % len(COLOURS)]
        yield f'<path d="M{LEFT} {at - 4:.1f}h14" stroke="{colour}" stroke-width="3"/>'
        yield f'<text x="{LEFT + 20}" y="{at:.1f}">{escape(name)}</text>'
    if shown < len(names):
        yield (
            f'<text x="{LEFT + 20}" y="{y + LINE * shown:.1f}" fill="#5a5a5a">'
            f"and {len(names) - shown} more</text>"
        )


def main() -> None:
    """Ask if that is wanted, and draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ask", metavar="URL", help="of a Prometheus that scrapes a server")
    parser.add_argument("--minutes", type=float, default=6, help="until now")
    options = parser.parse_args()
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    if options.ask:
        answers = asked(options.ask, options.minutes, dashboard)
        ANSWERS.write_text(json.dumps(answers, separators=(",", ":")) + "\n", encoding="utf-8")
    answers = json.loads(ANSWERS.read_text(encoding="utf-8"))
    PICTURE.write_text(drawn(dashboard, answers), encoding="utf-8")


if __name__ == "__main__":
    main()

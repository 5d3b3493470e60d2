"""Summary of a soak as Markdown."""

from __future__ import annotations

import statistics
from collections import Counter
from typing import Any

KINDS = {
    "done": "answered",
    "left": "left by their client",
    "refused": "refused with 503",
    "failed": "ended with an error",
    "wrong": "answered with other tokens than at first",
    "lost": "without any end",
}


def summary(found: dict[str, Any]) -> str:
    """The report.

    Args:
        found: what `soak.py` has written.

    """
    parts = [_requests(found), _faults(found), _sizes(found), _end(found)]
    return "\n".join(["# Soak", "", _options(found), *parts])


def _options(found: dict[str, Any]) -> str:
    options = found["options"]
    names = ("minutes", "clients", "ranks", "context", "leaving", "restart", "fault_every", "seed")
    return ", ".join(f"{name} {options[name]}" for name in names) + "\n"


def _requests(found: dict[str, Any]) -> str:
    counted = Counter(outcome["kind"] for outcome in found["outcomes"])
    counted["lost"] += found["asked"] - len(found["outcomes"])
    rows = [f"| {text} | {counted[kind]} |" for kind, text in KINDS.items()]
    seconds = [outcome["seconds"] for outcome in found["outcomes"] if outcome["kind"] == "done"]
    tokens = sum(outcome["tokens"] for outcome in found["outcomes"])
    lines = [
        "## Requests",
        "",
        "| requests | |",
        "|---|---|",
        f"| sent | {found['asked']} |",
        *rows,
    ]
    if len(seconds) > 1:
        middle, last = statistics.median(seconds), statistics.quantiles(seconds, n=100)[-1]
        lines += ["", f"Answered in {middle:.2f} s (median), {last:.2f} s (99 %); {tokens} tokens."]
    said = Counter(o["said"] for o in found["outcomes"] if o["kind"] in ("failed", "wrong"))
    lines += [""] + [f"- {count} times: {text}" for text, count in said.most_common(10)]
    return "\n".join([*lines, ""])


def _faults(found: dict[str, Any]) -> str:
    if not found["faults"]:
        return "## Faults\n\nNone.\n"
    back = [fault["back_after_s"] for fault in found["faults"] if fault["back_after_s"] is not None]
    kinds = Counter(fault["signal"] for fault in found["faults"])
    line = ", ".join(f"{count} times {kind}" for kind, count in sorted(kinds.items()))
    if back:
        line += f"; served again after {statistics.median(back)} s (median), {max(back)} s (most)"
    never = len(found["faults"]) - len(back)
    return f"## Faults\n\n{line}; {never} not over when the soak ended.\n"


def _sizes(found: dict[str, Any]) -> str:
    samples = found["samples"]
    if len(samples) < 6:
        return "## Sizes\n\nToo few samples.\n"
    third = len(samples) // 3
    # What grows in the first third may be caches that fill.
    middle, last = samples[third : 2 * third], samples[-third:]
    rows = [
        f"| {name} | {_median(middle, 'resident_mib', name):.0f} | "
        f"{_median(last, 'resident_mib', name):.0f} | {_median(middle, 'descriptors', name):.0f} | "
        f"{_median(last, 'descriptors', name):.0f} |"
        for name in samples[-1]["resident_mib"]
    ]
    segments = [statistics.median(s["segments"] for s in part) for part in (middle, last)]
    head = ["## Sizes", "", "Medians of the second and of the last third of the time.", "",
            "| process | MiB | MiB at last | descriptors | descriptors at last |",
            "|---|---|---|---|---|"]  # fmt: skip
    return "\n".join([*head, *rows, "", f"Names in /dev/shm: {segments[0]}, {segments[1]}.", ""])


def _median(samples: list[dict[str, Any]], field: str, name: str) -> float:
    values = [sample[field][name] for sample in samples if name in sample[field]]
    return statistics.median(values) if values else float("nan")


def _end(found: dict[str, Any]) -> str:
    left = ", ".join(found["left_behind"]) or "nothing"
    return f"## End\n\nStatus {found['status']}; left behind: {left}.\n"

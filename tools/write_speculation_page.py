"""Write the tables of docs/speculation.md: measured steps, and what drafts make of them.

    python tools/write_speculation_page.py

Milliseconds come from benchmarks/results/ alone; the text around the tables is kept.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping

from page_blocks import DOCS, replaced, rewrite, table
from raw_figures import EXPERT_RANKS, OURS, TWO_RANKS, point, raw, step_ms
from write_performance_page import DAY_BEFORE, EXPERTS, NEWEST

from placement.plan.drafts import tokens_of_step

PAGE = DOCS / "speculation.md"
END = "<!-- end of figures -->"
NONE = "–"

ACCEPTANCES = (0.5, 0.7, 0.9)
MEASURED = {1: (1, 128, 32), 8: (8, 128, 32), 32: (32, 128, 32), 128: (128, 96, 32)}
"""Tokens of a step → requests, prompt and answer of the run that had steps of so many."""
LOADS = ((1, 1), (1, 3), (1, 7), (8, 1), (8, 3), (8, 7), (32, 1), (32, 3))
"""Requests, and drafts of each."""
FORMATS = "gpu-host/2026-11-23-h200-14-cores-half"
ENGINES = (
    ("half of 8B, bf16 in 12 bits", 32, NEWEST, OURS, 32),
    ("half of 8B, bf16 in 12 bits", 16, FORMATS, OURS, 20),
    ("the same, two CPU ranks that share every layer", 16, FORMATS, TWO_RANKS, 20),
    ("half of 8B, FP8 in blocks", 16, FORMATS, f"{OURS} fp8", 20),
    ("half of 8B, 4 bits in groups of 128", 16, FORMATS, f"{OURS} w4a16", 20),
    ("8 of 16 layers with 128 experts, whole layers", 16, EXPERTS, OURS, 24),
    ("the same, their experts only", 16, EXPERTS, EXPERT_RANKS, 24),
)
"""Layers outside the GPU, cores of the host, raw file, contender, tokens of an answer."""
VERIFYING = "gpu-host/2026-11-25-h200-drafts"
"""Raw file of one engine's steps that verify drafts, in answers of 96 tokens."""
SEPARATE = "gpu-host/2026-11-25-h200-night-drafts"
"""Raw file of an engine for each number of drafts, in turns, in answers of 64 tokens."""
DRAFTING = {
    "none": ("no drafts", None),
    "1, accepted with 0.7": ("forced drafts", 1),
    "3, accepted with 0.7": ("forced drafts", 3),
    "7, accepted with 0.7": ("forced drafts", 7),
    "n-grams, up to 7": ("n-grams", None),
    "a draft model, 3": ("draft model", None),
}
"""Drafts of a request → contender, and the number of drafts where it has several."""


def begin(name: str) -> str:
    """The mark before a table."""
    return f"<!-- figures, {name}: written by tools/write_speculation_page.py -->"


def steps_of(
    name: str, contender: str, loads: Mapping[int, tuple[int, int, int]]
) -> Mapping[int, float]:
    """Milliseconds of a contender's steps, by their tokens, as far as they were measured."""
    found = {tokens: step_ms(name, contender, *load) for tokens, load in loads.items()}
    return {tokens: ms for tokens, ms in found.items() if ms is not None}


def measured() -> Mapping[int, float]:
    """Milliseconds of the steps of one engine, by their tokens."""
    return steps_of(DAY_BEFORE, OURS, MEASURED)


def between(known: Mapping[int, float], tokens: int) -> float:
    """Milliseconds of a step, on a line between the two nearest that are known."""
    places = sorted(known)
    above = places[bisect_left(places, tokens)]
    if above == tokens:
        return known[tokens]
    below = places[places.index(above) - 1]
    share = (tokens - below) / (above - below)
    return known[below] + share * (known[above] - known[below])


def steps() -> str:
    """Steps of one engine, by their tokens."""
    known = measured()
    return table(
        ("tokens in a step", "ms", "relative to one token"),
        ((str(tokens), f"{ms:.1f}", f"{ms / known[1]:.2f}") for tokens, ms in known.items()),
    )


def gains() -> str:
    """Figures of these steps with drafts."""
    known = measured()
    rows = []
    for requests, drafts in LOADS:
        tokens = requests * (1 + drafts)
        cost = between(known, tokens) / between(known, requests)
        said = [tokens_of_step(drafts, one) for one in ACCEPTANCES]
        rows.append(
            (str(requests), str(drafts), str(tokens), f"{cost:.2f}",
             *(f"{one:.2f}" for one in said), *(f"{one / cost:.2f}" for one in said))
        )  # fmt: skip
    head = ("requests", "*k*", "tokens in a step", "relative cost of the step",
            "tokens per request at *a* = 0.5", "0.7", "0.9",
            "speed-up at *a* = 0.5", "0.7", "0.9")  # fmt: skip
    return table(head, rows)


def engines() -> str:
    """Other engines, and one request with seven drafts on each."""
    rows = []
    for outside, cores, name, contender, output in ENGINES:
        known = steps_of(name, contender, {batch: (batch, 128, output) for batch in (1, 8, 32)})
        cost = known[8] / known[1]
        gained = [f"{tokens_of_step(7, chance) / cost:.2f}" for chance in ACCEPTANCES]
        shown = [f"{known[batch]:.1f}" if batch in known else NONE for batch in (1, 8, 32)]
        rows.append((outside, str(cores), *shown, f"{cost:.2f}", *gained))
    head = ("outside the GPU", "cores", "1 request, ms", "8", "32", "8 relative to 1",
            "speed-up at *a* = 0.5", "0.7", "0.9")  # fmt: skip
    return table(head, rows)


def verifying() -> str:
    """Steps of one engine that verify drafts, and what these bring it."""
    contenders = raw(VERIFYING)["contenders"]
    rows = []
    for requests in (1, 8):
        found = {
            drafts: next(
                one
                for one in contenders[contender]["points"]
                if (one["batch"], one.get("drafts")) == (requests, number)
            )
            for drafts, (contender, number) in DRAFTING.items()
        }
        plain = found["none"]
        for drafts, own in found.items():
            ratios = (own[key] / plain[key] for key in ("step_ms", "tokens_per_s"))
            rows.append(
                (str(requests), drafts, f"{own['step_ms']:.1f}", f"{own['tokens_per_s']:.1f}",
                 *(f"{one:.2f}" for one in ratios))
            )  # fmt: skip
    head = ("requests", "drafts of each", "step, ms", "tokens/s", "step relative to no drafts",
            "speed-up")  # fmt: skip
    return table(head, rows)


def separate() -> str:
    """Steps of an engine for each number of drafts, beside those of the one without."""
    rows = []
    for requests in (1, 8):
        plain, *drafting = (
            point(SEPARATE, contender, requests, 128, 64)["step_ms"]
            for contender in ("no drafts", "forced 1", "forced 3", "forced 7")
        )
        shown = [f"{ms:.1f} ({ms / plain:.2f})" for ms in drafting]
        rows.append((str(requests), f"{plain:.1f}", *shown))
    return table(("requests", "no drafts, ms", "1 draft of each", "3", "7"), rows)


TABLES = {"steps": steps, "verifying": verifying, "separate": separate, "gains": gains,
          "engines": engines}  # fmt: skip


def written(page: str) -> str:
    """The page with its tables written anew."""
    for name, made in TABLES.items():
        page = replaced(page, begin(name), END, made())
    return page


if __name__ == "__main__":
    rewrite(PAGE, written)

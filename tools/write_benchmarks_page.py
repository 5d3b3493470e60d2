"""Write the tables of docs/benchmarks/index.md that come from raw files.

    python tools/write_benchmarks_page.py

Figures come from benchmarks/results/ alone; the text around the tables is kept.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from page_blocks import DOCS, replaced, rewrite, table
from raw_figures import raw

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import quality

PAGE = DOCS / "benchmarks" / "index.md"
END = "<!-- end of figures -->"
QUALITY = "2026-11-29-quality"
DRAFTS = "2026-12-01-drafts-on-text"
LOAD = "2026-11-30-real-text-load"
LOAD_FIGURES = ("median_ttft_ms", "p99_ttft_ms", "median_itl_ms", "p99_itl_ms")
USUAL = "pipeline"


def begin(name: str) -> str:
    """The mark before a table."""
    return f"<!-- figures, {name}: written by tools/write_benchmarks_page.py -->"


def _of_rows(rows: Iterable[dict[str, Any]]) -> Iterable[tuple[str, ...]]:
    for row in rows:
        yield (
            f"{row['engine']:.4f}",
            f"{row['reference']:.4f}",
            f"{row['difference']:+.4f}",
            f"{row['continued']['difference']:+.4f}",
            f"{row['between_tokens']:.3f}",
            quality.same_answers(row, raw(QUALITY)["rows"]),
        )


FIGURES = ("engine", "Transformers", "difference", "of its own words", "between tokens", "answers")


def formats() -> str:
    """Likelihoods by format, over two CPU ranks."""
    rows = [row for row in raw(QUALITY)["rows"] if row["way"] == USUAL]
    heads = ((row["format"], f"{row['bytes'] / 1e6:.0f} MB") for row in rows)
    cells = zip(heads, _of_rows(rows), strict=True)
    return table(("format", "checkpoint", *FIGURES), ((*head, *rest) for head, rest in cells))


def ways() -> str:
    """Likelihoods by layout and way."""
    rows = [row for row in raw(QUALITY)["rows"] if row["way"] != USUAL]
    heads = ((row["format"], row["way"]) for row in rows)
    cells = zip(heads, _of_rows(rows), strict=True)
    return table(("format", "way", *FIGURES), ((*head, *rest) for head, rest in cells))


def drafts() -> str:
    """Accepted drafts by kind of text, all requests of a kind together, and what is planned."""
    rows = [row for row in raw(DRAFTS)["summary"] if row["drafter"] != "none"]
    is_planned = any("plan" in row for row in rows)
    return table(
        (
            "text", "requests at once", "drafter", "accepted", "tokens a step",
            *(("tokens/s beside no drafts", "planned", "drafts by the plan") if is_planned else ()),
        ),
        (
            (
                row["text"], str(row["requests"]), row["drafter"],
                f"{row['accepted']:.0%}".replace("%", " %"), f"{row['tokens_a_step']:.2f}",
                *(_beside_the_plan(row) if is_planned else ()),
            )
            for row in rows
        ),
    )  # fmt: skip


def _beside_the_plan(row: dict[str, Any]) -> tuple[str, str, str]:
    """Measured and planned tokens per second in parts of those without drafts; planned drafts."""
    if "plan" not in row:
        return f"{row['speed_up']:.2f}", "–", "–"
    asked, plain = (row["plan"][name] for name in ("asked", "plain"))
    planned = asked["tokens"] / asked["step_s"] * plain["step_s"] / plain["tokens"]
    return f"{row['speed_up']:.2f}", f"{planned:.2f}", str(row["plan"]["best"]["drafts"])


def load() -> str:
    """Figures of servers under a load of real text; medians of rounds."""
    return table(
        (
            "server", "tokens/s", "beside stock", "first token, ms: median", "99 %",
            "between tokens, ms: median", "99 %",
        ),
        (
            (
                row["server"], f"{row['output_throughput']:.0f}",
                f"{row['ratios']['output_throughput']:.2f}",
                *(f"{row[key]:.0f}" for key in LOAD_FIGURES),
            )
            for row in raw(LOAD)["summary"]
        ),
    )  # fmt: skip


TABLES = {
    "likelihood by format": formats,
    "likelihood by way": ways,
    "drafts": drafts,
    "load": load,
}


def written(page: str) -> str:
    """The page with its tables written anew."""
    for name, make in TABLES.items():
        page = replaced(page, begin(name), END, make())
    return page


if __name__ == "__main__":
    rewrite(PAGE, written)

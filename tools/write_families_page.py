"""Write the table of docs/families.md: what `make families` saw of each architecture.

    python tools/write_families_page.py

The results are those of tests/families/results.json; the text around the table is kept.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

from page_blocks import DOCS, replaced, rewrite, table

PAGE = DOCS / "families.md"
RESULTS = DOCS.parent / "tests" / "families" / "results.json"
BEGIN = "<!-- families: written by tools/write_families_page.py -->"
END = "<!-- end of families -->"
COLUMNS = {
    "stages": "models of two stages",
    "pipeline": "pipeline of two",
    "tensor": "tensor parallel of two",
    "experts": "expert ranks of two",
}
NOT_ASKED = "–"


def cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """An architecture's outcomes, and the sentences that belong to them."""
    if "none" in row:
        return (*(NOT_ASKED,) * len(COLUMNS), row["none"])
    if "stock" in row:
        why = f"stock vLLM fails on CPUs: {_quoted(row['stock'])}"
        return (*(row.get(key, {}).get("outcome", NOT_ASKED) for key in COLUMNS), why)
    found = [row.get(key, {}) for key in COLUMNS]
    sentences = dict.fromkeys(one["sentence"] for one in found if "sentence" in one)
    outcomes = (one.get("outcome", NOT_ASKED) for one in found)
    why = [_quoted(sentence) for sentence in sentences]
    if "in_place_of_stock" in row:
        error = _quoted(row["in_place_of_stock"])
        why.append(f"engines are beside Transformers: stock vLLM fails with {error}")
    return (*outcomes, "; ".join(why))


def _quoted(sentence: str) -> str:
    """A message of a program, which may have any words."""
    return "`" + sentence.replace("`", "'").replace("\n", " ") + "`"


def content(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Counts by column, and the table."""
    lines = []
    for key, title in COLUMNS.items():
        seen = Counter(row[key]["outcome"] for row in results.values() if key in row)
        counts = ", ".join(f"{count} {outcome}" for outcome, count in seen.most_common())
        lines.append(f"- {title}: {counts or 'not asked yet'}")
    rows = [(f"`{name}`", *cells(row)) for name, row in sorted(results.items())]
    return "\n".join(lines) + "\n\n" + table(("architecture", *COLUMNS.values(), "why"), rows)


def written(page: str) -> str:
    """The page with the results as they are now."""
    return replaced(page, BEGIN, END, content(json.loads(RESULTS.read_text())))


if __name__ == "__main__":
    rewrite(PAGE, written)

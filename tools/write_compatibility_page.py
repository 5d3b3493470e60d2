"""Write the table of refusals into docs/compatibility.md, from the rows that refuse.

    python tools/write_compatibility_page.py

What, where, why and what to do instead come from `ray_hetero.preflight.refusals`.
"""

from __future__ import annotations

from page_blocks import DOCS, replaced, table

from ray_hetero.preflight.refusals import REFUSALS, Refusal

PAGE = DOCS / "compatibility.md"
BEGIN = "<!-- refusals: written by tools/write_compatibility_page.py -->"
END = "<!-- end of refusals -->"


def rows() -> list[tuple[str, ...]]:
    """What is refused, where, why, and what to do instead."""
    return [
        (_what(row), where, why(row), row.instead)
        for where, refusals in REFUSALS.items()
        for row in refusals
    ]


def why(row: Refusal[object]) -> str:
    """A row's reason as a sentence, and what was seen."""
    reason = row.why if row.why.startswith("vLLM") else row.why[0].upper() + row.why[1:]
    return f"{reason}. {row.seen}".strip()


def _what(row: Refusal[object]) -> str:
    words = row.option.replace("{found}", "…").split()
    return " ".join(f"`{word}`" if set(word) & set("-_=") else word for word in words)


def written(page: str) -> str:
    """The page with its table written anew."""
    return replaced(page, BEGIN, END, table(("what", "where", "why", "instead"), rows()))


def main() -> None:
    """Rewrite the page."""
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()

"""Write the table of known parts into docs/placement-and-planning.md.

    python tools/write_parts_page.py

Figures come from `placement.plan.parts`; the text around the table is kept.
"""

from __future__ import annotations

from collections.abc import Iterator

from page_blocks import DOCS, replaced, rewrite, table

from placement.plan.parts import PARTS

PAGE = DOCS / "placement-and-planning.md"
BEGIN = "<!-- parts: written by tools/write_parts_page.py -->"
END = "<!-- end of parts -->"
HEAD = ("part", "GB/s", "dense bf16 TFLOP/s", "GiB", "link, GB/s one way")


def rows() -> Iterator[tuple[str, ...]]:
    """One row a part, with the figures as they are published."""
    for part in PARTS:
        link = "" if part.link_gb_s is None else f"{part.link_gb_s:g}"
        yield part.name, f"{part.gb_s:g}", f"{part.tflop_s:g}", f"{part.memory_gib:g}", link


def written(page: str) -> str:
    """The page with the table written anew."""
    return replaced(page, BEGIN, END, table(HEAD, rows()))


if __name__ == "__main__":
    rewrite(PAGE, written)

"""Write the tables of refusals and of architectures into docs/compatibility.md.

    python tools/write_compatibility_page.py

What, where, why and what to do instead come from the rows of `ray_hetero.preflight.refusals`, the
architectures from `ray_hetero.compat.models.fused_architectures`.
"""

from __future__ import annotations

from page_blocks import DOCS, replaced, rewrite, table

from ray_hetero.compat.models.fused_architectures import ARCHITECTURES
from ray_hetero.preflight.refusal import Refusal
from ray_hetero.preflight.refusals import REFUSALS

PAGE = DOCS / "compatibility.md"
BEGIN = "<!-- refusals: written by tools/write_compatibility_page.py -->"
END = "<!-- end of refusals -->"
MODELS = (
    "<!-- architectures: written by tools/write_compatibility_page.py -->",
    "<!-- end of architectures -->",
)


def rows() -> list[tuple[str, ...]]:
    """Table of refusals: option, place, reason, and what to do instead."""
    return [
        (_what(row), where, why(row), row.instead)
        for where, refusals in REFUSALS.items()
        for row in refusals
    ]


def architectures() -> list[tuple[str, ...]]:
    """Which models' layers are one operator, why others' are not, and which ran in engines."""
    return [
        (
            one.models,
            ", ".join(f"`{name}`" for name in one.names),
            f"no: {one.why_not}" if one.why_not else "attention" if one.is_in_parts else "yes",
            one.parts,
            ", ".join(f"`{name}`" for name in one.in_engines) or "–",
        )
        for one in ARCHITECTURES
    ]


def why(row: Refusal[object]) -> str:
    """A row's reason as a sentence, and what was seen."""
    reason = row.why if row.why.startswith("vLLM") else row.why[0].upper() + row.why[1:]
    return f"{reason}. {row.seen}".strip()


def _what(row: Refusal[object]) -> str:
    words = row.option.replace("{found}", "…").split()
    return " ".join(f"`{word}`" if set(word) & set("-_=") else word for word in words)


def written(page: str) -> str:
    """The page with its tables written anew."""
    page = replaced(page, BEGIN, END, table(("what", "where", "why", "instead"), rows()))
    header = (
        "models", "architectures", "one operator", "beside the parts of Llama",
        "engine compared with stock vLLM",
    )  # fmt: skip
    return replaced(page, *MODELS, table(header, architectures()))


if __name__ == "__main__":
    rewrite(PAGE, written)

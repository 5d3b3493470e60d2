"""Write what of vLLM is patched and called into docs/upgrading-vllm.md, from compat's docstrings.

    python tools/write_upgrading_page.py

In `ray_hetero.compat` a docstring says `Replaces:`, `Uses:`, `Why:`, `Serves:` and `Can go when:`,
each at the beginning of a line; without `Serves:` a patch serves every supported release.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from page_blocks import DOCS, replaced, rewrite, table

from ray_hetero import compat
from ray_hetero.supported import SUPPORTED_VLLM

PAGE = DOCS / "upgrading-vllm.md"
PATCHES = ("<!-- patches: written by tools/write_upgrading_page.py -->", "<!-- end of patches -->")
USES = ("<!-- uses: written by tools/write_upgrading_page.py -->", "<!-- end of uses -->")
LABELS = ("Replaces", "Uses", "Why", "Serves", "Can go when")


@dataclass(frozen=True)
class Touched:
    """Names of vLLM that one function, class or module of compat touches."""

    module: str
    name: str
    replaces: str
    uses: str
    why: str
    serves: str
    can_go_when: str


def touched() -> Iterator[Touched]:
    """Everything of compat that says what it touches."""
    folder = Path(compat.__file__).parent
    for path in sorted(folder.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in (tree, *tree.body):
            if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef):
                said = [labelled(ast.get_docstring(node) or "", label) for label in LABELS]
                if any(said):
                    module = path.relative_to(folder).with_suffix("").as_posix()
                    yield Touched(module, getattr(node, "name", path.stem), *said)


def labelled(docstring: str, label: str) -> str:
    """Text of a docstring behind a label, in one line; empty if there is none."""
    labels = "|".join(LABELS)
    found = re.search(rf"^{label}: (.+?)(?=\n(?:{labels}):|\n\n|\Z)", docstring, re.S | re.M)
    return " ".join(found[1].split()).rstrip(".") if found else ""


def patches() -> str:
    """The table of patches."""
    return table(
        ("patch", "in `compat/`", "vLLM", "replaces", "why", "can go when"),
        (
            (
                f"`{one.name}`",
                f"`{one.module}.py`",
                one.serves or ", ".join(SUPPORTED_VLLM),
                one.replaces,
                one.why,
                one.can_go_when,
            )
            for one in touched()
            if one.can_go_when
        ),
    )


def uses() -> str:
    """The table of private names that are called or read."""
    return table(
        ("in", "uses"),
        ((f"`compat/{one.module}.py`: `{one.name}`", one.uses) for one in touched() if one.uses),
    )


def written(page: str) -> str:
    """The page with both tables written anew."""
    return replaced(replaced(page, *PATCHES, patches()), *USES, uses())


if __name__ == "__main__":
    rewrite(PAGE, written)

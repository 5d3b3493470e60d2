"""The walks of the architecture page pass modules that there are, each known to an earlier one."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
WALK = re.compile(r"<!-- walk: ([\w ]+) -->\n(.*?)<!-- end of walk -->", re.DOTALL)
ROW = re.compile(r"^\| `(.+?)` \| .+ \| (.+) \|$", re.MULTILINE)
WALKS = {name: ROW.findall(table) for name, table in WALK.findall(PAGE)}
MOST = {"decode step": 14, "long prompt": 18, "FP8 weight": 16, "plan": 16}
"""Modules that a walk may pass."""


def imported(path: Path) -> set[Path]:
    """Files that a module imports, within functions and for types too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            found |= {ROOT / f"{name.replace('.', '/')}.py" for name in names}
    return found


def test_every_walk_is_short() -> None:
    assert {name: len(rows) for name, rows in WALKS.items()}.keys() == MOST.keys()
    assert all(2 < len(rows) <= MOST[name] for name, rows in WALKS.items())


@pytest.mark.parametrize("name", MOST)
def test_every_module_is_reached_as_the_page_says(name: str) -> None:
    passed: list[Path] = []
    for module, how in WALKS[name]:
        path = ROOT / module
        assert path.is_file(), module
        is_imported = any(path in imported(one) for one in passed)
        assert is_imported == (how == "import"), (module, how)
        passed.append(path)

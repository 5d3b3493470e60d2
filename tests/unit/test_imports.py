"""Which room may import which: one direction, and no circle."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = {
    "ray_hetero": (
        "cli", "launch", "executor", "worker", "observability", "distributed", "kernels",
        "planning", "weight_formats", "preflight", "runtime", "compat", "",
    ),
    "placement": ("plan", "cluster", "model", "host", ""),
}  # fmt: skip
"""From the top down; a module imports from its own room and from those below.  The last room are
the modules beside the rooms."""
ENTRY_POINTS = {"ray_hetero.plugin"}
"""Called by vLLM from outside; they import what they start when it is needed."""


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {
    name_of(path): path for package in ROOMS for path in sorted((ROOT / package).rglob("*.py"))
}


def imported(module: str, *, at_import: bool = False) -> Iterator[str]:
    """Modules of these packages that a module names in imports, inside of functions too."""
    tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
    for node in _executed(tree) if at_import else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module in MODULES:
            for alias in node.names:
                below = f"{node.module}.{alias.name}"
                yield below if below in MODULES else str(node.module)


def _executed(tree: ast.Module) -> Iterator[ast.AST]:
    """What runs when the module is imported: not functions, and not what only checkers read."""
    for node in tree.body:
        if isinstance(node, ast.If):
            if ast.unparse(node.test) != "TYPE_CHECKING":
                yield from node.body
        elif isinstance(node, ast.Try):
            yield from node.body
        else:
            yield node


def room_of(module: str) -> tuple[str, str]:
    package, *inside = module.split(".")
    return package, inside[0] if inside and inside[0] in ROOMS[package] else ""


@pytest.mark.parametrize("package", ROOMS)
def test_every_folder_is_a_room(package: str) -> None:
    folders = {path.name for path in (ROOT / package).iterdir() if (path / "__init__.py").exists()}
    assert folders == set(ROOMS[package]) - {""}


@pytest.mark.parametrize("module", sorted(MODULES.keys() - ENTRY_POINTS))
def test_a_module_imports_from_its_room_and_from_those_below(module: str) -> None:
    package, room = room_of(module)
    order = ROOMS[package]
    for name in imported(module):
        other, below = room_of(name)
        if other == package:
            assert order.index(below) >= order.index(room), f"{name} is above"
        else:
            assert (package, other) == ("ray_hetero", "placement"), f"{name} is another package's"


def test_no_modules_import_each_other() -> None:
    graph = {module: set(imported(module, at_import=True)) - {module} for module in MODULES}
    graphlib.TopologicalSorter(graph).prepare()

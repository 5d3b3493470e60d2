"""Print what another release of vLLM has moved, removed or changed of all that is touched here.

    python tools/vllm_changes.py 0.34.0                     since the newest that is supported
    python tools/vllm_changes.py 0.34.0 --since 0.32.0
    python tools/vllm_changes.py 0.34.0 --diff SpinCondition.wait    both bodies, as a difference
    python tools/vllm_changes.py 0.34.0 --reviewed          fail where the page has no row

The names are those that the contract tests hold.  Both releases are read, not imported; a body has
changed where its statements have, comments and docstrings aside.  docs/upgrading-vllm.md has a row
for each change that was looked at.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from vllm_release import unpacked

from ray_hetero.supported import SUPPORTED_VLLM, installed_vllm

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/upgrading-vllm.md"
NAMES = "--names"
"""Option by which this file lists the names of the release that is imported, in JSON."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Name:
    """A name of vLLM's, and the module of this package that touches it."""

    where: str
    module: str
    qualified: str
    """Within its module, such as SpinCondition.wait."""


@dataclass(frozen=True)
class Change:
    """Change of a name between two releases."""

    kind: str
    """gone, moved or body."""
    name: Name
    now: str
    """Module of a moved one."""


class Release:
    """The Python files of one release."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        """Folder that has the folder vllm."""

    @cache  # noqa: B019
    def tree(self, module: str) -> ast.Module | None:
        """A module; None where the release does not have it."""
        path = self.folder / module.replace(".", "/")
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.exists():
                return ast.parse(file.read_text(encoding="utf-8"))
        return None

    def found(self, module: str, qualified: str) -> ast.AST | None:
        """Where a name is defined or assigned in a module; None where it is not."""
        node: ast.AST | None = self.tree(module)
        for part in qualified.split("."):
            if node is None:
                return None
            node = next((one for one in _members(node) if _named(one, part)), None)
        return node

    @cached_property
    def places(self) -> dict[str, list[str]]:
        """Modules by the classes and functions on their first level."""
        places: dict[str, list[str]] = {}
        for path in sorted((self.folder / "vllm").rglob("*.py")):
            parts = path.relative_to(self.folder).with_suffix("").parts
            module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            for name in re.findall(
                r"^(?:class|(?:async )?def) (\w+)", path.read_text("utf-8"), re.M
            ):
                places.setdefault(name, []).append(module)
        return places


def _members(node: ast.AST) -> Iterator[ast.AST]:
    """Definitions and assignments of a module or class, those behind an `if` or `try` too; of a
    class also what its methods assign to `self`."""
    for child in ast.iter_child_nodes(node):
        yield child
        if isinstance(child, ast.If | ast.Try | ast.ExceptHandler | ast.With):
            yield from _members(child)
    if isinstance(node, ast.ClassDef):
        for method in node.body:
            if isinstance(method, Function):
                yield from (
                    one for one in ast.walk(method) if isinstance(one, ast.Assign | ast.AnnAssign)
                )


def _named(node: ast.AST, name: str) -> bool:
    if isinstance(node, ast.ClassDef | Function):
        return node.name == name
    targets = (
        node.targets if isinstance(node, ast.Assign)
        else [node.target] if isinstance(node, ast.AnnAssign) else []
    )  # fmt: skip
    return any(ast.unparse(one) in (name, f"self.{name}") for one in targets)


def body(node: ast.AST) -> str:
    """A function, or a default, as text without comments and docstring."""
    if isinstance(node, Function):
        rest = node.body[1:] if ast.get_docstring(node) is not None else node.body
        node = type(node)(**{**dict(ast.iter_fields(node)), "body": rest or [ast.Pass()]})
    return ast.unparse(ast.fix_missing_locations(node))


def changes(names: Iterable[Name], old: Release, new: Release) -> Iterator[Change]:
    """Changes of names that the old release has."""
    for name in names:
        was, now = (one.found(name.module, name.qualified) for one in (old, new))
        module = name.module
        if was is None:
            continue  # an instance's, of a library, or made when vLLM is imported
        if now is None:
            first = name.qualified.split(".")[0]
            candidates = new.places.get(first, [])
            module = next((one for one in candidates if new.found(one, name.qualified)), "")
            yield Change("moved" if module else "gone", name, module)
            now = new.found(module, name.qualified) if module else None
        if isinstance(now, Function) and body(was) != body(now):
            yield Change("body", name, module)


def names_of_contract() -> Iterator[Name]:
    """Names of the imported vLLM that the contract tests hold."""
    sys.path[:0] = [str(ROOT / "tests/unit/compat"), str(ROOT / "tests/unit")]
    import test_contract as contract

    for where, owner, name in (*contract.PRIVATE, *contract.ASSIGNED):
        yield _name(where, owner, name)
    for cls, methods in contract.OVERRIDES.items():
        where = cls.__module__.removeprefix("ray_hetero.").replace(".", "/")
        for method in sorted(methods):
            bases = (one for one in cls.__mro__[1:] if one.__module__.startswith("vllm."))
            owner = next(one for one in bases if method in vars(one))
            yield _name(where, owner, method)
    for where, module, name in sorted(set(contract._imports_of_vllm())):
        value = getattr(sys.modules[module], name)
        if inspect.isclass(value) or inspect.isfunction(value):
            value = inspect.unwrap(value)
            yield Name(where, value.__module__, value.__qualname__)


def _name(where: str, owner: Any, name: str) -> Name:
    """An attribute of a module or class, at home where it is defined."""
    if inspect.isclass(owner):
        bases = [one for one in owner.__mro__ if name in vars(one)]
        home = bases[0] if bases and bases[0].__module__.startswith("vllm") else owner
        return Name(where, home.__module__, f"{home.__qualname__}.{name}")
    value = inspect.unwrap(getattr(owner, name, None))
    if inspect.isfunction(value) or inspect.isclass(value):
        return Name(where, value.__module__, value.__qualname__)
    return Name(where, owner.__name__, name)


def names_of(release: str, folder: Path) -> list[Name]:
    """The names in a release, which a process of its own imports."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    if not _is_installed(release):
        environment["PYTHONPATH"] = str(folder)
    answer = subprocess.run(
        [sys.executable, __file__, NAMES], env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    if answer.returncode:
        said = (answer.stderr.strip() or "nothing").splitlines()[-1]
        raise SystemExit(f"vLLM {release} cannot be read by the contract tests: {said}")
    return [Name(*one) for one in json.loads(answer.stdout.splitlines()[-1])]


def _is_installed(release: str) -> bool:
    return installed_vllm().partition("+")[0] == release


def folder_of(release: str) -> Path:
    """Where the Python files of a release are; fetched if they are nowhere."""
    if _is_installed(release):
        import importlib.util

        (place,) = importlib.util.find_spec("vllm").submodule_search_locations or ()
        return Path(place).parent
    return unpacked(release)


def reviewed(page: str, release: str) -> set[str]:
    """Names with a row below the heading of a release."""
    part = page.partition(f"\n### Bodies that changed in {release}\n")[2]
    rows = re.split(r"\n#", part)[0].splitlines()
    cells = (row.split("|")[1] for row in rows if row.startswith("|"))
    return {name for cell in cells for name in re.findall(r"`([\w.]+)`", cell)}


def report(found: list[Change], looked_at: set[str]) -> str:
    """Lines for people, a name once, with all modules that touch it."""
    lines = []
    for kind, title in (
        ("gone", "gone"), ("moved", "moved"), ("body", "same name, another body"),
    ):  # fmt: skip
        wheres: dict[tuple[str, str, str], list[str]] = {}
        for one in found:
            if one.kind == kind:
                key = (one.name.module, one.name.qualified, one.now)
                wheres.setdefault(key, []).append(one.name.where)
        lines.append(f"{title}: {len(wheres) or 'none'}")
        for (module, qualified, now), places in sorted(wheres.items()):
            text = f"  {module}.{qualified}"
            text += f" → {now}" if kind == "moved" else ""
            text += f"  ({', '.join(sorted(set(places)))})"
            if kind == "body":
                text += "" if qualified in looked_at else "  NOT REVIEWED"
            lines.append(text)
    return "\n".join(lines)


def difference(name: str, found: list[Change], old: Release, new: Release) -> str:
    """Both bodies of a name."""
    one = next((one for one in found if one.kind == "body" and one.name.qualified == name), None)
    if one is None:
        raise SystemExit(f"{name} is none of the bodies that have changed")
    was, now = (
        body(node).splitlines()
        for node in (old.found(one.name.module, name), new.found(one.now, name))
        if node is not None
    )
    return "\n".join(difflib.unified_diff(was, now, old.folder.name, new.folder.name, lineterm=""))


def main() -> None:
    """Print the report."""
    if sys.argv[1:] == [NAMES]:
        print(json.dumps([(one.where, one.module, one.qualified) for one in names_of_contract()]))
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("release")
    parser.add_argument("--since")
    parser.add_argument("--diff")
    parser.add_argument("--reviewed", action="store_true")
    asked = parser.parse_args()
    others = [one for one in SUPPORTED_VLLM.values() if one != asked.release]
    since = asked.since or others[-1]
    old, new = Release(folder_of(since)), Release(folder_of(asked.release))
    names = names_of(since, old.folder)
    found = list(dict.fromkeys(changes(names, old, new)))
    if asked.diff:
        print(difference(asked.diff, found, old, new))
        return
    looked_at = reviewed(PAGE.read_text(encoding="utf-8"), asked.release)
    print(f"vLLM {asked.release} since {since}, {len(set(names))} names that are touched here")
    print(report(found, looked_at))
    missing = {one.name.qualified for one in found if one.kind == "body"} - looked_at
    if asked.reviewed and missing:
        raise SystemExit(
            f"{PAGE.name} has no row for {', '.join(sorted(missing))} below "
            f"'Bodies that changed in {asked.release}'"
        )


if __name__ == "__main__":
    main()

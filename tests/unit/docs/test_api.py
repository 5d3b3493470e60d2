"""What is public: the page that lists it, and the imports that pages and examples show."""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "tools"))

import write_api_page as api  # noqa: E402

NOTEBOOK = ROOT / "examples" / "notebook.ipynb"


def test_the_page_is_up_to_date() -> None:
    page = api.PAGE.read_text(encoding="utf-8")
    assert api.written(page) == page, "type: python tools/write_api_page.py"


def test_everything_public_is_described() -> None:
    found = [(f"{module}.{name}", one) for module, name, one in api.public()]
    found += [(error.__name__, error) for _, error in api.errors()]
    assert len(found) > 15
    assert [name for name, one in found if not inspect.getdoc(one)] == []


def shown() -> Iterator[tuple[str, str]]:
    """Where and what: every block of Python that a page or an example shows."""
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        for block in re.findall(r"^```python\n(.*?)^```$", page.read_text("utf-8"), re.M | re.S):
            yield page.name, block
    for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            yield NOTEBOOK.name, "".join(cell["source"])


def imported() -> Iterator[tuple[str, str, str]]:
    """Where, module and name of every import of these packages in what is shown."""
    for where, block in shown():
        for node in ast.walk(ast.parse(block)):
            if not isinstance(node, ast.ImportFrom) or node.module is None:
                continue
            if node.module.partition(".")[0] in {"ray_hetero", "placement"}:
                yield from ((where, node.module, alias.name) for alias in node.names)


def test_what_is_shown_is_public() -> None:
    found = set(imported())
    assert {where for where, _, _ in found} >= {NOTEBOOK.name, "quick-start-notebook.md"}
    public = {(module, name) for module, name, _ in api.public()}
    assert {one for one in found if one[1:] not in public} == set()


@pytest.mark.parametrize("package", ["ray_hetero", "placement"])
def test_types_are_shipped(package: str) -> None:
    assert (ROOT / package / "py.typed").read_text() == ""
    assert f'{package} = ["py.typed"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")

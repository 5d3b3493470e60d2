"""The badges of README say what the package says of itself."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "tools"))

import write_badges  # noqa: E402


def test_pictures_are_those_that_the_tool_writes() -> None:
    there = {path.name: path.read_text(encoding="utf-8") for path in write_badges.FOLDER.iterdir()}
    assert there == write_badges.written(), "type: python tools/write_badges.py"


@pytest.mark.parametrize("page", ["README.md", "README.ko.md"])
def test_readme_shows_each_with_what_it_says_for_those_who_do_not_see_it(page: str) -> None:
    shown = re.findall(r"!\[([^]]+)\]\(docs/badges/([\w.]+)\)", (ROOT / page).read_text("utf-8"))
    written = write_badges.written()
    assert {file for _, file in shown} == set(written)
    for text, file in shown:
        (said,) = re.findall('aria-label="([^"]+)"', written[file])
        assert text == said

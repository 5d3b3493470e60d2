"""What `tools/check_spelling.py` takes for prose, and that it finds a wrong word there."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("codespell_lib", reason="codespell is not installed; type: make env")

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "tools"))

import check_spelling  # noqa: E402

# Each of these is wrong on purpose: codespell:ignore
WRONG = "teh colour recieved"  # codespell:ignore
AMERICAN = "color"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is checked in the place of the repository."""
    monkeypatch.setattr(check_spelling, "ROOT", tmp_path)
    return tmp_path


def found(root: Path, name: str, text: str) -> set[str]:
    (root / name).write_text(text, encoding="utf-8")
    lines = check_spelling.misspelt([name]).splitlines()
    return {line.removeprefix(f"{name}:") for line in lines}


def test_a_page_is_read_without_its_code(root: Path) -> None:
    page = [f"{WRONG}, `color`, --color, a.color", "```sh", "color", "```", f"a {AMERICAN}"]
    assert found(root, "page.md", "\n".join(page)) == {
        "1: teh ==> the",  # codespell:ignore
        "1: recieved ==> received",  # codespell:ignore
        f"5: {AMERICAN} ==> colour",
    }


def test_of_python_docstrings_comments_and_messages_are_read(root: Path) -> None:
    code = [
        "def color():",
        f'    """A {AMERICAN}."""',
        f"    # {AMERICAN}",
        f'    f("a {AMERICAN}", "color")',  # codespell:ignore
    ]
    assert found(root, "code.py", "\n".join(code)) == {
        f"{line}: {AMERICAN} ==> colour" for line in (2, 3, 4)
    }


def test_of_native_code_comments_and_messages_are_read(root: Path) -> None:
    code = [
        f"int color;  // {AMERICAN}",  # codespell:ignore
        f'fail("a {AMERICAN}");',
        'fail("color");',
    ]
    assert found(root, "code.cpp", "\n".join(code)) == {
        f"{line}: {AMERICAN} ==> colour" for line in (1, 2)
    }


def test_words_that_british_english_has_too_are_right(root: Path) -> None:
    assert not found(
        root, "page.md", "A program in a license, a story, a writable disk, routing.\n"
    )


def test_lists_of_words_are_in_order() -> None:
    for line in check_spelling.british_words().split():
        american, arrow, british = line.partition("->")
        assert american
        assert arrow
        assert british
        assert american != british

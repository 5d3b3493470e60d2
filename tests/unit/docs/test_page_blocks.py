"""Every block of code that a user is shown is run by a test, or listed with a reason."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "tests" / "cluster"))

import pages  # noqa: E402

RUN = {name: value for name, value in vars(pages).items() if isinstance(value, pages.Block)}
LISTED = [*RUN.values(), *pages.NOT_RUN]


TESTS = "".join(
    (ROOT / "tests" / name).read_text(encoding="utf-8")
    for name in ("cluster/test_pages.py", "unit/docs/test_page_commands.py")
)


@pytest.mark.parametrize("page", pages.pages())
def test_every_block_of_a_page_is_run_or_listed(page: str) -> None:
    shown = pages.blocks(page)
    assert shown
    found = [block for block in LISTED if block.page == page]
    for text in shown:
        assert sum(block.part in text for block in found) == 1, (
            f"{page}: expected this block once in tests/cluster/pages.py, to be run or with a "
            f"reason why not:\n{text}"
        )


@pytest.mark.parametrize("block", LISTED, ids=lambda block: f"{block.page}: {block.part}")
def test_what_is_listed_is_one_block_of_its_page(block: pages.Block) -> None:
    assert block.part in block.text


@pytest.mark.parametrize("name", RUN)
def test_what_is_to_be_run_is_used_by_a_test(name: str) -> None:
    assert re.search(rf"\bpages\.{name}\b", TESTS)


@pytest.mark.parametrize("page", pages.pages())
def test_every_block_has_fences_and_a_language(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert len(re.findall(r"^```", text, re.M)) == 2 * len(pages.blocks(page))
    # Four spaces below an empty line make a block, too, unless a list goes on there.
    prose = re.sub(r"^```\w+\n.*?^```$", "", text, flags=re.M | re.S)
    assert re.findall(r"(?:^|\n)(?![-*\d ]).*\n\n    \S.*", prose) == []


def test_what_is_said_to_be_the_same_is_the_same() -> None:
    run = {command for block in RUN.values() for command in block.commands()}
    same = [block for block, reason in pages.NOT_RUN.items() if reason == pages.SAME]
    assert same
    for block in same:
        assert set(block.commands()) <= run


def test_a_new_block_is_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page = tmp_path / "docs" / "clusters.md"
    page.parent.mkdir()
    text = (ROOT / "docs" / "clusters.md").read_text(encoding="utf-8")
    new = "```sh\nray-hetero new\n```\n\n"
    page.write_text(text.replace("### When a node fails\n", f"{new}### When a node fails\n"))
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    with pytest.raises(AssertionError, match="ray-hetero new"):
        test_every_block_of_a_page_is_run_or_listed("docs/clusters.md")

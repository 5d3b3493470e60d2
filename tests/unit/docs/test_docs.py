"""What README and docs say is there: links, commands, keys, messages, patches."""

from __future__ import annotations

import ast
import json
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from test_imports import ROOMS

from placement.plan.described import read_described
from ray_hetero.cli.main import commands
from ray_hetero.compat.engine import draft_methods
from ray_hetero.config import HeteroConfig, load_config
from ray_hetero.config_sources import ENVIRONMENT_VARIABLE, KEY

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "tools"))

import write_upgrading_page as upgrading  # noqa: E402
from write_configuration_page import PAGE, keys_of, written  # noqa: E402

DOCS = ROOT / "docs"
READMES = [ROOT / "README.md", ROOT / "README.ko.md"]
PAGES = [*READMES, *sorted(DOCS.rglob("*.md"))]
SOURCES = [
    path
    for package in ("ray_hetero", "placement")
    for path in sorted((ROOT / package).rglob("*.py"))
]
NOT_OURS = {"import torchvision", "torch==…+cpu", "ray-hetero plan"}
"""Code in headings of the troubleshooting page that is not a message of this package."""


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def prose(page: Path) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)


def links(page: Path) -> list[str]:
    found = re.findall(r"\]\(([^)\s]+)\)", prose(page))
    return [link for link in found if not re.match(r"[a-z]+:", link)]


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", prose(page), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path) if path else page
        assert target.exists(), f"{link}: no such file"
        assert ROOT in target.resolve().parents, f"{link} leads out of the repository"
        assert not anchor or anchor in anchors(target), f"{link}: no such heading"


OUTSIDE = [*PAGES, ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"]


@pytest.mark.parametrize("page", OUTSIDE, ids=name_of)
def test_every_link_to_elsewhere_has_the_form_of_one(page: Path) -> None:
    found = re.findall(r"\]\(([a-z]+:[^)]*)\)", prose(page))
    for link in found:
        parts = urlsplit(link)
        assert parts.scheme == "https", link
        assert re.fullmatch(r"[a-z0-9-]+(\.[a-z0-9-]+)+", parts.netloc), link
        assert not re.search(r"\s|[.,;]$", link), link


def pages_of(nav: list[dict[str, Any]]) -> Iterator[str]:
    for entry in nav:
        for page in entry.values():
            yield from [page] if isinstance(page, str) else pages_of(page)


def test_every_page_is_on_the_site_and_on_its_first_page_or_the_archives() -> None:
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    pages = set(pages_of(site["nav"]))
    assert pages <= {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    top = {path.name for path in DOCS.glob("*.md")}
    assert top <= pages
    archive = {name for name in pages if name.startswith("gpu-host/2")}
    recipes = {name for name in pages if name.startswith("recipes/")} - {"recipes/index.md"}
    linked = {link.partition("#")[0] for link in links(DOCS / "index.md")}
    assert linked == pages - archive - recipes - {"index.md"}
    assert {f"recipes/{link}" for link in links(DOCS / "recipes" / "index.md")} == recipes
    reports = {link.partition("#")[0] for link in links(DOCS / "gpu-host" / "index.md")}
    assert {f"gpu-host/{link}" for link in reports} >= archive


def test_the_two_readmes_have_the_same_content() -> None:
    english, korean = (page.read_text(encoding="utf-8") for page in READMES)

    def skeleton(text: str) -> dict[str, list[str]]:
        text = re.sub(r"\]\(README(\.ko)?\.md\)", "](README)", text)
        return {
            "headings": re.findall(
                r"^#+", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S), re.M
            ),
            "code": re.findall(r"^```\w+\n.*?^```$", text, re.M | re.S),
            "links": sorted(re.findall(r"\]\(([^)\s]+)\)", text)),
            "rows": [str(line.count("|")) for line in text.splitlines() if line.startswith("|")],
            "points": re.findall(r"^(?:-|\d\.) ", text, re.M),
            "keys": sorted(set(re.findall(r"`[a-z_]+\.[a-z_]+`", text))),
        }

    assert skeleton(korean) == skeleton(english)


def test_the_korean_quick_start_has_the_commands_of_the_english_one() -> None:
    english, korean = (
        (DOCS / name).read_text(encoding="utf-8")
        for name in ("quick-start-serve.md", "quick-start-serve.ko.md")
    )
    for part in (r"^```\w+\n.*?^```$", r"^## "):
        found = [re.findall(part, text, re.M | re.S) for text in (english, korean)]
        assert found[0] == found[1]
    named = [set(re.findall(r"`(ray-hetero [^`]+)`", text)) for text in (english, korean)]
    assert named[1] <= named[0]


def test_messages_of_the_korean_page_are_those_of_the_english_one_in_its_order() -> None:
    english, korean = (
        re.findall(r"^### (.+)$", (DOCS / name).read_text(encoding="utf-8"), re.M)
        for name in ("troubleshooting.md", "troubleshooting.ko.md")
    )
    places = [english.index(heading) for heading in korean]
    assert len(places) > 15
    assert places == sorted(places)


def test_the_configuration_page_is_up_to_date() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert written(page) == page, "type: python tools/write_configuration_page.py"


def test_the_table_has_every_key_with_its_meaning() -> None:
    rows = {
        key: (values, default, meaning) for key, values, default, meaning in keys_of(HeteroConfig)
    }
    assert all(meaning for _, _, meaning in rows.values())
    assert rows["cpu.reserved_cores"][:2] == ("whole number at least 0 or `auto`", "`auto`")
    assert rows["layout"][0] == "`auto` or list of (list of (`cpu`, `gpu`))"
    assert rows["gpu.memory_utilization"][0] == "number above 0 and at most 1 or `null`"


def test_a_page_without_the_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="expected the lines"):
        written("# Configuration")


def test_every_command_that_is_named_exists() -> None:
    known = {
        command.name or command.callback.__name__.replace("_", "-")
        for command in commands.registered_commands
        if command.callback
    }
    named = {
        (name_of(page), command)
        for page in PAGES
        for command in re.findall(r"\bray-hetero ([a-z][a-z-]+)", page.read_text(encoding="utf-8"))
    }
    assert {"doctor", "plan"} <= {command for _, command in named}
    # "install ray-hetero again" and the like do not occur in the pages.
    assert {entry for entry in named if entry[1] not in known} == set()


def test_every_extra_that_is_named_exists() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    named = {
        extra
        for extras in re.findall(r"'(?:\.|ray-hetero|dist/[\w.-]+)\[([\w,]+)\]'", text)
        for extra in extras.split(",")
    }
    assert {"cpu", "cuda", "test"} <= named <= set(project["optional-dependencies"])


def test_every_make_target_that_is_named_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert set(re.findall(r"^make ([a-z-]+)|`make ([a-z-]+)", text, re.M)) != set()
    named = {a or b for a, b in re.findall(r"^make ([a-z-]+)|`make ([a-z-]+)", text, re.M)}
    assert named <= targets


def test_every_file_that_is_named_exists() -> None:
    pattern = r"`((?:ray_hetero|placement|csrc|tests|benchmarks|tools|examples|docs)/[\w./-]+)`"
    named = {found for page in PAGES for found in re.findall(pattern, page.read_text("utf-8"))}
    assert "ray_hetero/compat/patching.py" in named
    assert {path for path in named if not (ROOT / path).exists()} == set()


def test_every_raw_file_that_is_named_exists_and_every_one_is_named() -> None:
    text = "\n".join(page.read_text("utf-8") for page in [*PAGES, *(ROOT / "tools").glob("*.py")])
    named = set(
        re.findall(r"`(?:[\w/-]*/)?(\d{4}-\d\d-\d\d-[\w-]+\.(?:jsonl?|txt|npz)(?:\.gz)?)`", text)
    )
    files = [path for path in (ROOT / "benchmarks" / "results").rglob("*") if path.is_file()]
    kept = {path.name for path in files}
    assert len(kept) == len(files)
    assert named <= kept
    # A text file beside a JSON file of the same name is that file for people.
    both = {path.with_suffix(".json").name for path in files if path.suffix == ".txt"} & named
    assert {
        name for name in kept - named if Path(name).with_suffix(".json").name not in both
    } == set()
    # A trace of routing is large, whatever it is packed with.
    traces = [path for path in files if path.suffix == ".npz"]
    assert max(path.stat().st_size for path in set(files) - set(traces)) < 200_000
    assert sum(path.stat().st_size for path in traces) < 1_000_000


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text("utf-8"), re.M | re.S)


def test_every_configuration_that_is_shown_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)
    given = [
        json.loads(text)
        for page in PAGES
        for block in blocks(page, "sh")
        for text in re.findall(r"--additional-config '([^']+)'", block)
    ]
    assert len(given) >= 5
    assert all(load_config(one) != HeteroConfig() for one in given)
    files = [text for page in PAGES for text in blocks(page, "yaml")]
    described = [text for text in files if "nodes:" in text]
    assert described
    for text in files:
        content = yaml.safe_load(text)
        if text in described:
            path = tmp_path / "cluster.yaml"
            path.write_text(text)
            assert read_described(path).devices
        else:
            assert load_config({KEY: content}) != HeteroConfig()


def templates() -> Iterator[str]:
    """Every text in the code, with … for what is put in at run time."""
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = (p.value if isinstance(p, ast.Constant) else "…" for p in node.values)
                yield "".join(map(str, parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield re.sub(r"%[sdg]", "…", node.value)


def messages() -> list[str]:
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    headings = re.findall(r"^### (.+)$", page, re.M)
    found = [code for heading in headings for code in re.findall(r"`([^`]+)`", heading)]
    return [code for code in found if code not in NOT_OURS]


@pytest.mark.parametrize("message", messages())
def test_messages_of_the_troubleshooting_page_are_in_the_code(message: str) -> None:
    parts = [part.strip() for part in message.split("…") if part.strip()]
    assert sum(map(len, parts)) > 10, "too little to tell one message from another"
    pattern = re.compile(".*".join(map(re.escape, parts)), re.S)
    assert any(pattern.search(template) for template in templates())


def test_the_upgrading_page_shows_what_compat_says() -> None:
    page = upgrading.PAGE.read_text(encoding="utf-8")
    assert upgrading.written(page) == page, "type: python tools/write_upgrading_page.py"


def test_every_patch_says_what_it_replaces_why_and_when_it_can_go() -> None:
    found = list(upgrading.touched())
    assert len(found) > 15
    for one in found:
        assert bool(one.replaces) == bool(one.why) == bool(one.can_go_when), one.name
        assert one.replaces or one.uses


def test_the_rooms_of_the_architecture_page_are_those_of_the_code() -> None:
    page = (DOCS / "architecture.md").read_text(encoding="utf-8")
    for package, rooms in ROOMS.items():
        _, _, table = page.partition(f"| subpackage of `{package}` |")
        named = re.findall(r"^\| `(\w+)/` \|", table.partition("\n\n")[0], re.M)
        assert (*named, "") == rooms


def counted_changes(heading: str) -> dict[str, int]:
    """Number of rooms of each change in the table behind a heading, which says the same."""
    page = (DOCS / "contributing.md").read_text(encoding="utf-8")
    _, _, section = page.partition(f"{heading}\n")
    _, _, table = section.partition("| change | rooms | files |\n|---|---|---|\n")
    counts = {}
    for row in table.partition("\n\n")[0].splitlines():
        change, said, files = (cell.strip() for cell in row.strip("|").split("|"))
        rooms = set(re.findall(r"`ray_hetero/(\w+)/", files))
        assert rooms <= set(ROOMS["ray_hetero"]), change
        if re.search(r"`ray_hetero/\w+\.py`", files):
            rooms.add("")
        if "the subpackage that reads it" in files:
            rooms.add("any")
        counts[change] = len(rooms) + ("`placement/" in files)
        assert int(said) == counts[change], change
    return counts


REVIEWED = {
    "a format of quantised checkpoints", "a norm of decoder layers", "a kind of state",
    "towers of images", "a new release of vLLM", "GPUs of another maker", "a link between stages",
    "an instruction set", "a method of speculation", "a metric", "a refusal",
    "where a CPU rank computes a step",
}  # fmt: skip
"""Twelve changes by which a reader's first guess is tried."""


def test_the_contributing_page_counts_the_rooms_of_each_change() -> None:
    near = counted_changes("## Where to change what")
    far = counted_changes("### Changes that reach further")
    assert len(near) >= 19
    assert max(near.values()) <= 3 < min(far.values())
    changes = {*near, *far}
    assert not {one for one in REVIEWED if not any(one in change for change in changes)}
    assert sum(any(one in change for change in near) for one in REVIEWED) >= 10


def test_the_page_about_speculation_has_the_methods_that_work() -> None:
    page = (DOCS / "speculation.md").read_text(encoding="utf-8")
    table = page.partition("| method | drafts come from | needs |\n|---|---|---|\n")[2]
    first = (row.split("|")[1] for row in table.partition("\n\n")[0].splitlines())
    named = [name for cell in first for name in re.findall(r"`(\w+)`", cell)]
    assert named == list(draft_methods.METHODS)


def test_every_benchmark_is_listed() -> None:
    page = (DOCS / "benchmarks/index.md").read_text(encoding="utf-8")
    rows, parts = page.partition("| script | purpose |\n|---|---|\n")[2].split("\n\n")[:2]
    scripts = {
        name for row in rows.splitlines() for name in re.findall(r"`(\S+)`", row.split("|")[1])
    }
    others = set(re.findall(r"`([\w.]+)`", parts)) - scripts
    files = {
        path for path in (ROOT / "benchmarks").iterdir() if path.suffix in (".py", ".cpp", ".h")
    }
    assert scripts | others == {path.name for path in files}
    runnable = {
        path.name for path in files
        if path.suffix == ".cpp" or "__main__" in path.read_text(encoding="utf-8")
    }  # fmt: skip
    assert runnable <= scripts


def test_layouts_that_work_beside_gpus_are_tests_for_hosts_with_gpus() -> None:
    page = (DOCS / "compatibility.md").read_text(encoding="utf-8")
    table = page.partition("<!-- layouts:")[2].partition("<!-- end of layouts -->")[0]
    rows = [line.split("|")[1:-1] for line in table.splitlines() if line.startswith("| ")][1:]
    gpu = ROOT / "tests" / "gpu"
    checked = 0
    for layout, _, one, two, *_ in rows:
        codes = re.findall(r"`([cg/]+)`", layout)
        for cell, file, count in ((one, "test_layouts.py", 1), (two, "test_two_gpus.py", 2)):
            tested = re.findall(r'Case\("[\w-]+", "\w+", "([cg/]+)"', (gpu / file).read_text())
            mine = [code for code in codes if code.count("g") in (0, count)]
            if "**works**" in cell:
                assert mine, layout
                assert set(mine) <= set(tested), layout
                checked += 1
    assert checked >= 8


def test_layouts_of_many_gpus_are_those_that_were_pretended() -> None:
    page = (DOCS / "compatibility.md").read_text(encoding="utf-8")
    table = page.partition("<!-- layouts:")[2].partition("<!-- end of layouts -->")[0]
    rows = [line.split("|")[1:-1] for line in table.splitlines() if line.startswith("| ")][1:]
    named = {code for row in rows for cell in row[4:6] for code in re.findall(r"`([cg/]+)`", cell)}
    cases = (ROOT / "tests" / "cluster" / "test_many_gpus.py").read_text(encoding="utf-8")
    stages = re.findall(r'^    "[^"]+": \(?(\[.*?\](?: \* \d)?)(?:, \d\))?,$', cases, re.M)
    pretended = set()
    for layout in stages:
        text = re.sub(r"group\((\d)\)", lambda found: f'"{"g" * int(found[1])}"', layout)
        text = text.replace('["cpu"]', '"c"').replace('["cpu", *"', '"c')
        times = re.search(r"\* (\d)$", text)
        found = re.findall(r'"([cg]+)"', text) * int(times[1] if times else 1)
        pretended.add("/".join(found))
    assert named == pretended


def test_the_words_of_the_glossary_are_in_order() -> None:
    page = (DOCS / "glossary.md").read_text(encoding="utf-8")
    words = re.findall(r"^\| ([\w -]+) \| \w", page, re.M)[1:]
    assert len(words) > 30
    assert words == sorted(words, key=str.lower)

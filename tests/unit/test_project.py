"""Changelog, versions and issue templates."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

from ray_hetero.cli.main import commands
from ray_hetero.config_sources import RENAMED
from ray_hetero.supported import SUPPORTED_VLLM

ROOT = Path(__file__).parents[2]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
GROUPS = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]
TEMPLATES = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))


def test_the_changelog_has_its_form() -> None:
    releases = re.findall(r"^## (.+)$", CHANGELOG, re.M)
    assert releases[0] == "[Unreleased]"
    for release in releases[1:]:
        assert re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", release)
    groups = re.findall(r"^### (.+)$", CHANGELOG, re.M)
    assert set(groups) <= set(GROUPS)
    assert f"For vLLM {' and '.join(SUPPORTED_VLLM)}." in CHANGELOG


def test_the_changelog_names_the_version_to_come_or_the_last_one() -> None:
    released = re.findall(r"^## \[(\d\S+)\]", CHANGELOG, re.M)
    assert released[0] == VERSION if released else f"what {VERSION} will bring" in CHANGELOG


def test_the_changelog_names_every_command_and_every_renamed_key() -> None:
    for command in commands.registered_commands:
        name = command.name or getattr(command.callback, "__name__", "")
        assert f"`{name}`" in CHANGELOG
    for old, new in RENAMED.items():
        assert re.search(rf"`{re.escape(old)}` →\s+`{re.escape(new)}`", CHANGELOG)


@pytest.mark.parametrize("path", [p for p in TEMPLATES if p.stem != "config"], ids=lambda p: p.stem)
def test_an_issue_template_is_a_form(path: Path) -> None:
    form = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert {"name", "description", "body"} <= form.keys()
    fields = [part for part in form["body"] if part["type"] != "markdown"]
    assert {part["type"] for part in fields} <= {"textarea", "input", "dropdown", "checkboxes"}
    identifiers = [part["id"] for part in fields]
    assert len(set(identifiers)) == len(identifiers) > 1
    assert all(part["attributes"]["label"] for part in fields)
    assert any(part.get("validations", {}).get("required") for part in fields)
    known = {command.name or command.callback.__name__ for command in commands.registered_commands}  # type: ignore[union-attr]
    named = re.findall(r"ray-hetero ([a-z-]+)", path.read_text(encoding="utf-8"))
    assert set(named) <= known


def test_the_ways_to_contribute_are_targets_of_make() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    named = set(re.findall(r"^make ([a-z-]+)", page, re.M))
    assert {"env", "check", "test"} <= named <= targets
    for link in re.findall(r"\]\(([^)#\s]+)", page):
        assert (ROOT / link).exists()

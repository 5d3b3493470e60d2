"""Releases of vLLM: which are supported, and what in the code serves only some of them."""

from __future__ import annotations

import re
import sys
import zipfile
from pathlib import Path

import pytest

from ray_hetero import supported
from ray_hetero.supported import SUPPORTED_VLLM, is_since, is_supported

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "tools"))

import vllm_changes  # noqa: E402
import vllm_release  # noqa: E402
import write_upgrading_page as upgrading  # noqa: E402

LATER = set(list(SUPPORTED_VLLM)[1:])


@pytest.mark.parametrize(
    ("release", "answer"),
    [("0.32.0", True), ("0.33.1+cpu", True), ("0.33.0rc1", True), ("0.34.0", False),
     ("0.3.20", False), ("1.32.0", False), ("none", False)],
)  # fmt: skip
def test_minor_releases_are_supported(release: str, answer: bool) -> None:
    assert is_supported(release) is answer


@pytest.mark.parametrize(
    ("installed", "answer"),
    [("0.32.0", False), ("0.33.0+cpu", True), ("0.40.0", True), ("none", False)],
)
def test_the_code_asks_for_the_first_release_of_a_change(
    installed: str, answer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supported, "installed_vllm", lambda: installed)
    assert is_since("0.33") is answer


def test_no_branch_and_no_patch_serves_a_release_that_is_not_supported() -> None:
    asked = {
        (path.name, minor)
        for path in (ROOT / "ray_hetero").rglob("*.py")
        for minor in re.findall(r'is_since\("(.+?)"\)', path.read_text(encoding="utf-8"))
    }
    assert {minor for _, minor in asked} <= LATER, asked
    for patch in upgrading.touched():
        if patch.serves:
            assert set(patch.serves.split(", ")) < set(SUPPORTED_VLLM), patch.name


def wheel_of(folder: Path, metadata: str) -> Path:
    path = folder / "vllm-0.33.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("vllm/__init__.py", "")
        archive.writestr("vllm/_C.abi3.so", "kernels")
        archive.writestr("vllm-0.33.0.dist-info/METADATA", metadata)
    return path


def test_a_release_is_unpacked_without_kernels_and_marked_as_a_cpu_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "Metadata-Version: 2.1\nName: vllm\nVersion: 0.33.0\n"
    monkeypatch.setattr(vllm_release, "_fetched", lambda release, folder: wheel_of(folder, text))
    folder = vllm_release.unpacked("0.33.0", tmp_path)
    found = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert found == ["vllm-0.33.0+cpu.dist-info/METADATA", "vllm/__init__.py"]
    monkeypatch.setattr(vllm_release, "_fetched", lambda *_: pytest.fail("fetched again"))
    assert vllm_release.unpacked("0.33.0", tmp_path) == folder


def test_a_release_is_put_together_with_the_operators_of_the_installed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "Metadata-Version: 2.1\nName: vllm\nVersion: 0.33.0\n"
    monkeypatch.setattr(vllm_release, "_fetched", lambda release, folder: wheel_of(folder, text))
    with monkeypatch.context() as patched:
        patched.setattr(vllm_release, "find_spec", lambda name: None)
        with pytest.raises(SystemExit, match="no compiled operators"):
            vllm_release.with_operators("0.33.0", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["0.33.0"]
    folder = vllm_release.with_operators("0.33.0", tmp_path)
    assert (folder / "vllm/__init__.py").exists()
    objects = sorted((folder / "vllm").glob("*.so"))
    assert "_C.abi3.so" in [path.name for path in objects]
    assert all(path.is_symlink() and path.exists() for path in objects)
    # The contract tests look at Python files only.
    assert list((tmp_path / "0.33.0").rglob("*.so")) == []
    assert vllm_release.with_operators("0.33.0", tmp_path) == folder


def test_a_release_that_is_not_what_it_says_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        vllm_release, "_fetched", lambda release, folder: wheel_of(folder, "Name: vllm\n")
    )
    with pytest.raises(SystemExit, match=r"expected Version: 0\.33\.0"):
        vllm_release.unpacked("0.33.0", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_without_an_index_the_check_fails_and_names_the_way_around(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(SystemExit, match=r"could not fetch vllm==0\.33\.0.*OTHER_VLLM="):
        vllm_release.unpacked("0.33.0", tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


OLD = """
class Queue:
    limit: int = 3

    def __init__(self):
        self.items = []

    def wait(self):
        "Wait."
        return self.items  # all of them

    def gone(self): ...

if True:
    def plan(): return 1

def steady(): return 1
"""
NEW = """
class Queue:
    limit: int = 4

    def __init__(self):
        self.items = []

    def wait(self):
        "Wait for more."
        # With a comment.
        return self.items

def steady(): return 2
"""
TOUCHED = ("Queue.limit", "Queue.items", "Queue.wait", "Queue.gone", "plan", "steady")


@pytest.fixture
def releases(tmp_path: Path) -> tuple[vllm_changes.Release, vllm_changes.Release]:
    for name, modules in (
        ("old", {"queues": OLD}),
        ("new", {"queues": NEW, "planning": "def plan(): return 2"}),
    ):
        (tmp_path / name / "vllm").mkdir(parents=True)
        for module, text in modules.items():
            (tmp_path / name / "vllm" / f"{module}.py").write_text(text)
    return vllm_changes.Release(tmp_path / "old"), vllm_changes.Release(tmp_path / "new")


def test_a_release_is_told_by_what_has_become_of_names(
    releases: tuple[vllm_changes.Release, vllm_changes.Release],
) -> None:
    names = [vllm_changes.Name("compat/here", "vllm.queues", one) for one in TOUCHED]
    found = list(vllm_changes.changes(names, *releases))
    assert [(one.kind, one.name.qualified, one.now) for one in found] == [
        ("gone", "Queue.gone", ""),
        ("moved", "plan", "vllm.planning"),
        ("body", "plan", "vllm.planning"),
        ("body", "steady", "vllm.queues"),
    ]
    said = vllm_changes.report(found, {"steady"})
    assert "  vllm.queues.plan → vllm.planning  (compat/here)" in said
    assert re.findall(r"(\S+)  \(compat/here\)  NOT REVIEWED", said) == ["vllm.queues.plan"]
    assert "+    return 2" in vllm_changes.difference("steady", found, *releases)


def test_reviewed_names_are_those_of_the_releases_rows() -> None:
    page = (
        "\n### Bodies that changed in 0.33.0\n\n| name | what |\n| `A.b`, `c` | `d` |\n\n"
        "## Other\n| `e` | |\n"
    )
    assert vllm_changes.reviewed(page, "0.33.0") == {"A.b", "c"}
    assert vllm_changes.reviewed(page, "0.34.0") == set()

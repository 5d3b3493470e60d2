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

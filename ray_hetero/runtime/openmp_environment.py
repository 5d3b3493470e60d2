"""Environment of a CPU rank's process: threads of OpenMP, and the libraries to preload."""

from __future__ import annotations

import ctypes.util
import importlib.util
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ray_hetero.errors import ConfigError


def openmp_environment(
    threads: Sequence[int], libraries: PreloadLibraries, openmp: str
) -> dict[str, str]:
    """Variables with which OpenMP computes on these CPUs as a CPU rank does.

    Args:
        threads: logical CPUs, one thread bound to each, in this order.
        libraries: what the node has.
        openmp: which library to preload; auto prefers torch's libgomp.

    Raises:
        ConfigError: the library that was asked for is not on the node.

    """
    if openmp == "none":
        return {}
    if openmp == "auto":
        openmp = "gomp" if libraries.gomp else "iomp" if libraries.iomp else "plain"
    count = {"OMP_NUM_THREADS": str(len(threads))}
    if openmp == "plain":
        places = ",".join(f"{{{cpu}}}" for cpu in threads)
        return (
            count | {"OMP_PLACES": places, "OMP_PROC_BIND": "true"} | _preload(libraries.tcmalloc)
        )
    library = libraries.gomp if openmp == "gomp" else libraries.iomp
    if library is None:
        raise ConfigError(
            f"cpu.openmp: {openmp!r} was asked for but is not installed; "
            "leave it at 'auto', or type: pip install intel-openmp"
        )
    # Preload and affinity only help together: libgomp preloaded without an affinity was measured
    # eight times slower than with one.
    if openmp == "gomp":
        binding = {"GOMP_CPU_AFFINITY": " ".join(map(str, threads))}
    else:
        listed = ",".join(map(str, threads))
        binding = {
            "KMP_AFFINITY": f"granularity=fine,explicit,proclist=[{listed}]",
            "KMP_BLOCKTIME": "5",
            "KMP_TPAUSE": "0",
        }
    return count | binding | _preload(libraries.tcmalloc, library)


def _preload(*libraries: str | None) -> dict[str, str]:
    names = [library for library in libraries if library]
    return {"LD_PRELOAD": ":".join(names)} if names else {}


@dataclass(frozen=True)
class PreloadLibraries:
    """Shared libraries of one node that a CPU rank may preload; None where there is none."""

    gomp: str | None = None
    iomp: str | None = None
    tcmalloc: str | None = None


def find_preload_libraries() -> PreloadLibraries:
    """Find torch's own libgomp, Intel's OpenMP and tcmalloc in this Python installation.

    torch's own copy matters: with the system's libgomp preloaded a second runtime is loaded.
    """
    torch = _package_directory("torch")
    vllm = _package_directory("vllm")
    return PreloadLibraries(
        gomp=_first(
            [path for folder in (torch.parent / "torch.libs", torch / "lib")
             for path in sorted(folder.glob("libgomp*.so*"))] if torch else []
        ),
        iomp=_first(sorted((Path(sys.prefix) / "lib").glob("libiomp5.so"))),
        tcmalloc=_first(sorted((vllm / "libs").glob("libtcmalloc*.so*")) if vllm else [])
        or _system_library("tcmalloc_minimal"),
    )  # fmt: skip


def _package_directory(package: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    locations = spec.submodule_search_locations if spec else None
    return Path(next(iter(locations))) if locations else None


def _first(paths: Iterable[Path]) -> str | None:
    return next((str(path) for path in paths), None)


def _system_library(name: str) -> str | None:
    # A bare soname is enough for the dynamic loader.
    return ctypes.util.find_library(name)

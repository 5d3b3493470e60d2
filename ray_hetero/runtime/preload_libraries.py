"""Shared libraries of a node that the processes of CPU ranks preload."""

from __future__ import annotations

import ctypes.util
import importlib.util
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


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

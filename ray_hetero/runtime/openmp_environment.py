"""Threads of OpenMP as CPU ranks have them, by what their processes' environment says."""

from __future__ import annotations

from collections.abc import Sequence

from ray_hetero.errors import ConfigError
from ray_hetero.runtime.preload_libraries import PreloadLibraries


def openmp_environment(
    threads: Sequence[int], libraries: PreloadLibraries, openmp: str
) -> dict[str, str]:
    """What makes OpenMP compute on these CPUs as a CPU rank does.

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

"""A socket's measured figures, kept in a file so that the next start does not measure again.

The read bandwidth is here, what several rows cost is in `row_costs`, shares of decode steps are in
ray_hetero/offload/decode/share_cache.py.  One file a host, in the
user's cache directory: homes are often shared between the nodes of a cluster.  A figure is used
again for a week: a machine may get other memory.  A figure that was measured beside other programs
is too low; it serves while the host stays busy, and the first quiet start measures again.
"""

from __future__ import annotations

import json
import os
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from placement.host.cpulist import format_cpulist
from placement.host.native import read_bandwidth
from placement.host.other_work import is_beside_others
from placement.text_file import read_text

Figure = TypeVar("Figure")
KEPT_SECONDS = 7 * 24 * 3600.0
PROBE_SECONDS = 0.2
BESIDE_OTHERS = "beside_others"
"""Key of an entry: whether other programs computed on the host while it was measured."""
MEASURE_AGAIN = "RAY_HETERO_MEASURE_AGAIN"
"""Environment variable; with the value 1 no kept figure is used, and new ones take their place."""


def cache_directory() -> Path:
    """Directory of the files: $XDG_CACHE_HOME/ray_hetero, else ~/.cache/ray_hetero."""
    given = os.environ.get("XDG_CACHE_HOME")
    base = Path(given) if given else Path.home() / ".cache"
    return base / "ray_hetero"


def _probe(cpus: Sequence[int]) -> float:
    return read_bandwidth(cpus, seconds=PROBE_SECONDS)


def cached_bandwidth(
    cpus: Sequence[int],
    cpu_model: str | None,
    *,
    directory: Path | None = None,
    probe: Callable[[Sequence[int]], float] = _probe,
    is_busy: Callable[[], bool] = is_beside_others,
) -> float:
    """Bytes per second that these CPUs read together; measured where no fresh figure is kept.

    Args:
        cpus: logical CPUs, one per core.
        cpu_model: the processor's name; another one makes the figure void.
        directory: where the files are; None is `cache_directory()`.
        probe: measures.
        is_busy: whether other programs compute on this host.

    Raises:
        NativeError: it cannot be measured here.

    """
    return kept_or_measured(
        f"{cpu_model or 'unknown CPU'}, CPUs {format_cpulist(cpus)}",
        figure_of=_fresh,
        measure=lambda: probe(cpus),
        stored=lambda rate: {"bytes_per_s": rate},
        directory=directory,
        is_busy=is_busy,
    )


def kept_or_measured(
    key: str,
    *,
    figure_of: Callable[[Any], Figure | None],
    measure: Callable[[], Figure],
    stored: Callable[[Figure], dict[str, Any]],
    directory: Path | None,
    is_busy: Callable[[], bool],
) -> Figure:
    """Figure of this host that is kept, or a new one, which is kept from then on.

    Args:
        key: of the figure in the file.
        figure_of: reads an entry; None where it is no figure, or too old.
        measure: gives a new figure, or raises.
        stored: fields of the new figure's entry.
        directory: where the files are; None is `cache_directory()`.
        is_busy: whether other programs compute on this host; a figure that was measured beside
            them serves while it stays so.

    """
    path = figures_file(socket.gethostname(), directory)
    entry = read_figures(path).get(key)
    known = figure_of(entry)
    was_disturbed = isinstance(entry, dict) and entry.get(BESIDE_OTHERS) is True
    if known is not None and not was_disturbed:
        return known
    busy = is_busy()
    if known is not None and busy:
        return known
    found = measure()
    # Measuring takes a while, in which another process may have kept a figure.
    kept = {**stored(found), "measured_at": time.time(), BESIDE_OTHERS: busy}
    write_figures(path, read_figures(path) | {key: kept})
    return found


def _fresh(entry: Any) -> float | None:
    """The kept figure; None where there is none, it is no figure, or it is too old."""
    if not isinstance(entry, dict):
        return None
    rate, measured = entry.get("bytes_per_s"), entry.get("measured_at")
    if not isinstance(rate, int | float) or rate <= 0 or not is_fresh(measured):
        return None
    return float(rate)


def is_fresh(measured_at: Any) -> bool:
    """Whether a figure that was measured then is used again."""
    return os.environ.get(MEASURE_AGAIN) != "1" and is_young(measured_at)


def is_young(measured_at: Any) -> bool:
    """Whether a figure that was measured then may still be true."""
    return isinstance(measured_at, int | float) and 0 <= time.time() - measured_at < KEPT_SECONDS


def figures_file(host: str, directory: Path | None = None) -> Path:
    """The file with a host's figures; in `cache_directory()` unless another folder is given."""
    return (directory or cache_directory()) / f"bandwidth-{host}.json"


def read_figures(path: Path) -> dict[str, Any]:
    """The figures of a file; none where it is not there, or is no such file."""
    try:
        found = json.loads(read_text(path))
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def write_figures(path: Path, content: dict[str, Any]) -> None:
    """Replace the file in one step; without a place to write there is nothing to keep."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)
        Path(name).replace(path)
    except OSError:
        return

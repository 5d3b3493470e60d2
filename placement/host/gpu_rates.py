"""Memory bandwidth and link of GPUs, measured once on their host and kept.

GPUs that are alike are measured once, by a process of its own (`gpu_copies`) in well under two
seconds; the figures are used again for a week, as those of sockets are (`bandwidth_cache`).  A GPU
on which something computes is not measured: neither would be true.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

from placement.errors import NativeError
from placement.host.bandwidth_cache import figures_file, is_fresh, read_figures, write_figures
from placement.host.topology import Gpu, GpuRates, Host

logger = logging.getLogger(__name__)

PROGRAM = "placement.host.gpu_copies"
LIMIT_S = 30.0
"""Longest time of one measurement: a driver without persistence needs seconds to wake up."""

Wanted = Literal["missing", "all", "none"]
Probe = Callable[[Gpu, tuple[int, ...]], GpuRates]
"""Function that measures a GPU from the given CPUs of its host."""


def with_gpu_rates(
    host: Host,
    *,
    wanted: Wanted = "missing",
    directory: Path | None = None,
    probe: Probe | None = None,
) -> Host:
    """The host with the measured rates of its GPUs; those that cannot be measured stay without.

    Args:
        host: as `read_host` reads it.
        wanted: which GPUs are measured: those without kept rates, all of them anew, or none.
        directory: where figures are kept; None is `cache_directory()`.
        probe: measures; None is a process of its own.

    """
    if not any(gpu.details for gpu in host.gpus):
        return host
    path = figures_file(socket.gethostname(), directory)
    kept, found, failed = read_figures(path), dict[str, GpuRates](), set[str]()
    for gpu in host.gpus:
        key = _key(gpu)
        if gpu.details is None or key in found or key in failed:
            continue
        rates = None if wanted == "all" else _fresh(kept.get(key))
        if rates is None and wanted != "none" and not gpu.details.is_computing:
            try:
                rates = (probe or measure)(gpu, _near(host, gpu))
            except NativeError as error:
                failed.add(key)
                logger.warning("GPU %d (%s) is not measured: %s", gpu.index, gpu.name, error)
                continue
            kept[key] = asdict(rates) | {"measured_at": time.time()}
            write_figures(path, kept)
        if rates is not None:
            found[key] = rates
    return replace(host, gpus=tuple(replace(gpu, rates=found.get(_key(gpu))) for gpu in host.gpus))


def measure(gpu: Gpu, cpus: tuple[int, ...]) -> GpuRates:
    """Measure a GPU of this host in a process of its own.

    Args:
        gpu: which one.
        cpus: logical CPUs near it, whose memory the copies use; empty is any.

    Raises:
        NativeError: that process does not answer, or CUDA refuses it.

    """
    command = [sys.executable, "-m", PROGRAM, *map(str, cpus)]
    try:
        ended = subprocess.run(
            command, env=_environment(gpu), stdin=subprocess.DEVNULL, capture_output=True,
            text=True, timeout=LIMIT_S, check=False,
        )  # fmt: skip
        rates = json.loads(ended.stdout) if not ended.returncode else {}
    except subprocess.TimeoutExpired:
        raise NativeError(f"no answer in {LIMIT_S:g} s") from None
    except (OSError, ValueError) as error:
        raise NativeError(f"no answer: {error}") from None
    if not rates:
        said = ended.stderr.strip().splitlines()
        raise NativeError(said[-1] if said else f"ended with status {ended.returncode}")
    return GpuRates(**rates)


def _environment(gpu: Gpu) -> Mapping[str, str]:
    """This process's, in which the program finds this very package and this GPU alone."""
    here = str(Path(__file__).parents[2])
    paths = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH", ""))))
    shown = {
        "PYTHONPATH": paths,
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": gpu.uuid or str(gpu.index),
    }
    return os.environ | shown


def _near(host: Host, gpu: Gpu) -> tuple[int, ...]:
    nodes = (node for node in host.numa_nodes if node.id == gpu.numa_node)
    return tuple(core.cpus[0] for node in nodes for core in node.cores)


def _key(gpu: Gpu) -> str:
    """Key of GPUs that are alike, for which one measurement serves."""
    details = gpu.details
    link = None if details is None else (details.link_generation_max, details.link_width)
    driver = None if details is None else details.driver
    return f"{gpu.name}, {gpu.memory_bytes} bytes, link {link}, driver {driver}"


def _fresh(entry: Any) -> GpuRates | None:
    """The kept figures; None where there are none, they are no figures, or too old."""
    if not isinstance(entry, dict) or not is_fresh(entry.get("measured_at")):
        return None
    rates = [entry.get(name) for name in ("memory", "to_gpu", "from_gpu")]
    if not all(isinstance(rate, int | float) and rate > 0 for rate in rates):
        return None
    return GpuRates(*rates)  # type: ignore[arg-type]

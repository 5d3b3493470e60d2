"""Costs of steps of several rows on a CPU rank's socket, measured on its own node.

A step that verifies drafts has 1 + k rows a request.  What these cost is measured with the kernel
that a rank streams its weights with, in a process of its own: the threads of OpenMP are bound when
a process loads it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from placement.cluster.assignment import Seat
from placement.errors import NativeError
from placement.host.row_costs import RowCosts, cached_row_costs
from placement.host.topology import Host
from ray_hetero.config import CpuConfig
from ray_hetero.errors import ConfigError
from ray_hetero.log import logger
from ray_hetero.planning.sockets import Threads, level_of, reading_together
from ray_hetero.runtime.openmp_environment import find_preload_libraries, openmp_environment

PROGRAM = "ray_hetero.kernels.linear.row_timing"
LIMIT_S = 60.0
"""Longest time of one measurement; it takes a few seconds."""

Place = tuple[str, tuple[int, ...]]
"""A node's id and CPUs that compute together."""
MeasureRows = Callable[[Sequence[Seat], Threads], Mapping[int, RowCosts]]
"""Function that measures the cost of several rows for each CPU rank where it can, by rank."""


@dataclass(frozen=True)
class RowKernel:
    """Kernel of the linear layers of a host's CPU ranks."""

    level: str
    """Set of instructions of the kernel."""
    weight_format: str
    openmp: str
    """The configuration's cpu.openmp."""
    cpu_model: str | None

    @property
    def version(self) -> str:
        """Key of this kernel in the file of kept figures.

        Raises:
            NativeError: the kernels are not compiled here.

        """
        spec = importlib.util.find_spec("ray_hetero._streaming_linear")
        if spec is None or spec.origin is None:
            raise NativeError("ray-hetero was installed without a C++ compiler")
        digest = hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest()[:16]
        return f"{self.weight_format} {self.level}, OpenMP {self.openmp}, kernels {digest}"


def kernel_of(config: CpuConfig, host: Host) -> RowKernel | None:
    """The kernel of a host's CPU ranks; None where their linear layers are vLLM's."""
    level = level_of(host)
    if level is None or not config.streams(level):
        return None
    return RowKernel(level, config.weight_format(level), config.openmp, host.cpu_model)


def costs_here(cpus: Sequence[int], kernel: RowKernel) -> RowCosts:
    """Costs of several rows on these CPUs of this host; kept for later starts.

    Raises:
        NativeError: it cannot be measured here.

    """
    return cached_row_costs(
        cpus,
        kernel.cpu_model,
        kernel.version,
        probe=lambda cpus: RowCosts.of_times(timed(cpus, kernel)[1]),
    )


def timed(cpus: Sequence[int], kernel: RowKernel) -> tuple[int, list[float]]:
    """Bytes of the weights, and seconds of their products with each number of rows in `ROWS`.

    Raises:
        NativeError: the process that measures does not answer.

    """
    command = [sys.executable, "-m", PROGRAM, kernel.level, kernel.weight_format]
    try:
        threads = openmp_environment(cpus, find_preload_libraries(), kernel.openmp)
        ended = subprocess.run(
            command, env=_environment() | threads, stdin=subprocess.DEVNULL, capture_output=True,
            text=True, timeout=LIMIT_S, check=False,
        )  # fmt: skip
        found = json.loads(ended.stdout.strip().splitlines()[-1]) if not ended.returncode else {}
    except subprocess.TimeoutExpired:
        raise NativeError(f"no answer in {LIMIT_S:g} s") from None
    except (ConfigError, OSError, ValueError, IndexError) as error:
        raise NativeError(str(error).splitlines()[0] if str(error) else "no answer") from None
    if not found:
        said = ended.stderr.strip().splitlines()
        raise NativeError(said[-1] if said else f"ended with status {ended.returncode}")
    return found["bytes"], found["seconds"]


def _environment() -> dict[str, str]:
    """This process's, in which the program finds this very package and no GPU."""
    here = str(Path(__file__).parents[2])
    paths = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH", ""))))
    return os.environ | {"PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": "-1"}


def say_missing(where: str, why: object) -> None:
    """Say in one line that a place is planned without a measured figure."""
    logger.warning("%s: the cost of several rows is predicted, not measured: %s", where, why)


def rows_probe_here(host: Host, config: CpuConfig) -> MeasureRows:
    """Function that measures ranks on this host."""

    def ask(places: Sequence[Place]) -> dict[Place, RowCosts]:
        answers = {}
        kernel = kernel_of(config, host)
        assert kernel is not None
        for place in places:
            try:
                answers[place] = costs_here(place[1], kernel)
            except NativeError as error:
                say_missing(f"node {host.name}", error)
        return answers

    # This host alone, whatever its node is called.
    return RowsProbe(lambda node_id: kernel_of(config, host) is not None, ask)


class RowsProbe:
    """Measures each place once, whether it succeeds or not.

    Args:
        can_measure: whether a node's ranks stream their weights.
        ask: measures places on such nodes; those that cannot be measured are left out.

    """

    def __init__(
        self,
        can_measure: Callable[[str], bool],
        ask: Callable[[Sequence[Place]], dict[Place, RowCosts]],
    ) -> None:
        self._can_measure = can_measure
        self._ask = ask
        self._known: dict[Place, RowCosts | None] = {}

    def __call__(self, seats: Sequence[Seat], threads: Threads) -> dict[int, RowCosts]:
        """Costs of several rows on each CPU rank for which they are known."""
        # Ranks of a stage on one package compute at the same time.
        places = {
            rank: (group.node_id, group.cpus)
            for rank, group in reading_together(seats, threads).items()
            if self._can_measure(group.node_id)
        }
        if wanted := sorted(set(places.values()) - self._known.keys()):
            self._known |= dict.fromkeys(wanted) | self._ask(wanted)
        found = {rank: self._known[place] for rank, place in places.items()}
        return {rank: costs for rank, costs in found.items() if costs is not None}

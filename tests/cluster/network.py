"""Two Ray nodes at different addresses on this machine, each in a network namespace of its own.

Each has a name, an address, a cable to the other and one half of the cores.  Namespaces need root
and Debian's iproute2; where they cannot be made, tests that use them say so and are skipped.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from engines import START_SECONDS, STOP_SECONDS, Child, start
from leftovers import Scene, wait_until

PORT = 6379
NAMED = 'hostname "$1"; shift; exec "$@"'


@dataclass(frozen=True)
class Place:
    """One end of the cable."""

    name: str
    namespace: str
    address: str
    device: str
    cpus: tuple[int, ...]

    def command(self, command: Sequence[str], *, is_bound: bool = False) -> list[str]:
        """That command with this place's name and network, and on its cores if bound."""
        bound = ["taskset", "--cpu-list", ",".join(map(str, self.cpus))] if is_bound else []
        return [
            "nsenter", f"--net=/run/netns/{self.namespace}",
            "unshare", "--uts", "sh", "-c", NAMED, "sh", self.name, *bound, *command,
        ]  # fmt: skip

    def ip(self, *arguments: str) -> None:
        """Configure the network there."""
        _ip("-netns", self.namespace, *arguments)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@contextmanager
def two_places() -> Iterator[tuple[Place, Place]]:
    """Two namespaces and the cable between them; skips the test where there can be none."""
    cpus = sorted(os.sched_getaffinity(0))
    lacking = [tool for tool in ("ip", "nsenter", "unshare", "taskset") if not shutil.which(tool)]
    if os.getuid() or lacking or len(cpus) < 2:
        pytest.skip(f"needs root, two cores and iproute2; lacking: {lacking or 'root or cores'}")
    # A module's nodes may be there while a test has nodes of its own.  Names of devices are short.
    name = f"rh{uuid.uuid4().hex[:8]}"
    places = tuple(
        Place(f"node-{letter}", f"{name}{letter}", f"10.77.0.{number}", f"{name}{letter}",
              tuple(cpus[number - 1 :: 2]))
        for number, letter in enumerate("ab", start=1)
    )  # fmt: skip
    one, other = places
    with ExitStack() as stack:
        for place in places:
            try:
                _ip("netns", "add", place.namespace)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
            stack.callback(_ip, "netns", "delete", place.namespace)
        _ip("link", "add", one.device, "netns", one.namespace, "type", "veth",
            "peer", "name", other.device, "netns", other.namespace)  # fmt: skip
        for place in places:
            place.ip("address", "add", f"{place.address}/24", "dev", place.device)
            place.ip("link", "set", place.device, "up")
            place.ip("link", "set", "lo", "up")
        yield one, other


@dataclass(frozen=True)
class TwoNodes:
    """A Ray cluster of two nodes; engines are started on the first."""

    places: tuple[Place, Place]
    rays: tuple[Child, Child]

    @property
    def address(self) -> str:
        """What RAY_ADDRESS is."""
        return f"{self.places[0].address}:{PORT}"

    def start(
        self,
        scene: Scene,
        command: Sequence[str],
        log: Path,
        extra: Mapping[str, str] | None = None,
    ) -> Child:
        """Start a command on the first node, connected to the cluster."""
        environment = {"RAY_ADDRESS": self.address, **(extra or {})}
        return start(scene, self.places[0].command(command), log, environment)

    def kill(self, number: int) -> None:
        """That node's Ray is gone at once, as after a crash of the machine."""
        for process in psutil.Process(self.rays[number].process.pid).children(recursive=True):
            if process.name() in ("raylet", "gcs_server"):
                process.kill()

    def cut(self) -> None:
        """Nothing goes over the cable any more; no end is told."""
        self.places[1].ip("link", "set", self.places[1].device, "down")

    def mend(self) -> None:
        """The cable is whole again."""
        self.places[1].ip("link", "set", self.places[1].device, "up")


@contextmanager
def two_nodes(
    scene: Scene, directory: Path, extra: Sequence[Mapping[str, str]] = ({}, {})
) -> Iterator[TwoNodes]:
    """Start a head node and a second one, as many CPUs in each as it has cores.

    Args:
        scene: where their processes belong.
        directory: for their logs.
        extra: added to the environment of each.

    """
    with two_places() as places, ExitStack() as stack:
        rays = []
        for number, place in enumerate(places):
            joined = (
                [f"--address={places[0].address}:{PORT}"]
                if number
                else ["--head", f"--port={PORT}", "--include-dashboard=false"]
            )
            command = [
                str(Path(sys.executable).with_name("ray")), "start", "--block", *joined,
                f"--node-ip-address={place.address}", f"--num-cpus={len(place.cpus)}",
                "--object-store-memory=100000000", "--disable-usage-stats",
                f"--temp-dir={scene.temporary / place.name[-1]}",
            ]  # fmt: skip
            child = start(
                scene, place.command(command, is_bound=True), directory / place.name, extra[number]
            )
            stack.callback(_stop, child)
            assert wait_until(
                lambda child=child: "Ray runtime started" in child.log, START_SECONDS
            ), child.tail()
            rays.append(child)
        yield TwoNodes(places, (rays[0], rays[1]))


def _stop(child: Child) -> None:
    # Ray waits half a minute for a head node that is gone already.
    if child.process.poll() is None:
        child.signal(signal.SIGTERM)
        child.wait(STOP_SECONDS)

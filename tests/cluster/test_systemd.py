"""The unit of deploy/systemd, run by a systemd in namespaces of its own.

Differences from an installed unit: where programs and the file of variables are, root in the place
of its user, no network target, and a tiny model.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from engines import HERE, START_SECONDS, STOP_SECONDS, Model, environment_of, free_port
from leftovers import Scene, wait_until

pytestmark = [pytest.mark.timeout(1800), pytest.mark.slow]

ROOT = HERE.parents[1]
DEPLOYED = ROOT / "deploy/systemd"
SYSTEMD = Path("/lib/systemd/systemd")
GROUPS = Path("/sys/fs/cgroup")
HIERARCHY = GROUPS / "systemd"
OWN_GROUPS = ("init.scope", "system.slice")
"""Control groups that systemd makes beside that which it is started in."""
BOOT_SECONDS = 60.0
NAMESPACES = ["--fork", "--pid", "--mount", "--cgroup", "--uts", "--mount-proc", "--kill-child"]
BOOT = """
set -e
mount --make-rprivate /
mount -t tmpfs tmpfs /run
mkdir -p /run/lock /run/systemd
mount -t tmpfs tmpfs {groups}
mkdir {hierarchy}
mount -t cgroup -o none,name=systemd cgroup {hierarchy}
export container=test SYSTEMD_UNIT_PATH={units}
exec {systemd} --system --unit=test.target --log-target=console --show-status=0
"""


def cannot_boot() -> str:
    """Why this machine cannot run the test; empty where it can."""
    if not SYSTEMD.exists():
        return f"expected systemd at {SYSTEMD}"
    if Path("/run/systemd/system").exists():
        return "this machine's own systemd would share its control groups"
    if not HIERARCHY.exists():
        return f"expected the hierarchy of control groups {HIERARCHY}"
    tried = subprocess.run(["unshare", *NAMESPACES, "true"], capture_output=True, text=True)
    return tried.stderr.strip()


@dataclass
class Machine:
    """A systemd that runs."""

    pid: int
    """Of systemd, as this process sees it."""
    log: Path

    def run(self, *command: str, limit_s: float = 30) -> str:
        """Run a command in its namespaces; what it printed."""
        enter = ["nsenter", "--target", str(self.pid), "--pid", "--mount", "--cgroup"]
        done = subprocess.run([*enter, *command], capture_output=True, text=True, timeout=limit_s)
        return done.stdout + done.stderr

    def state(self, name: str) -> str:
        """A property of the unit."""
        return self.run("systemctl", "show", "--value", f"--property={name}", UNIT).strip()


UNIT = "ray-hetero.service"


def write_unit(folder: Path, variables: Path) -> None:
    """The unit as it is deployed, but for the differences that are named above."""
    text = (DEPLOYED / UNIT).read_text(encoding="utf-8")
    changes = {
        "/opt/ray_hetero/bin": str(Path(sys.executable).parent),
        "/etc/ray_hetero/engine.env": str(variables),
        "User=ray_hetero": "User=root",
        "[Unit]": "[Unit]\nDefaultDependencies=no",
        "Wants=network-online.target\n": "",
        "After=network-online.target nvidia-persistenced.service\n": "",
    }
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    (folder / UNIT).write_text(text)
    (folder / "test.target").write_text("[Unit]\nDefaultDependencies=no\n")


@contextlib.contextmanager
def own_control_groups() -> Iterator[Path]:
    """A control group to start systemd in; in the end it and those that systemd made are gone."""
    group = HIERARCHY / f"test-{uuid.uuid4().hex}"
    places = [folder / name for folder in GROUPS.iterdir() for name in OWN_GROUPS]
    there = {place for place in places if place.exists()}
    group.mkdir()
    try:
        yield group
    finally:
        for place in [group, *(set(places) - there)]:
            for folder, _, _ in os.walk(place, topdown=False):
                wait_until(lambda at=Path(folder): removed(at), STOP_SECONDS)  # type: ignore[misc]


def removed(group: Path) -> bool:
    """Whether a control group is gone; its last process may still be ending."""
    with contextlib.suppress(FileNotFoundError):
        try:
            group.rmdir()
        except OSError:
            return False
    return True


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    if why := cannot_boot():
        pytest.skip(why)
    units, log = tmp_path / "units", tmp_path / "log"
    units.mkdir()
    write_unit(units, tmp_path / "engine.env")
    boot = BOOT.format(
        groups=GROUPS, hierarchy=HIERARCHY, units=shlex.quote(str(units)), systemd=SYSTEMD
    )
    with own_control_groups() as group, log.open("wb") as output:
        enter = f"echo $$ > {group}/cgroup.procs; exec {shlex.join(['unshare', *NAMESPACES])} "
        process = subprocess.Popen(
            ["sh", "-c", enter + shlex.join(["sh", "-c", boot])],
            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
            assert wait_until(lambda: bool(children.read_text().split()), BOOT_SECONDS)
            made = Machine(int(children.read_text().split()[0]), log)
            ready = ("running", "degraded")
            is_up = ["systemctl", "is-system-running"]
            assert wait_until(lambda: made.run(*is_up).strip() in ready, BOOT_SECONDS, 1), (
                log.read_text(errors="replace")
            )
            yield made
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
            process.wait()


def test_the_unit_serves_starts_again_and_stops(
    machine: Machine, scene: Scene, model: Model, tmp_path: Path
) -> None:
    port = free_port()
    given = environment_of(scene)
    given.pop("PATH")
    given |= {
        "MODEL": str(model("llama")),
        "OPTIONS": f"--port {port} --enforce-eager --max-model-len 256",
        "PYTHONPATH": str(ROOT),
    }
    lines = [f'{name}="{value}"\n' for name, value in given.items()]
    (tmp_path / "engine.env").write_text("".join(lines))

    def is_healthy() -> bool:
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"http://127.0.0.1:{port}/health", timeout=5).status_code == 200
        return False

    def said() -> str:
        return machine.log.read_text(errors="replace")[-5000:]

    def ranks() -> list[int]:
        listed = machine.run("ps", "-eo", "pid,args").splitlines()
        return [int(line.split()[0]) for line in listed if "ray::RankActor" in line]

    machine.run("systemctl", "start", "--no-block", UNIT)
    assert wait_until(is_healthy, START_SECONDS, 1), said()
    (rank,) = ranks()
    machine.run("kill", "-9", str(rank))
    assert wait_until(lambda: machine.state("SubState") == "auto-restart", STOP_SECONDS), said()
    ended = time.monotonic()
    # As `vllm serve` ends when a rank has died.
    assert (machine.state("ExecMainStatus"), machine.state("Result")) == ("1", "exit-code")
    assert wait_until(lambda: machine.state("SubState") == "running", STOP_SECONDS), said()
    assert time.monotonic() - ended > 5
    assert machine.state("NRestarts") == "1"
    assert wait_until(is_healthy, START_SECONDS, 1), said()
    assert ranks() != [rank]
    machine.run("systemctl", "stop", UNIT, limit_s=2 * STOP_SECONDS)
    assert (machine.state("SubState"), machine.state("Result")) == ("dead", "success")
    left = machine.run("ps", "-eo", "pid,args").splitlines()[1:]
    assert [line for line in left if "systemd" not in line and " ps " not in line] == []
    scene.assert_clean()

"""A systemd in namespaces of its own, with the unit of deploy/systemd.

Differences from an installed unit: where programs and the files of variables are, root in the place
of its user, no network target, and a tiny model.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from engines import HERE, STOP_SECONDS
from leftovers import wait_until

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

    def state(self, unit: str, name: str) -> str:
        """A property of a unit."""
        return self.run("systemctl", "show", "--value", f"--property={name}", unit).strip()


UNIT = "ray-hetero@.service"


def write_unit(folder: Path, variables: Path) -> None:
    """The unit as it is deployed, but for the differences that are named above."""
    text = (DEPLOYED / UNIT).read_text(encoding="utf-8")
    changes = {
        "/opt/ray_hetero/bin": str(Path(sys.executable).parent),
        "/etc/ray_hetero/%i.env": f"{variables}/%i.env",
        "User=ray_hetero": "User=root",
        "[Unit]": "[Unit]\nDefaultDependencies=no",
        "[Service]": f"[Service]\nStandardOutput=append:{variables}/%i.log",
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


@contextlib.contextmanager
def booted(tmp_path: Path) -> Iterator[Machine]:
    """A systemd whose units have their variables, and leave their output, in a folder.

    It skips the test where none can boot.
    """
    if why := cannot_boot():
        pytest.skip(why)
    units, log = tmp_path / "units", tmp_path / "log"
    units.mkdir()
    write_unit(units, tmp_path)
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

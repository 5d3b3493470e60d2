"""QEMU's software emulation: the kernel of a guest, and its run from power-on to power-off."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

PROGRAM = "qemu-system-x86_64"
# QEMU tells guests of AMD's processors nothing about threads unless the model has topoext.
CPU = "max,vendor=GenuineIntel"
CONSOLE = ["-display", "none", "-serial", "stdio", "-monitor", "none", "-no-reboot"]
KERNEL_OPTIONS = "console=ttyS0 quiet loglevel=3 panic=-1"
PASSED = re.compile(r"^all \d+ checks passed\s*$", re.MULTILINE)


def options(
    description: str, timeout_s: float, switches: Mapping[str, str] | None = None
) -> argparse.Namespace:
    """Options that all guests have, as they were given; ends this program where QEMU is missing.

    Args:
        description: of the program, for its help.
        timeout_s: longest run of the guest where nothing is given.
        switches: further options without a value, and their help.

    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--kernel", type=Path, help="bzImage with NUMA support")
    parser.add_argument("--accel", default="tcg", help="tcg (software emulation) or kvm")
    parser.add_argument("--timeout", type=float, default=timeout_s, help="seconds")
    for switch, text in (switches or {}).items():
        parser.add_argument(switch, action="store_true", help=text)
    given = parser.parse_args()
    if shutil.which(PROGRAM) is None:
        sys.exit(f"not found: {PROGRAM}: apt install qemu-system-x86")
    # As Ctrl-C: the guest ends, and what was made for it goes.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    return given


def fetch_kernel(folder: Path) -> Path:
    """The kernel image of Debian's package for virtual machines."""
    depends = output(["apt-cache", "depends", "linux-image-cloud-amd64"], folder)
    package = re.search(r"Depends: (linux-image-\S+)", depends)
    if package is None:
        sys.exit("no package linux-image-cloud-amd64: run apt-get update, or give --kernel")
    output(["apt-get", "download", "-qq", package[1]], folder)
    archive = next(folder.glob("linux-image-*.deb"))
    output(["dpkg-deb", "-x", str(archive), str(folder / "kernel")], folder)
    return next((folder / "kernel" / "boot").glob("vmlinuz-*"))


def boot(
    machine: Sequence[str], kernel: Path, accel: str, timeout_s: float, kernel_options: str
) -> str:
    """Run a guest until it powers off or its time is up; what it wrote to its console.

    Args:
        machine: QEMU's options for processors, memory, nodes and disks.
        kernel: bzImage.
        accel: what QEMU computes with.
        timeout_s: longest run.
        kernel_options: beside those that all guests have.

    """
    command = [PROGRAM, *machine, "-accel", accel, "-cpu", CPU, *CONSOLE]
    command += ["-kernel", str(kernel), "-append", f"{KERNEL_OPTIONS} {kernel_options}"]
    started = time.monotonic()
    guest = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
    assert guest.stdout is not None
    console = b""
    os.set_blocking(guest.stdout.fileno(), False)
    try:
        while guest.poll() is None and time.monotonic() < started + timeout_s:
            time.sleep(0.1)
            console += _copy(guest.stdout.fileno())
        console += _copy(guest.stdout.fileno())
        seconds = time.monotonic() - started
        if guest.poll() is None:
            print(f"the guest was still running after {seconds:.0f} s (--timeout); it was ended")
        else:
            print(f"{seconds:.0f} s from power-on to power-off", flush=True)
        return console.decode(errors="replace")
    finally:
        guest.kill()
        guest.wait()
        guest.stdout.close()


def output(command: Sequence[str], folder: Path) -> str:
    """What a command writes; ends this program where it fails or is not there."""
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        sys.exit(f"not found: {command[0]}")
    if done.returncode:
        sys.exit(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def _copy(descriptor: int) -> bytes:
    """Pass on what can be read now."""
    try:
        data = os.read(descriptor, 1 << 20)
    except BlockingIOError:
        return b""
    sys.stdout.write(data.decode(errors="replace").replace("\r", ""))
    sys.stdout.flush()
    return data

"""Boot a guest with NUMA nodes under QEMU's software emulation and run guest_checks.py inside.

    python tests/numa/boot_guest.py [--kernel VMLINUZ]

Debian packages: qemu-system-x86, busybox-static, libnuma1; from the test environment py-libnuma.
Without --kernel the package linux-image-cloud-amd64 is downloaded and unpacked, not installed.
The machine: two sockets of two cores with two threads, a NUMA node each, and a third node that is
memory only.  Exit code 0 if every check passed.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import initramfs

MACHINE = [
    *("-machine", "q35"),
    *("-m", "1792M", "-smp", "8,sockets=2,cores=2,threads=2"),
    *("-object", "memory-backend-ram,id=m0,size=768M"),
    *("-object", "memory-backend-ram,id=m1,size=768M"),
    *("-object", "memory-backend-ram,id=m2,size=256M"),
    *("-numa", "node,nodeid=0,memdev=m0,cpus=0-3"),
    *("-numa", "node,nodeid=1,memdev=m1,cpus=4-7"),
    *("-numa", "node,nodeid=2,memdev=m2"),
    *("-numa", "dist,src=0,dst=1,val=21"),
    *("-numa", "dist,src=0,dst=2,val=14"),
    *("-numa", "dist,src=1,dst=2,val=24"),
]
# QEMU tells guests of AMD's processors nothing about threads unless the model has topoext.
CPU = "max,vendor=GenuineIntel"
CONSOLE = ["-display", "none", "-serial", "stdio", "-monitor", "none", "-no-reboot"]
KERNEL_OPTIONS = "console=ttyS0 quiet loglevel=3 panic=-1 rdinit=/init"
PASSED = re.compile(r"^all \d+ checks passed\s*$", re.MULTILINE)


def main() -> int:
    """Boot, copy the guest's console to ours, tell whether it passed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kernel", type=Path, help="bzImage with NUMA support")
    parser.add_argument("--accel", default="tcg", help="tcg (software emulation) or kvm")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        kernel = options.kernel or fetch_kernel(Path(scratch))
        disk = Path(scratch) / "initramfs"
        initramfs.write(disk)
        started = time.monotonic()
        console = boot(kernel, disk, options.accel, options.timeout)
        print(f"{time.monotonic() - started:.0f} s from power-on to power-off", flush=True)
    return 0 if PASSED.search(console) else 1


def fetch_kernel(folder: Path) -> Path:
    """The kernel image of Debian's package for virtual machines."""
    depends = _output(["apt-cache", "depends", "linux-image-cloud-amd64"], folder)
    package = re.search(r"Depends: (linux-image-\S+)", depends)
    if package is None:
        sys.exit("no package linux-image-cloud-amd64: run apt-get update, or give --kernel")
    _output(["apt-get", "download", "-qq", package[1]], folder)
    archive = next(folder.glob("linux-image-*.deb"))
    _output(["dpkg-deb", "-x", str(archive), str(folder / "kernel")], folder)
    return next((folder / "kernel" / "boot").glob("vmlinuz-*"))


def boot(kernel: Path, disk: Path, accel: str, timeout_s: float) -> str:
    """Run the guest until it powers off; what it wrote to its console."""
    command = ["qemu-system-x86_64", *MACHINE, "-accel", accel, "-cpu", CPU, *CONSOLE]
    command += ["-kernel", str(kernel), "-initrd", str(disk), "-append", KERNEL_OPTIONS]
    guest = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
    assert guest.stdout is not None
    deadline = time.monotonic() + timeout_s
    console = b""
    os.set_blocking(guest.stdout.fileno(), False)
    try:
        while guest.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
            console += _copy(guest.stdout.fileno())
        return (console + _copy(guest.stdout.fileno())).decode(errors="replace")
    finally:
        guest.kill()
        guest.wait()
        guest.stdout.close()


def _copy(descriptor: int) -> bytes:
    """Pass on what can be read now."""
    try:
        data = os.read(descriptor, 1 << 20)
    except BlockingIOError:
        return b""
    sys.stdout.write(data.decode(errors="replace").replace("\r", ""))
    sys.stdout.flush()
    return data


def _output(command: list[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())

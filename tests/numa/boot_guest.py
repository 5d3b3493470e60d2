"""Boot a guest with NUMA nodes under QEMU's software emulation and run guest_checks.py inside.

    python tests/numa/boot_guest.py [--kernel VMLINUZ]

Debian packages: qemu-system-x86, busybox-static, libnuma1; from the test environment py-libnuma.
Without --kernel the package linux-image-cloud-amd64 is downloaded and unpacked, not installed.
The machine: two sockets of two cores with two threads, a NUMA node each, and a third node that is
memory only.  Exit code 0 if every check passed.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import initramfs
import qemu

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


def main() -> int:
    """Boot, copy the guest's console to ours, tell whether it passed."""
    given = qemu.options(__doc__.splitlines()[0], timeout_s=600.0)
    with tempfile.TemporaryDirectory() as scratch:
        kernel = given.kernel or qemu.fetch_kernel(Path(scratch))
        disk = Path(scratch) / "initramfs"
        initramfs.write(disk)
        machine = [*MACHINE, "-initrd", str(disk)]
        console = qemu.boot(machine, kernel, given.accel, given.timeout, "rdinit=/init")
    return 0 if qemu.PASSED.search(console) else 1


if __name__ == "__main__":
    sys.exit(main())

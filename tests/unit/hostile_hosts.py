"""Machines some of whose /sys and /proc files are missing, no files, endless, or hold garbage."""

from __future__ import annotations

import os
import random
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from machines import write_tree

NAMES = ("container-cpuset", "cxl-expander", "desktop-one-node", "no-numa-sandbox",
         "vm-four-packages")  # fmt: skip
MEMORY = "MemTotal: 90000000 kB\nMemFree: 70000000 kB\nMemAvailable: 80000000 kB\n"
SWAP = "\nSwapTotal: 0 kB\nSwapFree: 0 kB\n"
MORE = {
    "proc/self/cgroup": "4:memory,cpu:/a\n0::/a\n",
    "proc/driver/nvidia/gpus/0000:01:00.0/information": "Model: \t NVIDIA A\nGPU UUID: \t GPU-1\n",
    "sys/bus/pci/devices/0000:01:00.0/numa_node": "0\n",
    "sys/bus/pci/devices/0000:01:00.0/class": "0x030000\n",
    "sys/bus/pci/devices/0000:01:00.0/vendor": "0x10de\n",
    "sys/fs/cgroup/a/memory.max": "max\n", "sys/fs/cgroup/a/cpu.max": "max 100000\n",
    "sys/fs/cgroup/memory/a/memory.limit_in_bytes": "1000000000\n",
    "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "100000\n",
    "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000\n",
    "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
    "proc/sys/kernel/random/boot_id": "1\n",
}  # fmt: skip
"""Files that not every machine has."""
TEXTS = (
    "", "\n", " ", "\0", "\x1b[31m", "0-", "-", "-1", "-1-2", "0-0-0", "0,,0", "1,0", "3-1",
    "0-65536", "0-999999999", "1000000000", "9" * 30, "9" * 5000, f"0-{'9' * 5000}", "0x10", "1e9",
    "1.5", "nan", "inf", "max", "max max", "0 0", "1 0", f"{'9' * 400} 1", "1 2 3", "٣", "²", "１",
    "a" * 100_000,
    "a:" * 50_000, "[" * 60_000, "1 " * 50_000, "0," * 50_000, "Node 0 MemTotal: 1 kB",
    "MemTotal: 99999999999999999999 kB\nMemFree: 0 kB", "MemTotal: 0 kB\nMemFree: 0 kB\n",
    "0::", "::", "0::/../../..", "1:memory:/a\n0::/" + "b/" * 3000, "0::/\x1b[31m",
    "Cpus_allowed_list:\t", "Cpus_allowed_list:\t0-", "Mems_allowed_list:\t7",
    "model name\t: " + "x" * 5000, "flags\t: " + "avx2 " * 9000, "Model: \t\x07" + "x" * 5000,
)  # fmt: skip


def _link(to: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(to)


PLACES: dict[str, Callable[[Path], object]] = {
    "a folder": Path.mkdir, "a pipe": os.mkfifo, "endless": _link("/dev/zero"),
    "a link to itself": lambda p: p.symlink_to(p), "a link to nowhere": _link("/nowhere"),
    "bytes": lambda p: p.write_bytes(bytes(range(256))),
    "UTF-16": lambda p: p.write_bytes("0-1".encode("utf-16")),
}  # fmt: skip


@dataclass(frozen=True)
class Damage:
    """One file of a machine that is not as the kernel writes it."""

    path: str
    name: str
    make: Callable[[Path], object]


def written(name: str, folder: Path) -> Path:
    """A machine with all files that are read of any."""
    root = write_tree(name, folder)
    memory = root / "proc/meminfo"
    memory.parent.mkdir(exist_ok=True)
    memory.write_text((memory.read_text() if memory.exists() else MEMORY) + SWAP)
    for path, content in MORE.items():
        if not (root / path).exists():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(content)
    return root


def damages(root: Path) -> Iterator[Damage]:
    """Every damage of every kind of file; of files of one kind the first and the last."""
    kinds: dict[str, list[str]] = {}
    for file in sorted(root.rglob("*")):
        if file.is_file():
            path = str(file.relative_to(root))
            kinds.setdefault(re.sub(r"(cpu|node)\d+", r"\1N", path), []).append(path)
    for paths in kinds.values():
        for path in {paths[0], paths[-1]}:
            yield Damage(path, "missing", lambda file: None)
            for name, make in PLACES.items():
                yield Damage(path, name, make)
            for text in TEXTS:
                yield Damage(path, repr(text[:20]), lambda file, text=text: file.write_text(text))  # type: ignore[misc]


def damage(root: Path, one: Damage) -> Callable[[], None]:
    """Damage a file; what is returned mends it."""
    file = root / one.path
    content = file.read_bytes()
    file.unlink()
    one.make(file)

    def mend() -> None:
        if file.is_dir() and not file.is_symlink():
            shutil.rmtree(file)
        else:
            file.unlink(missing_ok=True)
        file.write_bytes(content)

    return mend


def some(root: Path, seed: str, count: int) -> Iterator[list[Damage]]:
    """One to three damages at once, of different files."""
    rng, every = random.Random(seed), list(damages(root))
    for _ in range(count):
        chosen = {one.path: one for one in rng.sample(every, rng.choice((1, 1, 1, 2, 3)))}
        yield list(chosen.values())

"""An initial RAM disk with busybox, this Python, libnuma, `placement` and the guest's program."""

from __future__ import annotations

import ctypes.util
import re
import shutil
import stat
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SKIPPED = re.compile(r"/(test|tests|idlelib|lib2to3|ensurepip|tkinter|site-packages|config-[^/]*)/")
FOLDERS = ("bin", "dev", "etc", "proc", "run/lock", "sys", "tmp")
INIT = """#!/bin/busybox sh
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t sysfs sysfs /sys
/bin/busybox mount -t devtmpfs dev /dev
/bin/busybox mount -t cgroup2 cgroup /sys/fs/cgroup
/bin/busybox hostname guest
export PYTHONHOME=/python PYTHONPATH=/packages PATH=/python/bin:/bin LD_LIBRARY_PATH=/lib
/python/bin/python3 /guest_checks.py
/bin/busybox poweroff -f
"""


def write(path: Path) -> None:
    """Write the RAM disk, uncompressed: emulated processors unpack slowly."""
    with path.open("wb") as archive:
        for number, (name, mode, content, mtime) in enumerate(_entries(), start=1):
            archive.write(_entry(number, name, mode, content, mtime))
        archive.write(_entry(0, "TRAILER!!!", 0, b"", 0))


def _entry(number: int, name: str, mode: int, content: bytes, mtime: int) -> bytes:
    """One file in the `newc` form of cpio."""
    encoded = name.encode() + b"\0"
    fields = (number, mode, 0, 0, 1, mtime, len(content), 0, 0, 0, 0, len(encoded), 0)
    head = b"070701" + b"".join(b"%08X" % field for field in fields) + encoded
    return _padded(head) + _padded(content)


def _padded(data: bytes) -> bytes:
    return data + b"\0" * (-len(data) % 4)


def _entries() -> Iterator[tuple[str, int, bytes, int]]:
    files = dict(_files())
    folders = {str(parent) for name in files for parent in Path(name).parents} - {"."}
    for folder in sorted(
        folders.union(*({f, *map(str, Path(f).parents)} for f in FOLDERS)) - {"."}
    ):
        yield folder, stat.S_IFDIR | 0o755, b"", 0
    yield "init", stat.S_IFREG | 0o755, INIT.encode(), 0
    for name, source in files.items():
        # Modification times must survive, or Python compiles every module again.
        yield name, stat.S_IFREG | 0o755, source.read_bytes(), int(source.stat().st_mtime)


def _files() -> Iterator[tuple[str, Path]]:
    """(path in the guest, file here)."""
    interpreter = Path(sys.executable).resolve()
    stdlib = Path(sysconfig.get_path("stdlib"))
    numa = Path(_found(_package("numa"), "py-libnuma: pip install py-libnuma"))
    busybox = _found(shutil.which("busybox"), "busybox: apt install busybox-static")
    ldconfig = _found(shutil.which("ldconfig", path="/sbin:/usr/sbin"), "ldconfig")
    _found(ctypes.util.find_library("numa"), "libnuma: apt install libnuma1")
    yield "bin/busybox", Path(busybox)
    yield "guest_checks.py", HERE / "guest_checks.py"
    yield "python/bin/python3", interpreter
    yield "sbin/ldconfig", Path(ldconfig)  # how ctypes finds libnuma
    yield "etc/ld.so.cache", Path("/etc/ld.so.cache")
    programs = [interpreter, *stdlib.glob("lib-dynload/*.so"), *(ROOT / "placement").glob("*.so")]
    for library in _libraries(programs):
        yield f"lib/{library.name}", library
    loader = _loader(interpreter)
    yield str(loader).lstrip("/"), loader
    for folder, target in ((stdlib, f"python/lib/{stdlib.name}"), (numa, "packages/numa")):
        yield from _below(folder, target)
    yield from _below(ROOT / "placement", "packages/placement")
    yield "packages/libnuma.py", HERE / "libnuma.py"


def _below(folder: Path, target: str) -> Iterator[tuple[str, Path]]:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not SKIPPED.search(f"/{path.relative_to(folder)}"):
            yield f"{target}/{path.relative_to(folder)}", path


def _libraries(programs: list[Path]) -> list[Path]:
    """Shared libraries of these programs and of libnuma, by name."""
    listing = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=True)
    libnuma = re.search(r"libnuma\.so\.1 .*=> (\S+)", listing.stdout)
    found = {"libnuma.so.1": Path(_found(libnuma and libnuma[1], "libnuma.so.1"))}
    for program in programs:
        told = subprocess.run(["ldd", str(program)], capture_output=True, text=True, check=False)
        for name, path in re.findall(r"(\S+) => (/\S+)", told.stdout):
            found[name] = Path(path)
    return list(found.values())


def _loader(interpreter: Path) -> Path:
    told = subprocess.run(["ldd", str(interpreter)], capture_output=True, text=True, check=True)
    return Path(re.findall(r"^\s*(/\S+ld-\S+) ", told.stdout, re.MULTILINE)[0])


def _package(name: str) -> str | None:
    folders = (Path(path) / name for path in sys.path)
    return next((str(folder) for folder in folders if (folder / "__init__.py").exists()), None)


def _found(path: str | None, what: str) -> str:
    if path is None:
        sys.exit(f"not found: {what}")
    return path

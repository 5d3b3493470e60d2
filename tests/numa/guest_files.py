"""Files of this machine that a guest runs: busybox, this Python, libraries, packages.

A guest has the interpreter in /python, shared libraries in /lib and busybox in /bin.  Its first
program is a script of busybox, which is given the same environment in all guests.
"""

from __future__ import annotations

import ctypes.util
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SKIPPED = re.compile(r"/(test|tests|idlelib|lib2to3|ensurepip|tkinter|site-packages|config-[^/]*)/")
MOUNTS = """#!/bin/busybox sh
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t sysfs sysfs /sys
/bin/busybox mount -t devtmpfs dev /dev
/bin/busybox mount -t cgroup2 cgroup /sys/fs/cgroup
/bin/busybox hostname guest
export PYTHONHOME=/python PYTHONPATH=/packages PATH=/python/bin:/bin LD_LIBRARY_PATH=/lib
"""
"""Beginning of a guest's first program."""


def system(programs: Sequence[Path] = ()) -> Iterator[tuple[str, Path]]:
    """(path in the guest, file here) of what every guest has.

    Args:
        programs: programs and libraries whose own libraries are added.

    """
    interpreter = Path(sys.executable).resolve()
    stdlib = Path(sysconfig.get_path("stdlib"))
    busybox = found(shutil.which("busybox"), "busybox: apt install busybox-static")
    ldconfig = found(shutil.which("ldconfig", path="/sbin:/usr/sbin"), "ldconfig")
    found(ctypes.util.find_library("numa"), "libnuma: apt install libnuma1")
    yield "bin/busybox", Path(busybox)
    yield "python/bin/python3", interpreter
    yield "sbin/ldconfig", Path(ldconfig)  # how ctypes finds libnuma
    yield "etc/ld.so.cache", Path("/etc/ld.so.cache")
    native = [*stdlib.glob("lib-dynload/*.so"), *(ROOT / "placement").glob("*.so")]
    for library in _libraries([interpreter, *native, *programs]):
        yield f"lib/{library.name}", library
    loader = _loader(interpreter)
    yield str(loader).lstrip("/"), loader
    yield from below(stdlib, f"python/lib/{stdlib.name}")


def below(folder: Path, target: str) -> Iterator[tuple[str, Path]]:
    """(path in the guest, file here) of a folder's files."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not SKIPPED.search(f"/{path.relative_to(folder)}"):
            yield f"{target}/{path.relative_to(folder)}", path


def package(name: str) -> str | None:
    """Folder of an installed package; None where it is not installed."""
    folders = (Path(path) / name for path in sys.path)
    return next((str(folder) for folder in folders if (folder / "__init__.py").exists()), None)


def found(path: str | None, what: str) -> str:
    """Refuse to go on without a file."""
    if path is None:
        sys.exit(f"not found: {what}")
    return path


def _libraries(programs: list[Path]) -> list[Path]:
    """Shared libraries of these programs and of libnuma, by name."""
    listing = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=True)
    libnuma = re.search(r"libnuma\.so\.1 .*=> (\S+)", listing.stdout)
    libraries = {"libnuma.so.1": Path(found(libnuma and libnuma[1], "libnuma.so.1"))}
    for program in programs:
        told = subprocess.run(["ldd", str(program)], capture_output=True, text=True, check=False)
        for name, path in re.findall(r"(\S+) => (/\S+)", told.stdout):
            libraries[name] = Path(path)
    return list(libraries.values())


def _loader(interpreter: Path) -> Path:
    told = subprocess.run(["ldd", str(interpreter)], capture_output=True, text=True, check=True)
    return Path(re.findall(r"^\s*(/\S+ld-\S+) ", told.stdout, re.MULTILINE)[0])

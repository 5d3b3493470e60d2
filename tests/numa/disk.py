"""A disk with this Python, vLLM, Ray and this project, from which a guest runs: ext4, read-only.

What is installed here is several gigabytes, too much for a RAM disk.  The files are linked into a
folder, and copied only where they are on another file system than it; mke2fs makes the image of
that folder, without root.
"""

from __future__ import annotations

import compileall
import contextlib
import os
import shutil
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import guest_files
import qemu

FOLDERS = ("dev", "packages", "proc", "run", "sys", "tmp")
LEFT_OUT = (
    "__editable__", "debugpy", "jedi", "kubernetes_validate", "material", "mypy", "playwright",
    "torch/include", "triton", "_pytest",
)  # fmt: skip
"""Beginnings of names below the installed packages that no engine on CPUs imports, the largest."""
NATIVE = ("torch/lib/*.so*", "vllm/*.so", "ray/_raylet.so", "ray/core/src/ray/*/*")
"""Programs and libraries of installed packages, for the libraries that they need of this system."""
PROGRAMS = ("bash", "lscpu")
"""What Ray starts its workers with, and where vLLM reads processors."""
ROOM = 1.1
"""Size of the image, as a multiple of that of its files."""
MIB = 1 << 20


def write(image: Path, init: str, own: dict[str, Path]) -> None:
    """Write the image.

    Args:
        image: where to.
        init: what follows `guest_files.MOUNTS` in the guest's first program.
        own: path in the guest → file or folder here, beside what is installed.

    """
    folder = image.with_suffix(".files")
    for name in FOLDERS:
        (folder / name).mkdir(parents=True)
    for name, source in _files(own):
        _put(source, folder / name)
    (folder / "bin/sh").symlink_to("busybox")
    (folder / "init").write_text(guest_files.MOUNTS + init)
    (folder / "init").chmod(0o755)
    (folder / "etc/hosts").write_text("127.0.0.1 localhost guest\n")
    (folder / "etc/passwd").write_text("root:x:0:0:root:/tmp:/bin/sh\n")
    for name in ("packages/placement", "packages/ray_hetero"):
        # The guest cannot keep what it compiles.
        compileall.compile_dir(folder / name, quiet=1)
    _make(image, folder)
    shutil.rmtree(folder)


def _files(own: dict[str, Path]) -> Iterator[tuple[str, Path]]:
    """(path in the guest, file here)."""
    installed = sorted({Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")})
    programs = [Path(guest_files.found(shutil.which(name), name)) for name in PROGRAMS]
    native = [path for folder in installed for name in NATIVE for path in folder.glob(name)]
    yield from guest_files.system([*programs, *native])
    for program in programs:
        yield f"bin/{program.name}", program
    for folder in installed:
        for name, path in guest_files.below(folder, ""):
            if not name.lstrip("/").startswith(LEFT_OUT):
                yield f"packages{name}", path
    for target, source in own.items():
        if source.is_dir():
            yield from guest_files.below(source, target)
        else:
            yield target, source


def _put(source: Path, target: Path) -> None:
    """Link a file, or copy it with its modification time, which compiled modules are checked by."""
    target.parent.mkdir(parents=True, exist_ok=True)
    real = source.resolve()
    with contextlib.suppress(FileExistsError):
        try:
            os.link(real, target)
        except OSError as error:
            if isinstance(error, FileExistsError):
                raise
            shutil.copy2(real, target)


def _make(image: Path, folder: Path) -> None:
    sizes = [path.lstat().st_size for path in folder.rglob("*")]
    blocks = sum(-(-size // 4096) for size in sizes) + len(sizes)
    size = int(blocks * 4096 * ROOM) // MIB + 64
    program = shutil.which("mke2fs", path="/sbin:/usr/sbin")
    mke2fs = guest_files.found(program, "mke2fs: apt install e2fsprogs")
    command = [mke2fs, "-q", "-F", "-t", "ext4", "-b", "4096", "-O", "^has_journal"]
    command += ["-N", str(len(sizes) + 1024), "-m", "0", "-d", str(folder), str(image), f"{size}M"]
    qemu.output(command, folder.parent)

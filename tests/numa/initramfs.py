"""An initial RAM disk with busybox, this Python, libnuma, `placement` and the guest's program."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path

import guest_files

HERE = guest_files.HERE
FOLDERS = ("bin", "dev", "etc", "proc", "run/lock", "sys", "tmp")
INIT = f"""{guest_files.MOUNTS}
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
    numa = Path(
        guest_files.found(guest_files.package("numa"), "py-libnuma: pip install py-libnuma")
    )
    yield "guest_checks.py", HERE / "guest_checks.py"
    yield from guest_files.system()
    yield from guest_files.below(numa, "packages/numa")
    yield from guest_files.below(guest_files.ROOT / "placement", "packages/placement")
    yield "packages/libnuma.py", HERE / "libnuma.py"

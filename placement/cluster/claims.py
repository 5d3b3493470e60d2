"""Claims on sockets: two engines on one host never compute on the same cores by accident.

A claim is a file that its process keeps open and locked (flock).  The kernel drops the lock when
the process is gone, however it died, so there is nothing to clean up: a file without a lock is
free, whatever it says.  Claims are compared by the CPUs in them, so a claim on one NUMA node
conflicts with one on its whole package.

Who sees whose claims: all processes of one user on one host that see the same lock directory.
Containers have their own unless it is mounted into them, and so has each user; RAY_HETERO_CLAIM_DIR
names a common one (for several users: mode 1777 or a group's, owned by root).
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import weakref
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

from placement.cluster.lockfiles import DIRECTORY_VARIABLE, mutex, open_private, prepare, unusable
from placement.errors import ClaimError
from placement.given import file_shown, shown
from placement.host.cpulist import format_cpulist
from placement.host.topology import Socket

SUFFIX = ".claim"
MAX_FILE_BYTES = 1 << 16
MOST_PID = 1 << 22
"""Limit of process ids on 64-bit Linux."""
MOST_CPU = 1 << 16


@dataclass(frozen=True)
class Holder:
    """A live claim as others see it."""

    socket_key: str
    pid: int
    owner: str
    """The engine that it belongs to."""
    cpus: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"pid {self.pid} ({_command(self.pid)}), engine {shown(self.owner)}"


class Claim:
    """A claim of this process, until `release`, the end of a `with` block or of the process."""

    def __init__(self, holder: Holder, descriptor: int) -> None:
        self.holder = holder
        self._descriptor: int | None = descriptor
        _claims.add(self)

    def release(self) -> None:
        """Give the socket back; nothing to do if that was done."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()


_claims: weakref.WeakSet[Claim] = weakref.WeakSet()


def _close_in_child() -> None:
    # A forked child would keep the lock alive after its parent's death.
    for claim in _claims:
        claim.release()


os.register_at_fork(after_in_child=_close_in_child)


def default_directory() -> Path:
    """Directory of this user's claims on this host: RAY_HETERO_CLAIM_DIR, else a fixed place.

    The fixed place depends on nothing that differs between a login shell and a Ray worker (so not
    on TMPDIR or XDG_RUNTIME_DIR): ray_hetero-UID below /run/lock, or below /tmp where the user may
    not write to /run/lock.

    Raises:
        ClaimError: RAY_HETERO_CLAIM_DIR is a relative path.

    """
    named = os.environ.get(DIRECTORY_VARIABLE)
    if named and not Path(named).is_absolute():
        raise ClaimError(f"{DIRECTORY_VARIABLE}={file_shown(named)}: expected an absolute path")
    if named:
        return Path(named)
    base = Path("/run/lock") if os.access("/run/lock", os.W_OK | os.X_OK) else Path("/tmp")  # noqa: S108
    return base / f"ray_hetero-{os.getuid()}"


def key_of(socket: Socket) -> str:
    """Name of a socket's claim."""
    return f"socket-{socket.id}-cpu-{socket.cpus[0]}"


def claim_socket(socket: Socket, owner: str, directory: Path | None = None) -> Claim:
    """Claim all CPUs of a socket for an engine; see `claim`."""
    cpus = tuple(cpu for core in socket.cores for cpu in core.cpus)
    return claim(directory or default_directory(), key_of(socket), owner, cpus)


def claim(directory: Path, socket_key: str, owner: str, cpus: Collection[int] = ()) -> Claim:
    """Claim a socket for this process.

    Args:
        directory: lock directory; made (mode 0700) if it is not there.
        socket_key: name of the claim; letters, digits, `.`, `_` and `-`.
        owner: name of the engine, which no other engine has (vLLM's instance id, say).  Claims of
            one engine may have CPUs in common (several ranks on a small machine), those of two
            may not.
        cpus: logical CPUs of the socket; without any, only the key counts.

    Raises:
        ClaimError: another process holds the key or one of the CPUs, named with its pid; or the
            directory cannot be used.

    """
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,200}", socket_key):
        raise ClaimError(f"socket key {socket_key!r}: expected letters, digits, '.', '_' or '-'")
    mine = Holder(socket_key, os.getpid(), owner, tuple(sorted(cpus)))
    prepare(directory)
    with mutex(directory):
        for other in _live(directory):
            _refuse_conflict(mine, other)
        return Claim(mine, _write_locked(directory / f"{socket_key}{SUFFIX}", mine))


def held(directory: Path) -> tuple[Holder, ...]:
    """Live claims in a lock directory by key; none if there is no such directory.

    Raises:
        ClaimError: the directory cannot be used.

    """
    if not directory.is_dir():
        return ()
    prepare(directory)
    with mutex(directory):
        return tuple(_live(directory))


def _refuse_conflict(mine: Holder, other: Holder) -> None:
    common = set(mine.cpus).intersection(other.cpus) if mine.owner != other.owner else set()
    if other.socket_key == mine.socket_key or common:
        what = f"CPUs {format_cpulist(common)} are" if common else "it is"
        raise ClaimError(
            f"{mine.socket_key} cannot be claimed for engine {mine.owner!r}: {what} held by "
            f"{other}. Stop that process, or give this engine other sockets."
        )


def _live(directory: Path) -> Iterator[Holder]:
    """Claims whose lock is held.  Call with the mutex: it locks each free file for a moment."""
    for path in sorted(directory.glob(f"*{SUFFIX}")):
        descriptor = open_private(path)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield _read(path, descriptor)
        finally:
            os.close(descriptor)


def _read(path: Path, descriptor: int) -> Holder:
    try:
        content = json.loads(os.pread(descriptor, MAX_FILE_BYTES, 0).decode("utf-8"))
    except OSError as error:
        raise unusable(path, error) from None
    except (ValueError, RecursionError):
        content = None
    fields = content if isinstance(content, dict) else {}
    pid, owner, cpus = (fields.get(key) for key in ("pid", "owner", "cpus"))
    if (
        _is_whole(pid, MOST_PID)
        and isinstance(owner, str)
        and isinstance(cpus, list)
        and all(_is_whole(cpu, MOST_CPU) for cpu in cpus)
    ):
        return Holder(path.name.removesuffix(SUFFIX), pid, owner, tuple(cpus))
    raise ClaimError(
        f"{path}: locked by a process, but its content is not that of a claim; stop that "
        f"process (`fuser {path}`), or set {DIRECTORY_VARIABLE} to another directory"
    )


def _is_whole(value: object, most: int) -> TypeGuard[int]:
    return type(value) is int and 0 <= value <= most


def _write_locked(path: Path, holder: Holder) -> int:
    """The open, locked file of a claim that nobody else holds (the caller has the mutex)."""
    descriptor = open_private(path)
    fields = {"pid": holder.pid, "owner": holder.owner, "cpus": holder.cpus}
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(fields).encode(), 0)
    except OSError as error:
        os.close(descriptor)
        raise unusable(path, error) from None
    return descriptor


def _command(pid: int) -> str:
    """The start of a process's command line; it may be another user's or in another namespace."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return "not visible from here"
    text = " ".join(b" ".join(words).decode(errors="replace").split())
    text = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text[:80])
    return text or "no command line"

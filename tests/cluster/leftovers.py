"""What a test's processes leave behind: processes, shared memory, claims, temporary files.

Other people's processes may run on the same machine, so ours are found by a variable that all of
them inherit, and a shared-memory segment that a foreign process has open is none of our business.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

MARKER = "RAY_HETERO_TEST_ID"
SHARED_MEMORY = Path("/dev/shm")
SEMAPHORES = ("sem.mp-", "sem.loky-")
"""What Python's multiprocessing, and joblib's form of it, call their semaphores."""
TEMPORARY = ("ray_hetero-*", "rh-*")
"""Files and folders of engines in the folder for temporary files."""
GONE_SECONDS = 60.0
"""Longest wait for processes that are on their way out."""
WATCH_SECONDS = 0.5
"""Between two looks at the holders of new segments."""
AGENTS_GONE_SECONDS = 90.0
"""As docs/security.md states: Ray's agents try for a minute to tell a head that is gone, too."""


def marked_processes(marker: str, variable: str = MARKER) -> dict[int, str]:
    """Processes that inherited the marker: pid → command line; zombies have none and are gone."""
    found = {}
    entry = f"{variable}={marker}".encode()
    for directory in Path("/proc").glob("[0-9]*"):
        # A process may end, or belong to somebody else.
        with contextlib.suppress(OSError):
            if entry in (directory / "environ").read_bytes().split(b"\0"):
                words = (directory / "cmdline").read_bytes().replace(b"\0", b" ")
                found[int(directory.name)] = words.decode(errors="replace").strip()[:120]
    return found


def _processes_of(sessions: Collection[int]) -> dict[int, str]:
    """Processes of these sessions: pid → command line; zombies have none and are gone."""
    found = {}
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (directory / "cmdline").read_bytes().replace(b"\0", b" ")
            if words and os.getsid(int(directory.name)) in sessions:
                found[int(directory.name)] = words.decode(errors="replace").strip()[:120]
    return found


def segments() -> frozenset[str]:
    """Names in /dev/shm."""
    return frozenset(path.name for path in SHARED_MEMORY.iterdir())


def _held_by_others(marker: str) -> frozenset[str]:
    """Names in /dev/shm that living processes without the marker have mapped or open."""
    ours = marked_processes(marker)
    held = set()
    for directory in Path("/proc").glob("[0-9]*"):
        if int(directory.name) not in ours:
            held.update(_names_in_use(directory))
    return frozenset(held)


def _others_track_semaphores(marker: str) -> bool:
    """Whether a semaphore that nobody holds may still be removed by somebody else's process.

    That of a process that was killed stays until its family's resource tracker ends, which is with
    the family's last process.  A tracker of ours is a process of the scene.
    """
    ours = marked_processes(marker)
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            is_tracker = b"multiprocessing.resource_tracker" in (directory / "cmdline").read_bytes()
            if is_tracker and int(directory.name) not in ours:
                return True
    return False


def _names_in_use(process: Path) -> Iterator[str]:
    with contextlib.suppress(OSError):
        for line in (process / "maps").read_text().splitlines():
            if f"{SHARED_MEMORY}/" in line:
                yield line.split(f"{SHARED_MEMORY}/", 1)[1].split(" (deleted)")[0]
        for descriptor in (process / "fd").iterdir():
            with contextlib.suppress(OSError):
                target = os.readlink(descriptor)
                if target.startswith(f"{SHARED_MEMORY}/"):
                    yield target.removeprefix(f"{SHARED_MEMORY}/").split(" (deleted)")[0]


@dataclass(frozen=True)
class Scene:
    """The machine before a test; afterwards it must look like this again."""

    marker: str
    before: frozenset[str]
    temporary: Path
    """TMPDIR of the test's processes."""
    claims: Path
    """Lock directory of the test's engines."""
    sessions: set[int] = field(default_factory=set)
    """Of the processes that the test has started."""
    foreign: set[str] = field(default_factory=set)
    """Names in /dev/shm that only processes of somebody else have ever been seen to hold."""

    def processes(self) -> dict[int, str]:
        """All that were started here and live: pid → command line."""
        # vLLM's engine writes its title over its environment, and with it the marker.
        return marked_processes(self.marker) | _processes_of(self.sessions)

    def leftovers(self) -> list[str]:
        """Everything that is there now and was not there before, in words."""
        found = [f"process {pid}: {words}" for pid, words in self.processes().items()]
        found += [f"/dev/shm/{name}" for name in sorted(self._new_segments())]
        found += [str(path) for name in TEMPORARY for path in self.temporary.glob(name)]
        return found + [f"claim {holder}" for holder in self._holders()]

    def _new_segments(self) -> frozenset[str]:
        """Names in /dev/shm that the test has left there, as far as can be told."""
        new = segments() - self.before - self.foreign - _held_by_others(self.marker)
        # A semaphore is mapped under another name than it has in the end.
        if _others_track_semaphores(self.marker):
            return frozenset(name for name in new if not name.startswith(SEMAPHORES))
        return new

    def _holders(self) -> list[str]:
        from placement.cluster.claims import held

        return [str(holder) for holder in held(self.claims)]

    def watch(self, ended: threading.Event) -> None:
        """Note until the end which new names in /dev/shm are somebody else's.

        A process that is killed leaves its segments without a holder until its family's resource
        tracker ends, and such a segment no longer tells whose it was.
        """
        settled = set(self.before)
        while not ended.wait(WATCH_SECONDS):
            if new := segments() - settled:
                ours = {*self.processes(), os.getpid()}
                held = {True: set[str](), False: set[str]()}
                for directory in Path("/proc").glob("[0-9]*"):
                    held[int(directory.name) in ours].update(new & {*_names_in_use(directory)})
                self.foreign.update(held[False] - held[True])
                settled |= held[False] | held[True]

    def assert_clean(self, limit_s: float = GONE_SECONDS) -> None:
        """Wait until nothing is left, and name what is when the time is over."""
        left = wait_until(lambda: not self.leftovers(), limit_s)
        assert left, f"left behind: {self.leftovers()}"

    def sweep(self) -> None:
        """Kill what a failed test left running, and remove its segments."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not self.processes(), GONE_SECONDS)
        for name in self._new_segments():
            (SHARED_MEMORY / name).unlink(missing_ok=True)


def wait_until(condition: Callable[[], bool], limit_s: float, poll_s: float = 0.2) -> bool:
    """Whether the condition came true in time."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(poll_s)
    return True


@contextmanager
def clean_scene() -> Iterator[Scene]:
    """A scene of which nothing may be left in the end."""
    # Short: the names of Ray's sockets must fit into 107 bytes.
    root = Path(tempfile.mkdtemp(prefix="rh", dir="/tmp"))
    made = Scene(uuid.uuid4().hex, segments(), root / "t", root / "c")
    made.temporary.mkdir()
    ended = threading.Event()
    watcher = threading.Thread(target=made.watch, args=(ended,), daemon=True)
    watcher.start()
    try:
        yield made
        made.assert_clean()
    finally:
        ended.set()
        watcher.join()
        made.sweep()
        shutil.rmtree(root)

"""Folders for one engine's temporary files, which no other user can enter and which are removed.

A folder is locked by the process that made it.  One that was killed with everything around it
leaves its folder, which the next engine of the same user finds without a lock and removes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

PREFIX = "rh-"
"""Short, since the names of Unix sockets below it must fit into 107 bytes."""
LONGEST_PARENT = 28
"""Most bytes of the path of the folder around it; Ray's sockets take the other 79."""
ABANDONED_SECONDS = 600.0
"""Age, in seconds, from which a folder without a lock is nobody's: one is locked a moment after it
was made, and its processes take up to 90 s to end."""
REMOVALS = 5
REMOVAL_SECONDS = 0.2
"""Interval between two tries to remove a folder, in seconds: processes that end still write."""


class PrivateFolder:
    """A folder of mode 0700, until `remove`.

    Args:
        path: of a folder that another process has made and locked; a new one by default.

    """

    def __init__(self, path: str = "") -> None:
        self._lock = -1
        self.path = Path(path)
        if path:
            return
        parent = _parent()
        _sweep(parent)
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def remove(self) -> None:
        """Remove it with all that it holds; safe to call twice."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
        _remove(self.path)


def _parent() -> Path:
    """Where Ray would make its folder, or /tmp if that is too long for the names of sockets."""
    asked = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    return Path(asked if len(os.fsencode(asked)) <= LONGEST_PARENT else "/tmp")  # noqa: S108


def _remove(path: Path) -> None:
    for _ in range(REMOVALS):
        shutil.rmtree(path, ignore_errors=True)
        if not path.exists():
            return
        time.sleep(REMOVAL_SECONDS)


def _sweep(parent: Path) -> None:
    """Remove the folders of this user's processes that are gone."""
    for path in parent.glob(f"{PREFIX}*"):
        # It may vanish, or be somebody else's.
        with contextlib.suppress(OSError):
            found = os.lstat(path)
            is_old = time.time() - found.st_mtime > ABANDONED_SECONDS
            if found.st_uid == os.getuid() and found.st_mode & 0o77 == 0 and is_old:
                lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path, ignore_errors=True)
                finally:
                    os.close(lock)

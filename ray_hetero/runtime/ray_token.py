"""Ray's token: a Ray that is started here asks for one, which only this user can read."""

from __future__ import annotations

import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from ray._raylet import Config  # type: ignore[attr-defined]

from ray_hetero.errors import StartupError
from ray_hetero.log import logger
from ray_hetero.runtime.ray_address import MODE

TOKEN_BYTES = 32
ELSEWHERE = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
"""Variables by which a user gives Ray a token that is not in the usual file."""


def ask_for_token() -> None:
    """Have the Ray that this process starts next ask for a token, unless the user has forbidden it.

    Ray 2.60 does so by itself; earlier ones, from 2.55 on, only when they are told.  All of them
    write a new token by the umask, so that others could often read it: so it is written here.

    Raises:
        StartupError: the file cannot be written.

    """
    mode = os.environ.setdefault(MODE, "token")
    # Ray has read the variable already, when it was imported.
    Config.initialize("")
    if mode.lower() == "token" and not any(os.environ.get(name) for name in ELSEWHERE):
        path = Path.home() / ".ray" / "auth_token"
        try:
            _make(path)
            _warn_of_readers(path)
        except OSError as error:
            raise StartupError(
                f"expected to write Ray's token to {path}, found: {error.strerror}. Type: export "
                f"RAY_AUTH_TOKEN=$(openssl rand -hex {TOKEN_BYTES})"
            ) from None


def _make(path: Path) -> None:
    """Write a new token, unless there is one; of several processes the first one's stays."""
    if path.exists():
        return
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    own = path.with_name(f".auth_token.{os.getpid()}")
    try:
        descriptor = os.open(own, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(TOKEN_BYTES))
        with suppress(FileExistsError):
            os.link(own, path)
    finally:
        own.unlink(missing_ok=True)


def _warn_of_readers(path: Path) -> None:
    """Say so if other users can read a token that was there before."""
    readable = (stat.S_IROTH | stat.S_IRGRP) & path.stat().st_mode
    if readable and path.parent.stat().st_mode & (stat.S_IXOTH | stat.S_IXGRP):
        logger.warning(
            "other users of this host can read Ray's token and with it run code as you. Type: "
            "chmod go= %s %s", path.parent, path,
        )  # fmt: skip

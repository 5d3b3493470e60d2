"""Unpack the Python files of a release of vLLM beside the environment, for the contract tests.

    python tools/vllm_release.py 0.33.0      one release
    python tools/vllm_release.py others      those that are supported and not installed
    python tools/vllm_release.py --operators 0.33.0      with the installed CPU operators

It prints the folders below `build/vllm/`, one of which is to be put into PYTHONPATH.  Shared
objects are left out: the files are imported with the torch of the environment.  The release is
marked as a CPU build (0.33.0+cpu), by which vLLM chooses its platform.  A folder that is there is
not fetched again.  With `--operators`, a second folder beside it has links to the shared objects of
the installed vLLM, so that engines run with the Python files of one release and the compiled
operators of another; where the two differ in an operator's signature, its callers fail.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

from packaging.version import Version

from ray_hetero.supported import SUPPORTED_VLLM, installed_vllm

CACHE = Path(__file__).resolve().parent.parent / "build/vllm"
KEPT = (".py", ".json", ".jinja", ".yaml", ".typed")
"""Suffixes of files that vLLM reads when it is imported."""
WITHOUT_INDEX = (
    "`make check` compares this package with every supported release. Without a package index, "
    "`make check OTHER_VLLM=` leaves out those that are not installed"
)


def others() -> list[str]:
    """Releases of the supported minors that are not installed here."""
    here = Version(installed_vllm()).release[:2] if installed_vllm() != "none" else ()
    return [one for one in SUPPORTED_VLLM.values() if Version(one).release[:2] != here]


def unpacked(release: str, cache: Path = CACHE) -> Path:
    """The folder with a release's Python files; fetched and unpacked if it is not there.

    Raises:
        SystemExit: pip cannot fetch it; says what pip said.

    """
    folder = cache / release
    if folder.exists():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix=".tmp-") as scratch:
        fresh = Path(scratch) / "fresh"
        _unpack(_fetched(release, Path(scratch)), release, fresh)
        fresh.rename(folder)
    return folder


def with_operators(release: str, cache: Path = CACHE) -> Path:
    """The folder with a release's Python files and the installed vLLM's shared objects.

    Raises:
        SystemExit: as `unpacked`, or the installed vLLM has no shared objects.

    """
    folder = cache / f"{release}-operators"
    if folder.exists():
        return folder
    files = unpacked(release, cache)
    found = find_spec("vllm")
    installed = Path(next(iter(found.submodule_search_locations or ()), "")) if found else Path()
    objects = sorted(installed.glob("*.so")) if found else []
    if not objects:
        raise SystemExit("no compiled operators: the installed vLLM has none, type: make env")
    with tempfile.TemporaryDirectory(dir=cache, prefix=".tmp-") as scratch:
        fresh = Path(scratch) / "fresh"
        shutil.copytree(files, fresh, copy_function=os.link)
        for one in objects:
            (fresh / "vllm" / one.name).symlink_to(one)
        fresh.rename(folder)
    return folder


def _fetched(release: str, folder: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    wanted = f"vllm=={release}"
    print(f"fetching {wanted}: 350 MB, of which 60 MB of Python files are kept", file=sys.stderr)
    answer = subprocess.run(
        [*pip, "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--dest", folder, wanted],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    wheels = sorted(folder.glob("*.whl"))
    if answer.returncode or not wheels:
        said = (answer.stderr.strip() or answer.stdout.strip() or "nothing").splitlines()[-1]
        raise SystemExit(f"pip could not fetch {wanted}: {said}. {WITHOUT_INDEX}.")
    return wheels[0]


def _unpack(wheel: Path, release: str, target: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = [
            name
            for name in archive.namelist()
            if name.endswith(".dist-info/METADATA")
            or (name.startswith("vllm/") and name.endswith(KEPT))
        ]
        archive.extractall(target, names)
    (info,) = target.glob("vllm-*.dist-info")
    metadata = info / "METADATA"
    text = metadata.read_text(encoding="utf-8")
    marked = text.replace(f"\nVersion: {release}\n", f"\nVersion: {release}+cpu\n", 1)
    if marked == text:
        shutil.rmtree(target)
        raise SystemExit(f"{wheel.name}: expected Version: {release} in its METADATA")
    metadata.write_text(marked, encoding="utf-8")
    info.rename(target / f"vllm-{release}+cpu.dist-info")


def main(asked: list[str]) -> None:
    """Fetch what is named on the command line."""
    made = with_operators if asked[:1] == ["--operators"] else unpacked
    named = [one for one in asked if one != "--operators"]
    print(*(made(one) for one in (others() if named == ["others"] else named)))


if __name__ == "__main__":
    main(sys.argv[1:])

"""Build the CPU wheel of a vLLM version from its source distribution.

What the build needs is looked for first, and all that is missing is named at once: vLLM's own
build names one thing at a time, some after an hour.  The wheel is built against the torch of this
environment, on which its shared objects then load.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.version import Version

from ray_hetero.compat.wheels import check_sum, fetched_by_pip
from ray_hetero.errors import CpuSiteError

COMPILER = Version("12.3")
"""Oldest g++ that vLLM's build for x86-64 takes (its cmake/cpu_extension.cmake)."""
PACKAGES = {
    "cmake": "3.26.1", "ninja": "1", "packaging": "24.2", "setuptools": "77.0.3",
    "setuptools-scm": "8", "setuptools-rust": "1.9", "wheel": "0", "jinja2": "3", "torch": "2",
}  # fmt: skip
"""Packages that vLLM's build needs, and the oldest version of each; of torch it takes the one
that is installed."""
HEADERS = {"numa.h": "libnuma-dev (numactl-devel)", "omp.h": "the OpenMP files of g++"}
"""C headers, and where they are from."""
ONEDNN_VARIABLE = "FETCHCONTENT_SOURCE_DIR_ONEDNN"
"""Environment variable by which vLLM's build takes the sources of oneDNN from a folder."""
FREE_BYTES_NEEDED = 6 << 30
"""Room for the sources, their objects and three builds of the kernels."""
PIP_WHEEL = (
    sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation",
    "--disable-pip-version-check",
)  # fmt: skip
REACH_SECONDS = 60
"""Longest wait for a repository to say which tags it has, in seconds."""


@dataclass(frozen=True)
class OneDnn:
    """Which sources of oneDNN a release of vLLM is built with."""

    repository: str
    tag: str

    @property
    def version(self) -> str:
        """Of the tag: 3.13 of v3.13."""
        return self.tag.removeprefix("v")


def build_wheel(
    vllm_version: str,
    folder: Path,
    *,
    onednn: Path | None = None,
    jobs: int | None = None,
    sha256: str | None = None,
) -> Path:
    """Build the wheel in a folder, whose output this process shows.

    Args:
        vllm_version: without its local part.
        folder: for the sources, the build and the wheel; is there already.
        onednn: folder with the sources of oneDNN; None fetches them.
        jobs: compilers at once, each of which takes up to 2 GiB; None is one for each core.
        sha256: what the checksum of the source distribution has to be; None compares none.

    Returns:
        The wheel.

    Raises:
        CpuSiteError: something that the build needs is missing, or it fails; nothing is installed.

    """
    if onednn is None and (named := os.environ.get(ONEDNN_VARIABLE)):
        onednn = Path(named)
    check_needs(folder, onednn)
    sources = unpack_sources(fetch_sources(vllm_version, folder, sha256), folder / "sources")
    check_onednn(onednn_of(sources), onednn)
    environment = {**os.environ, "VLLM_TARGET_DEVICE": "cpu"}
    if onednn is not None:
        environment[ONEDNN_VARIABLE] = str(onednn.absolute())
    if jobs is not None:
        environment["MAX_JOBS"] = str(jobs)
    out = folder / "wheels"
    status = subprocess.run(
        [*PIP_WHEEL, "--wheel-dir", str(out), "--verbose", str(sources)],
        env=environment, check=False,
    ).returncode  # fmt: skip
    wheels = sorted(out.glob("vllm-*.whl"))
    if status or len(wheels) != 1:
        raise CpuSiteError(
            f"vLLM {vllm_version} could not be built: pip ended with status {status}, the reason "
            "is above; nothing was installed"
        )
    return wheels[0]


def check_needs(folder: Path, onednn: Path | None) -> None:
    """Look for all that the build needs.

    Args:
        folder: in which it is built.
        onednn: folder with the sources of oneDNN; None where they are fetched.

    Raises:
        CpuSiteError: names everything that is missing.

    """
    missing = [*_compilers(), *_packages(), *_free(folder)]
    if onednn is None and shutil.which("git") is None:
        missing.append("git, which fetches oneDNN (or name a folder with its sources: --onednn)")
    if missing:
        raise CpuSiteError(
            "vLLM cannot be built here. Missing: " + "; ".join(missing) + ". Nothing was fetched"
        )


def _compilers() -> Iterator[str]:
    compiler = os.environ.get("CXX") or "g++"
    found = _said([compiler, "-dumpfullversion", "-dumpversion"])
    if found is None:
        yield f"a C++ compiler: {compiler} cannot be run (g++ {COMPILER} or later; CXX names it)"
        return
    if _is_x86() and not re.match(r"\d", found):
        yield f"g++ {COMPILER} or later: {compiler} is another compiler (CXX names it)"
    elif _is_x86() and Version(found) < COMPILER:
        yield f"g++ {COMPILER} or later: {compiler} is {found} (CXX names it)"
    include = sysconfig.get_path("include")
    headers = {**HEADERS, "Python.h": f"the headers of Python {sysconfig.get_python_version()}"}
    for header, package in headers.items():
        given = subprocess.run(
            [compiler, "-fopenmp", "-fsyntax-only", "-x", "c++", f"-I{include}", "-"],
            input=f"#include <{header}>\n", text=True, capture_output=True, check=False,
        )  # fmt: skip
        if given.returncode:
            yield f"{header}, of {package}"


def _packages() -> Iterator[str]:
    lacking = []
    for name, oldest in PACKAGES.items():
        try:
            is_there = Version(version(name)) >= Version(oldest)
        except PackageNotFoundError:
            is_there = False
        if not is_there:
            lacking.append(f"'{name}>={oldest}'")
    if importlib.util.find_spec("pip") is None:
        yield "pip in this environment"
    if lacking:
        yield f"packages (pip install {' '.join(lacking)})"


def _free(folder: Path) -> Iterator[str]:
    free = shutil.disk_usage(folder).free
    if free < FREE_BYTES_NEEDED:
        yield f"{FREE_BYTES_NEEDED >> 30} GiB free in {folder}, which has {free >> 30}"


def fetch_sources(vllm_version: str, folder: Path, sha256: str | None) -> Path:
    """Fetch the source distribution with pip.

    Raises:
        CpuSiteError: pip does not find it, or its checksum is another.

    """
    wanted = f"vllm=={vllm_version}"
    # To look at its version, pip runs its setup.py, which else adds a local part to it.
    environment = {
        **os.environ, "VLLM_TARGET_DEVICE": "empty", "VLLM_VERSION_OVERRIDE": vllm_version
    }  # fmt: skip
    found = fetched_by_pip(
        wanted,
        folder,
        "vllm-*.tar.gz",
        ["--no-build-isolation", "--no-binary", "vllm"],
        what="the sources of ",
        environment=environment,
    )
    if sha256 is not None:
        check_sum(found, sha256)
    return found


def unpack_sources(archive: Path, target: Path) -> Path:
    """Unpack a source distribution; its only folder.

    Raises:
        CpuSiteError: it is none, or has a file that leaves the folder.

    """
    try:
        with tarfile.open(archive) as files:
            files.extractall(target, filter="data")
    except (tarfile.TarError, EOFError, OSError) as error:
        raise CpuSiteError(f"{archive.name}: expected a source distribution, but {error}") from None
    folders = [path for path in target.iterdir() if (path / "pyproject.toml").exists()]
    if len(folders) != 1:
        raise CpuSiteError(f"{archive.name}: expected one folder with a pyproject.toml")
    return folders[0]


def onednn_of(sources: Path) -> OneDnn:
    """Which oneDNN the sources of vLLM name for this processor.

    Raises:
        CpuSiteError: they name none.

    """
    cmake = sources / "cmake/cpu_extension.cmake"
    text = cmake.read_text(encoding="utf-8") if cmake.exists() else ""
    found = re.findall(r"GIT_REPOSITORY\s+(\S*/oneDNN\.git)\s+GIT_TAG\s+(\S+)", text)
    if not found:
        raise CpuSiteError(f"{cmake}: expected the tag of oneDNN, found none")
    # Where there are several, the first is that of Arm.
    return OneDnn(*(found[-1] if _is_x86() else found[0]))


def check_onednn(wanted: OneDnn, folder: Path | None) -> None:
    """Look whether oneDNN's sources can be had.

    Args:
        wanted: which vLLM asks for.
        folder: with the sources; None fetches them.

    Raises:
        CpuSiteError: the folder has none or another version, or the repository is not reached.

    """
    if folder is not None:
        file = folder / "CMakeLists.txt"
        text = file.read_text(encoding="utf-8") if file.exists() else ""
        found = re.search(r'PROJECT_VERSION "([\d.]+)"', text)
        if found is None:
            raise CpuSiteError(f"{folder}: expected the sources of oneDNN, found none")
        if wanted.tag.startswith("v") and not _is_release(found[1], wanted.version):
            raise CpuSiteError(
                f"{folder}: expected oneDNN {wanted.version}, as vLLM asks for, found {found[1]}"
            )
        return
    tags = _said(["git", "ls-remote", wanted.repository, "HEAD"], seconds=REACH_SECONDS)
    if tags is None:
        raise CpuSiteError(
            f"{wanted.repository} is not reached, from which oneDNN {wanted.tag} is fetched. Get "
            f"its sources on another host (git clone --branch {wanted.tag} --depth 1 "
            f"{wanted.repository}), and type: "
            "ray-hetero install-cpu-kernels --build --onednn FOLDER"
        )


def _is_release(found: str, wanted: str) -> bool:
    """Whether 3.13.1 is of 3.13."""
    parts = wanted.split(".")
    return found.split(".")[: len(parts)] == parts


def _said(command: list[str], seconds: float | None = None) -> str | None:
    """Output of a command; None where it fails, is not there, or takes too long."""
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=seconds,
            stdin=subprocess.DEVNULL, env={**os.environ, "GIT_TERMINAL_PROMPT": "0"},
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if answer.returncode else answer.stdout.strip()


def _is_x86() -> bool:
    return os.uname().machine in ("x86_64", "amd64")

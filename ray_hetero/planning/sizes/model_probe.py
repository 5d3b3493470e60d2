"""Sizes of a model that only vLLM knows: its own class, built without memory in a process of its
own, whose answer is kept.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from placement.host.bandwidth_cache import cache_directory
from placement.model.built import shape_from_parts
from placement.model.config import UnknownModelError
from placement.model.shape import ModelShape
from ray_hetero.log import logger
from ray_hetero.planning.sizes.hub_headers import keep_json
from ray_hetero.supported import installed_vllm

MODULE = "ray_hetero.planning.sizes.built_model"
"""Program of the process."""
LIMIT_S = 240.0
"""Seconds that the process may take; it imports vLLM, which takes 10 to 40."""
FORM = 4
"""Number of the form of kept answers; another one is not read."""
ENVIRONMENT = {
    "VLLM_TARGET_DEVICE": "cpu", "CUDA_VISIBLE_DEVICES": "-1", "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "CRITICAL",
}  # fmt: skip
"""Settings with which vLLM takes its CPU platform, whatever the host has, and asks no hub."""
BESIDE = "*.json"
"""Files of a checkpoint that vLLM reads beside config.json."""
LONGEST = 1 << 20
"""Bytes of such a file; tokenizers and indexes are longer, and do not matter here."""


def built_shape(
    config: Mapping[str, Any],
    folder: Path | None = None,
    *,
    dtype: str = "auto",
    kv_dtype: str | None = None,
    trust_remote_code: bool = False,
    directory: Path | None = None,
) -> ModelShape:
    """Sizes of a model by vLLM's own class of it.

    Args:
        config: content of config.json.
        folder: of the checkpoint, for files beside it; None where there is none.
        dtype: vLLM's --dtype.
        kv_dtype: vLLM's --kv-cache-dtype.
        trust_remote_code: vLLM's --trust-remote-code.
        directory: where answers are kept; None is `models` in `cache_directory()`.

    Raises:
        UnknownModelError: vLLM is not installed here, cannot build the model, or takes too long.

    """
    asked = {"dtype": dtype.removeprefix("torch."), "trust_remote_code": trust_remote_code}
    files = _files_beside(folder)
    kept = (directory or cache_directory() / "models") / f"{_digest(config, files, asked)}.json"
    parts = _read(kept)
    if parts is None:
        parts = _built(config, files, asked)
        keep_json(kept, parts, "sizes")
    if parts.get("decoder_alone"):
        logger.warning("sizes are of the decoder alone: vLLM cannot build the other parts here")
    return shape_from_parts(parts, config, kv_dtype)


def _digest(config: Mapping[str, Any], files: Mapping[str, bytes], asked: object) -> str:
    names = sorted((name, hashlib.sha256(content).hexdigest()) for name, content in files.items())
    told = json.dumps([FORM, installed_vllm(), config, names, asked], sort_keys=True, default=str)
    return hashlib.sha256(told.encode()).hexdigest()


def _files_beside(folder: Path | None) -> dict[str, bytes]:
    """Small JSON files and the code of a checkpoint: vLLM reads the quantisation from some."""
    if folder is None or not folder.is_dir():
        return {}
    found = sorted((*folder.glob(BESIDE), *folder.glob("*.py")))
    return {
        file.name: file.read_bytes()
        for file in found
        if file.name != "config.json" and file.is_file() and file.stat().st_size <= LONGEST
    }


def _read(kept: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(kept.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _built(
    config: Mapping[str, Any], files: Mapping[str, bytes], asked: Mapping[str, Any]
) -> dict[str, Any]:
    if find_spec("vllm") is None:
        raise UnknownModelError("vLLM, which knows it, is not installed here")
    logger.warning("only vLLM knows the sizes of this model: asking it, up to a minute, once")
    with tempfile.TemporaryDirectory(prefix="ray_hetero_model_") as scratch:
        folder = Path(scratch) / "model"
        folder.mkdir()
        for name, content in files.items():
            (folder / name).write_bytes(content)
        (folder / "config.json").write_text(json.dumps(config, default=str), encoding="utf-8")
        request, answer = Path(scratch) / "request.json", Path(scratch) / "answer.json"
        request.write_text(json.dumps({"folder": str(folder), **asked}), encoding="utf-8")
        command = [sys.executable, "-m", MODULE, str(request), str(answer)]
        try:
            ended = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, timeout=LIMIT_S,
                check=False, text=True, errors="replace", env=environment(),
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise UnknownModelError(
                f"vLLM has not built the model within {LIMIT_S:.0f} s"
            ) from None
        found = _read(answer)
    if found is None:
        last = next(iter(reversed(ended.stderr.strip().splitlines())), "it said nothing")
        raise UnknownModelError(f"the process that builds it ended with {ended.returncode}: {last}")
    if "problem" in found:
        raise UnknownModelError(f"vLLM cannot build it: {found['problem']}")
    parts: dict[str, Any] = found["parts"]
    return parts


def environment() -> dict[str, str]:
    """The environment of that process: this one's, without what is for ranks alone."""
    left_out = ("VLLM_PP_LAYER_PARTITION", "VLLM_PLUGINS", "RAY_ADDRESS")
    return {name: value for name, value in os.environ.items() if name not in left_out} | ENVIRONMENT

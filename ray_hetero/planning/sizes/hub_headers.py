"""The headers of a checkpoint's files on the hub, read by range requests: no weight is fetched.

The first bytes of a safetensors file tell how long its header is
(https://github.com/huggingface/safetensors#format).  Answers are kept by commit, so that a model is
asked for once.
"""

from __future__ import annotations

import io
import json
import re
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

from placement.host.bandwidth_cache import cache_directory
from placement.model.checkpoint import (
    LONGEST_HEADER,
    LONGEST_INDEX,
    Header,
    files_of_index,
    header_of,
)
from placement.model.config import UnknownModelError, json_object
from ray_hetero.log import logger

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
LIMIT_S = 20.0
"""Longest time for all headers of a model, in seconds."""
REQUEST_S = 10.0
"""Longest wait for an answer, or for more of one, in seconds."""
MOST_BYTES = 512 << 20
"""Bytes that are fetched for a model; the headers of DeepSeek V3's 163 files have 11 MB."""
MOST_FILES = 2000
FIRST_BYTES = 1 << 17
"""Bytes of a file's first request, in which most headers end."""
AT_ONCE = 8
"""Files that are asked for at the same time."""
COMMIT = re.compile(r"[0-9a-f]{40}")


class HubError(UnknownModelError):
    """The headers of a model cannot be had from the hub."""


@dataclass(frozen=True)
class HubModel:
    """A model on the hub whose config.json is in the hub's cache on this disk."""

    name: str
    folder: Path
    """Snapshot of the model in that cache."""

    @property
    def commit(self) -> str:
        """The commit that the config.json is of."""
        return self.folder.name


def hub_model(name: str, revision: str | None = None) -> HubModel | None:
    """A model of the hub.

    Args:
        name: like Qwen/Qwen3-32B.
        revision: a branch, a tag or a commit; None is the main branch.

    Returns:
        The model, or None where no config.json of that name is in the cache.

    """
    try:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ImportError:
        return None
    try:
        config = try_to_load_from_cache(name, "config.json", revision=revision)
    except HFValidationError:
        return None
    return HubModel(name, Path(config).parent) if isinstance(config, str) else None


def headers_on_hub(model: HubModel, directory: Path | None = None) -> Header:
    """Dtype and shape of every tensor of a model on the hub.

    Args:
        model: which.
        directory: where answers are kept; None is `headers` in `cache_directory()`.

    Raises:
        HubError: the hub is not to be asked or not to be reached, is too slow, or has no whole
            safetensors files of that model.

    """
    file = model.name.replace("/", "--") + f"@{model.commit}.json"
    kept = (directory or cache_directory() / "headers") / file
    if (found := _read(kept)) is not None:
        return found
    found = _asked(model)
    if COMMIT.fullmatch(model.commit):
        keep_json(kept, found, "headers")
    return found


def _read(kept: Path) -> Header | None:
    try:
        content = json.loads(kept.read_text(encoding="utf-8"))
        return {name: (dtype, tuple(shape)) for name, (dtype, shape) in content.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return None


def keep_json(kept: Path, content: object, what: str) -> None:
    """Keep facts of a model for the next time; a warning says where that fails.

    Args:
        kept: file, which is replaced as a whole.
        content: values of JSON.
        what: the facts, for the warning.

    """
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", dir=kept.parent, suffix=".tmp", delete=False, encoding="utf-8"
        ) as stream:
            json.dump(content, stream)
        Path(stream.name).replace(kept)
    except OSError as error:
        logger.warning("%s of the model are not kept for the next time: %s", what, error)


def _asked(model: HubModel) -> Header:
    from huggingface_hub.constants import is_offline_mode
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

    if is_offline_mode():
        raise HubError(f"{model.name}: HF_HUB_OFFLINE is set")
    requests = _Requests(model)
    try:
        content = requests.start_of(INDEX, LONGEST_INDEX)
        files = {SINGLE} if content is None else _files(content[0], f"{model.name}/{INDEX}")
        with ThreadPoolExecutor(AT_ONCE) as pool:
            found = list(pool.map(requests.header, sorted(files)))
    except HubError:
        raise
    except UnknownModelError as error:
        raise HubError(str(error)) from None
    except (HTTPError, OSError, ValueError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise HubError(f"{model.name}: the hub does not give its headers: {lines[0]}") from None
    return {name: tensor for one in found for name, tensor in one.items()}


def _files(content: bytes, name: str) -> set[str]:
    files = files_of_index(json_object(content.decode("utf-8", "replace"), name), name)
    if len(files) > MOST_FILES:
        raise HubError(f"{name}: {len(files):,} files; headers of at most {MOST_FILES:,} are read")
    return files


@dataclass
class _Requests:
    """Requests for parts of a model's files, within one time and one number of bytes."""

    model: HubModel
    ends: float = field(default_factory=lambda: time.monotonic() + LIMIT_S)
    fetched: int = 0
    lock: Lock = field(default_factory=Lock)

    def header(self, file: str) -> Header:
        """The header of one file."""
        name = f"{self.model.name}/{file}"
        for count in (FIRST_BYTES, LONGEST_HEADER + 8):
            content = self.start_of(file, count)
            if content is None:
                raise HubError(f"{name}: the hub has no such file")
            start, size = content
            length = int.from_bytes(start[:8], "little") + 8
            if length <= len(start) or length > min(size, LONGEST_HEADER):
                break
        if len(start) < min(length, size, LONGEST_HEADER):
            raise HubError(f"{name}: the hub sent {len(start):,} of the header's {length:,} bytes")
        return header_of(io.BytesIO(start).read, size, name)

    def start_of(self, file: str, count: int) -> tuple[bytes, int] | None:
        """The first bytes of a file, and how many it has; None where there is no such file.

        A server that knows no ranges sends the whole file; the rest of it is not read.
        """
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import (  # type: ignore[attr-defined]
            build_hf_headers,
            get_session,
            hf_raise_for_status,
        )

        url = hf_hub_url(self.model.name, file, revision=self.model.commit)
        headers = build_hf_headers() | {
            "Range": f"bytes=0-{count - 1}", "Accept-Encoding": "identity",
        }  # fmt: skip
        found = bytearray()
        timeout = min(self._left(), REQUEST_S)
        with get_session().stream("GET", url, headers=headers, timeout=timeout) as response:
            if response.status_code == 404:
                return None
            hf_raise_for_status(response)
            size = _size(response.headers)
            for piece in response.iter_raw():
                found += piece
                self._count(len(piece))
                if len(found) >= count:
                    break
        return bytes(found[:count]), len(found) if size is None else size

    def _left(self) -> float:
        left = self.ends - time.monotonic()
        if left <= 0:
            raise HubError(
                f"{self.model.name}: the hub has not sent all headers in {LIMIT_S:.0f} s"
            )
        return left

    def _count(self, more: int) -> None:
        self._left()
        with self.lock:
            self.fetched += more
        if self.fetched > MOST_BYTES:
            raise HubError(f"{self.model.name}: its headers have more than {MOST_BYTES >> 20} MiB")


def _size(headers: Mapping[str, Any]) -> int | None:
    """Bytes of the whole file, of which a response has a part."""
    total = str(headers.get("content-range", "")).rpartition("/")[2]
    number = total or str(headers.get("content-length", ""))
    return int(number) if number.isdecimal() else None

"""Measured shares of decode steps, kept so that the next start does not measure again.

They are beside the bandwidth of the host (placement/host/bandwidth_cache.py), under a key made of
all that decides them.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from placement.host.bandwidth_cache import (
    MEASURE_AGAIN,
    figures_file,
    is_fresh,
    is_young,
    read_figures,
    write_figures,
)
from ray_hetero.log import logger
from ray_hetero.offload.decode.share_choice import MOST_PARTS, Share, Shares

if TYPE_CHECKING:
    from ray_hetero.kernels.layers.layer import Layer
    from ray_hetero.kernels.linear.streaming_linear import StreamingLinear
    from ray_hetero.offload.decode.column_channel import ColumnChannel

PREFIX = "decode shares, "
"""Beginning of the keys of these figures."""
PACKAGE = Path(__file__).parents[2]
SOURCES = ("kernels", "offload", "planning/prefill_memory.py")
"""Parts of this package that a measured step consists of, besides the compiled kernels."""

Agree = Callable[[Shares | None], Shares | None]
"""Gives all ranks of a group what the first one of them has found."""


@dataclass(frozen=True)
class ShareCache:
    """Where the shares of a rank's decode steps are kept.

    Args:
        key: of all that decides them; an empty one for a rank that neither reads nor writes.
        agree: gives all ranks of a group what the first has; all of them call it at once.
        directory: where the file is; None is the user's cache directory.

    """

    key: str
    agree: Agree = lambda found: found
    directory: Path | None = None

    @property
    def _path(self) -> Path:
        return figures_file(socket.gethostname(), self.directory)

    def known(self, asked: Sequence[int]) -> Shares | None:
        """The shares that an earlier start has measured for steps of so many tokens.

        None where there are none, they are too old, or damaged.
        """
        entry: Any = read_figures(self._path).get(self.key) if self.key else None
        own = _shares(entry, asked)
        found = self.agree(own)
        if own is not None:
            logger.info(
                "decode steps are shared with the GPU as an earlier start measured it %.0f hours "
                "ago: it computes, by number of tokens, %s "
                "(cpu.decode_gpu_share; %s=1 measures again)",
                (time.time() - entry["measured_at"]) / 3600,
                own,
                MEASURE_AGAIN,
            )
        return found

    def keep(self, shares: Shares) -> None:
        """Keep what was measured now."""
        if not self.key:
            return
        path = self._path
        kept = {
            key: entry
            for key, entry in read_figures(path).items()
            if not key.startswith(PREFIX)
            or (isinstance(entry, dict) and is_young(entry.get("measured_at")))
        }
        found = [[one.tokens, one.columns, one.gain_s] for one in shares.measured]
        entry = {"shares": found, "measured_at": time.time()}
        write_figures(path, kept | {self.key: entry})


def _shares(entry: Any, asked: Sequence[int]) -> Shares | None:
    """Kept shares; None where they are none for such steps."""
    if not isinstance(entry, dict) or not is_fresh(entry.get("measured_at")):
        return None
    rows = entry.get("shares")
    if not isinstance(rows, list) or not all(map(_is_share, rows)):
        return None
    if [tokens for tokens, *_ in rows] != list(asked):
        return None
    return Shares(tuple(Share(tokens, columns, float(gain_s)) for tokens, columns, gain_s in rows))


def _is_share(row: Any) -> bool:
    """Whether these are tokens, parts of columns, and seconds that they gain."""
    if not isinstance(row, list) or len(row) != 3:
        return False
    tokens, columns, gain_s = row
    return (
        type(tokens) is int
        and type(columns) is int
        and 0 <= columns <= MOST_PARTS
        and type(gain_s) in (int, float)
        and math.isfinite(gain_s)
        and gain_s >= 0
    )


def key_of(
    layers: Sequence[Layer], kernel: StreamingLinear, columns: ColumnChannel, place: str
) -> str:
    """Key of these shares in the file of kept figures.

    Args:
        layers: that are measured.
        kernel: what computes them on the cores.
        columns: of their MLPs.
        place: processor, cores and ranks beside this one, of all ranks of a group; empty where
            nothing is to be kept.

    """
    if not place:
        return ""
    digest = hashlib.sha256()
    for layer in layers:
        linears = (layer.input.qkv, *layer.parts.linears)
        digest.update(repr([_described(linear.weight) for linear in linears]).encode())
        digest.update(repr((layer.attention.shape, layer.calls)).encode())
    digest.update(
        repr((len(layers), kernel.level.name, kernel.limits.native_tokens, columns.tokens)).encode()
    )
    digest.update(repr((torch.get_num_threads(), torch.__version__, _triton())).encode())
    digest.update(_code().encode())
    return f"{PREFIX}{place}, {columns.about}, layers and code {digest.hexdigest()[:16]}"


def _described(weight: Any) -> tuple[Any, ...]:
    facts = json.dumps(weight.facts, sort_keys=True, default=str)
    return weight.name, weight.shape, str(weight.data.dtype), tuple(weight.data.shape), facts


def _triton() -> str:
    try:
        return version("triton")
    except PackageNotFoundError:
        return "none"


@functools.cache
def _code() -> str:
    """Digest of what computes a step: a kernel that has become faster is measured again."""
    digest = hashlib.sha256()
    files = [*PACKAGE.glob("_streaming_linear*.so")]
    for name in SOURCES:
        path = PACKAGE / name
        files += path.rglob("*.py") if path.is_dir() else [path]
    for file in sorted(files):
        digest.update(file.name.encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()

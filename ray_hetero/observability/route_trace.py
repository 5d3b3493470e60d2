"""A file of the experts that tokens have chosen: written while an engine serves, and read again.

The first line is JSON: `format`, and `layers` with `name`, `experts` and `chosen` of each.  Records
follow, one for each layer of a step, of little-endian 16-bit numbers: the number of the layer, of
tokens, and the experts of each token, 65535 for none.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ray_hetero.errors import ConfigError
from ray_hetero.log import logger

FORMAT = "ray_hetero routes 1"
NONE = 0xFFFF
"""Number in place of an expert where there is none."""


@dataclass(frozen=True)
class TracedLayer:
    """A layer of experts in a trace."""

    name: str
    experts: int
    chosen: int
    """Experts of a token."""


class RouteWriter:
    """Writes a trace of at most so many bytes.

    Args:
        path: of the file, which is replaced.
        layers: in the order of their numbers.
        most_bytes: of the file.

    Raises:
        ConfigError: it cannot be written.

    """

    def __init__(self, path: Path, layers: Sequence[TracedLayer], most_bytes: int) -> None:
        self._path, self._left = path, most_bytes
        header = {"format": FORMAT, "layers": [vars(layer) for layer in layers]}
        try:
            self._file = path.open("wb", buffering=0)
        except OSError as error:
            raise ConfigError(
                f"experts.trace: {path} cannot be written: {error.strerror}. Give the path of a "
                "file in a folder of the expert rank's node, or leave experts.trace out."
            ) from None
        self.is_full = not self._written(json.dumps(header).encode() + b"\n")
        """Whether no more is written."""

    def add(self, records: bytes, lost: int) -> None:
        """Write whole records, unless the file would be too large then.

        Args:
            records: since the last call.
            lost: records that there was no room for in memory.

        """
        if lost:
            logger.warning(
                "%s: %d records are missing, because they came too fast", self._path, lost
            )
        if self.is_full or not records:
            return
        if not self._written(records):
            self.is_full = True
            self._file.close()

    def _written(self, content: bytes) -> bool:
        if len(content) > self._left:
            logger.info("%s is complete (experts.trace_mib)", self._path)
            return False
        self._left -= len(content)
        try:
            self._file.write(content)
        except OSError as error:
            logger.warning("%s is not continued: %s", self._path, error)
            return False
        return True


@dataclass(frozen=True)
class RouteTrace:
    """A trace that was read."""

    layers: tuple[TracedLayer, ...]
    records: tuple[tuple[int, np.ndarray], ...]
    """Number of a layer, and experts [tokens, chosen] of a step, int32, -1 for none."""

    @classmethod
    def read(cls, path: Path) -> RouteTrace:
        """Read a file; what a killed process has left of its last record is left out.

        Raises:
            ValueError: it is no such file.

        """
        with path.open("rb") as file:
            line = file.readline(1 << 20)
            try:
                header = json.loads(line)
                layers = tuple(TracedLayer(**layer) for layer in header["layers"])
            except (ValueError, KeyError, TypeError):
                header, layers = {}, ()
            if header.get("format") != FORMAT:
                raise ValueError(f"{path}: expected a file of {FORMAT!r}, see experts.trace")
            content = file.read()
        numbers = np.frombuffer(content[: len(content) // 2 * 2], dtype="<u2")
        return cls(layers, tuple(_records(path, layers, numbers)))


def _records(
    path: Path, layers: Sequence[TracedLayer], numbers: np.ndarray
) -> Iterator[tuple[int, np.ndarray]]:
    at = 0
    while at + 2 <= len(numbers):
        layer, tokens = int(numbers[at]), int(numbers[at + 1])
        if layer >= len(layers):
            raise ValueError(f"{path}: a record of layer {layer}, expected one of {len(layers)}")
        end = at + 2 + tokens * layers[layer].chosen
        if end > len(numbers):
            return
        experts = numbers[at + 2 : end].astype(np.int32).reshape(tokens, layers[layer].chosen)
        yield layer, np.where(experts == NONE, -1, experts)
        at = end

"""Experts in the order of the kernels, kept on disk for the next start (experts.keep_packed).

A file has a layer's weights as they lie in memory, what belongs to them beside their rows, and at
its end a description with the key that it is valid for, the size and a digest of each part.  A file
that does not fit is said to, and its layer is packed again.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import json
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from placement.model.checkpoint import StoredTensor
from ray_hetero.compat.cpu_site import installed_version
from ray_hetero.errors import UnsupportedError
from ray_hetero.kernels.experts.expert_room import MakeRoom, Room, in_lines
from ray_hetero.kernels.experts.file_experts import FileReader, Made
from ray_hetero.kernels.experts.routed_experts import RoutedExperts
from ray_hetero.kernels.formats import (
    FORMATS,
    SCALED_FORMATS,
    CompactWeight,
    HostWeight,
    PackedWeight,
    ScaledWeight,
)
from ray_hetero.kernels.formats.compact import BF16_BYTES
from ray_hetero.kernels.formats.scaled import Codes, layout_of
from ray_hetero.kernels.linear.streaming_linear import StreamingLinear
from ray_hetero.log import logger
from ray_hetero.worker.expert_rows import Key, Share
from ray_hetero.worker.kept_writer import ENDING, PART, KeptWriter, parts_of
from ray_hetero.world import ExpertSource

SAMPLES = 16
"""Places of a layer's tensors that are looked at to tell two checkpoints apart."""
SAMPLE_BYTES = 4096
_MARK = b"rayhet1\n"
_TAIL = len(_MARK) + 8 + hashlib.sha256().digest_size
"""Bytes behind the description: its length, its digest and the mark."""
_MOST_DESCRIPTION = 64 << 20
_OTHER = (ValueError, LookupError, TypeError, AttributeError, UnsupportedError)
"""Errors of reading a description that another program has written."""
_FORMATS: dict[str, type[HostWeight]] = {**FORMATS, **SCALED_FORMATS}


class _UnfitError(Exception):
    """A kept file is not what is asked for; the message says why."""


@dataclass(frozen=True)
class _Kept:
    """A file that fits as far as its description goes."""

    path: Path
    descriptor: int
    halves: tuple[int, int]
    beside: int
    """Bytes of what belongs to weights beside their rows."""
    weights: list[list[dict[str, Any]]]
    digests: list[str]


class KeptExperts:
    """The folder of an expert rank.

    Args:
        folder: experts.keep_packed.
        source: the checkpoint.
        share: of this rank.
        kernel: computes the experts.
        weights: name of the format of weights that the checkpoint holds in bf16.
        opened: descriptor of a file of the checkpoint, the one that is read.
        limit_s: startup.load_timeout_s; the last tenth of it is left for all else.

    """

    def __init__(
        self, folder: str, source: ExpertSource, share: Share, kernel: StreamingLinear,
        weights: str, opened: Callable[[Path], int], limit_s: float,
    ) -> None:  # fmt: skip
        name = Path(source.model).name
        model = hashlib.sha256(source.model.encode()).hexdigest()[:8]
        self.folder = Path(folder).expanduser() / f"{name}-{model}"
        # Hosts that share a folder may have other processors.
        self.folder /= f"slice-{share.number + 1}-of-{share.ranks}-{kernel.level.name}"
        self._native = kernel.native
        self._common = {
            "release": installed_version("ray-hetero") or "",
            "slice": f"{share.number + 1} of {share.ranks}",
            "level": str(kernel.level.name),
            "format": source.tensors.scheme or weights,
            # What config.json says, whose weights may be the same.
            "form": f"{source.tensors.names.activation} {source.tensors.block}",
        }
        self._opened = opened
        self._begun: dict[str, dict[str, str]] = {}
        """Key of each layer when it began to be read."""
        self._said: set[str] = set()
        until = time.monotonic() + 0.9 * limit_s
        limit = f"nine tenths of startup.load_timeout_s ({limit_s:g} s)"
        self._writer = KeptWriter(self.folder, until, limit)

    def path(self, layer: str) -> Path:
        """File of a layer."""
        return self.folder / f"{layer}{ENDING}"

    def begin(
        self, layer: str, tensors: Mapping[Key, StoredTensor], reader: FileReader,
        make_room: MakeRoom, count_bytes: Callable[[int], None],
    ) -> Callable[[], tuple[Room, Made] | None] | None:  # fmt: skip
        """Begin to read a layer.

        Args:
            layer: vLLM's name.
            tensors: that it was made of.
            reader: has the threads.
            make_room: makes the memory.
            count_bytes: is told in any thread how many bytes were read.

        Returns:
            What waits until it is there, and gives None if it is damaged; None if no file fits.

        """
        path = self.path(layer)
        self._begun[layer] = key = self._key(tensors)
        try:
            kept = self._described(path, key)
        except FileNotFoundError:
            return None
        except (_UnfitError, OSError) as error:
            self._say(path, _why(error))
            return None
        room = make_room(kept.halves)
        room.expect(kept.halves)
        for half, size in enumerate(kept.halves):
            room.provide(half, size, reader.submit)
        beside = torch.empty(kept.beside, dtype=torch.uint8)
        places = [
            [room.taken(weight["bytes"], half) for half, weight in enumerate(pair)]
            for pair in kept.weights
        ]
        parts = parts_of(room.half(0), room.half(1), beside)
        tasks = [
            reader.submit(_read, kept, begin, part, kept.digests[number], room, count_bytes)
            for number, (begin, part) in enumerate(parts)
        ]

        def wait() -> tuple[Room, Made] | None:
            # The file stays open until nobody reads it.
            futures.wait(tasks)
            try:
                if all(task.result() for task in tasks):
                    return room, self._made(kept.weights, places, beside)
                self._say(path, "a digest is not that of its bytes")
            except OSError as error:
                self._say(path, _why(error))
            except _OTHER as error:
                self._say(path, f"its description is of another kind ({error!r})")
            finally:
                os.close(kept.descriptor)
            return None

        return wait

    def _described(self, path: Path, key: Mapping[str, str]) -> _Kept:
        """Open a file that fits.

        Raises:
            _UnfitError: it does not.
            OSError: it cannot be read, or is not there.

        """
        # Nobody waits for what another process would write into a pipe.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            about, data = description(descriptor)
            for name, value in key.items():
                if about["key"].get(name) != value:
                    values = f" ({about['key'].get(name)}, expected {value})"
                    # A checkpoint's is a digest, another one for each layer.
                    raise _UnfitError(
                        f"it is of another {name}{'' if name == 'checkpoint' else values}"
                    )
            left, right = about["halves"]
            sizes = [
                sum(in_lines(pair[half]["bytes"]) for pair in about["weights"]) for half in (0, 1)
            ]
            if [left, right] != sizes or data != left + right + about["beside"]:
                raise _UnfitError(
                    f"it has {data} bytes of weights, expected {sum(sizes) + about['beside']}"
                )
            if len(about["digests"]) != sum(
                -(-size // PART) for size in (left, right, about["beside"])
            ):
                raise _UnfitError("digests are missing")
            return _Kept(
                path, descriptor, (left, right), about["beside"], about["weights"],
                about["digests"],
            )  # fmt: skip
        except _OTHER as error:
            os.close(descriptor)
            raise _UnfitError(f"its description is of another kind ({error!r})") from None
        except BaseException:
            os.close(descriptor)
            raise

    def _key(self, tensors: Mapping[Key, StoredTensor]) -> dict[str, str]:
        """All that a layer's file depends on, by name."""
        # Of the files that are read, whatever their names stand for by now.
        files = {one.file: os.fstat(self._opened(one.file)) for one in tensors.values()}
        said = [
            sorted((path.name, of.st_size, of.st_mtime_ns) for path, of in files.items()),
            sorted((one.name, one.dtype, one.shape, one.offset) for one in tensors.values()),
            # Images of containers have files of one time, whatever is in them.
            [sample.hex() for sample in self._samples(list(tensors.values()))],
        ]
        checkpoint = hashlib.sha256(json.dumps(said).encode()).hexdigest()[:16]
        return self._common | {"checkpoint": checkpoint}

    def _samples(self, tensors: list[StoredTensor]) -> Iterator[bytes]:
        """Some bytes of a layer's tensors, from places that are as far from each other."""
        tensors.sort(key=lambda one: one.name)
        ends = list(itertools.accumulate(one.nbytes for one in tensors))
        for number in range(SAMPLES):
            place = ends[-1] * number // SAMPLES + ends[-1] // (2 * SAMPLES)
            one = tensors[found := bisect.bisect_right(ends, place)]
            at = one.offset + place - (ends[found] - one.nbytes)
            yield os.pread(self._opened(one.file), SAMPLE_BYTES, at)

    def _say(self, path: Path, why: str) -> None:
        """Say once why files do not fit."""
        if why not in self._said:
            self._said.add(why)
            logger.warning("experts.keep_packed: experts are packed again: %s: %s", path, why)

    def _made(
        self, weights: Iterable[list[dict[str, Any]]], places: list[list[torch.Tensor]],
        beside: torch.Tensor,
    ) -> Made:  # fmt: skip
        """Weights in memory that has their bytes.

        Raises:
            ValueError: something is not what was written.

        """
        made, at = [], 0
        for pair, both in zip(weights, places, strict=True):
            found = []
            for about, place in zip(pair, both, strict=True):
                end = at + about["beside"]
                found.append(self._weight(about, place, beside[at:end]))
                at = end
            made.append((found[0], found[1]))
        return made

    def _weight(
        self, about: Mapping[str, Any], place: torch.Tensor, beside: torch.Tensor
    ) -> HostWeight:
        kind, (outputs, inputs) = _FORMATS[about["format"]], about["shape"]
        if issubclass(kind, ScaledWeight):
            layout = layout_of(about["facts"])
            codes = torch.empty((outputs, inputs), dtype=torch.uint8, device="meta")
            groups = -(-inputs // layout.group)
            scales = torch.empty((outputs, groups), dtype=layout.scales, device="meta")
            found = Codes(codes, scales, layout.group, factor=layout.factor)
            if found.layout != layout:
                raise ValueError(
                    f"{kind.name}: its scales are of another kind than those read here"
                )
            _check_size(kind.nbytes_of(found, self._native), place)
            return kind.in_place(found, place, self._native)
        if kind is CompactWeight:
            _check_size(outputs * inputs * BF16_BYTES * 3 // 4, place)
            encoding = self._native.Compact.restored(outputs, inputs, beside.numpy().tobytes())
            return CompactWeight(place.view(outputs, -1), encoding)
        _check_size(outputs * inputs * BF16_BYTES, place)
        packed = place.view(torch.bfloat16).view(outputs, inputs)
        return PackedWeight.made(packed, self._native)

    def keep(self, layer: str, tensors: Mapping[Key, StoredTensor], experts: RoutedExperts) -> None:
        """Write a layer behind others, in a thread; not of files that were written meanwhile."""
        if self._writer.has_failed:
            return
        key = self._key(tensors)
        if key != self._begun[layer]:
            self._writer.give_up("files of the checkpoint have changed while they were read")
            return
        about, beside = _about(key, experts)
        halves = [experts.room.half(half) for half in (0, 1)]
        self._writer.add(self.path(layer), [*halves, beside], lambda one: file_end(about, one))

    def finish(self, *, is_wanted: bool) -> None:
        """Wait until all is written, and say so; see `KeptWriter.finish`."""
        self._writer.finish(is_wanted=is_wanted)


def _check_size(expected: int, place: torch.Tensor) -> None:
    """Raise if a weight does not take the bytes that a description says.

    Raises:
        ValueError: it does not.

    """
    if len(place) != expected:
        raise ValueError(f"a weight has {len(place)} bytes, expected {expected}")


def _why(error: Exception) -> str:
    """Text of an error without the path, which is said beside it."""
    return (isinstance(error, OSError) and error.strerror) or str(error)


def _read(
    kept: _Kept, begin: int, part: torch.Tensor, digest: str, room: Room,
    count_bytes: Callable[[int], None],
) -> bool:  # fmt: skip
    """Read a part; whether its digest is right."""
    room.wait(part)
    view = memoryview(part.numpy())
    while view:
        if not (got := os.preadv(kept.descriptor, [view], begin)):
            return False
        view, begin = view[got:], begin + got
    count_bytes(len(part))
    return hashlib.sha256(part.numpy()).hexdigest() == digest


def description(descriptor: int) -> tuple[dict[str, Any], int]:
    """Description at the end of a file, and bytes before it.

    Raises:
        _UnfitError: there is none.
        OSError: it cannot be read.

    """
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        raise _UnfitError("it is no file")
    size = found.st_size
    tail = os.pread(descriptor, _TAIL, max(0, size - _TAIL))
    length = int.from_bytes(tail[:8], "little")
    if tail[-len(_MARK) :] != _MARK or length > min(size - _TAIL, _MOST_DESCRIPTION):
        raise _UnfitError("it is not whole, or not of this release")
    begin = size - _TAIL - length
    text = os.pread(descriptor, length, begin)
    if hashlib.sha256(text).digest() != tail[8 : -len(_MARK)]:
        raise _UnfitError("the digest of its description is not that of its bytes")
    about: dict[str, Any] = json.loads(text)
    return about, begin


def _about(key: Mapping[str, str], experts: RoutedExperts) -> tuple[dict[str, Any], torch.Tensor]:
    """Description of a layer without digests, and what belongs to weights beside their rows."""
    room, beside, weights = experts.room, bytearray(), []
    for expert in experts.weights:
        pair = []
        for weight in expert:
            more = weight.encoding.kept() if isinstance(weight, CompactWeight) else b""
            beside += more
            pair.append({
                "format": weight.name, "shape": weight.shape, "bytes": weight.data.nbytes,
                "facts": weight.facts, "beside": len(more),
            })  # fmt: skip
        weights.append(pair)
    about = {
        "key": key, "halves": [len(room.half(half)) for half in (0, 1)], "beside": len(beside),
        "weights": weights,
    }  # fmt: skip
    return about, torch.frombuffer(beside + b" ", dtype=torch.uint8)[:-1]


def file_end(about: Mapping[str, Any], digests: list[str]) -> bytes:
    """Description at the end of a file, and what tells where it begins."""
    text = json.dumps({**about, "digests": digests}).encode()
    return text + len(text).to_bytes(8, "little") + hashlib.sha256(text).digest() + _MARK

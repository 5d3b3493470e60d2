"""Experts in the order of the kernels, kept on disk for the next start (experts.keep_packed).

A file has a layer's weights as they lie in memory, what belongs to them beside their rows, and at
its end a description with the key that it is valid for, the size and a digest of each part.  A file
that does not fit is said to, and its layer is packed again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from placement.model.checkpoint import StoredTensor
from placement.units import GIB
from ray_hetero.compat.cpu_site import installed_version
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
from ray_hetero.kernels.formats.scaled import Codes, layout_of
from ray_hetero.kernels.linear.streaming_linear import StreamingLinear
from ray_hetero.log import logger
from ray_hetero.worker.expert_rows import Key, Share
from ray_hetero.world import ExpertSource

PART = 16 << 20
"""Bytes that have a digest, and are read or written in one go."""
ENDING = ".packed"
WRITERS = 4
"""Threads that write."""
_MARK = b"rayhet1\n"
_TAIL = len(_MARK) + 8 + hashlib.sha256().digest_size
"""Bytes behind the description: its length, its digest and the mark."""
_MOST_DESCRIPTION = 64 << 20
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

    """

    def __init__(
        self, folder: str, source: ExpertSource, share: Share, kernel: StreamingLinear,
        weights: str, opened: Callable[[Path], int],
    ) -> None:  # fmt: skip
        name = Path(source.model).name
        model = hashlib.sha256(source.model.encode()).hexdigest()[:8]
        self.folder = Path(folder).expanduser() / f"{name}-{model}"
        self.folder /= f"slice-{share.number + 1}-of-{share.ranks}"
        self._native = kernel.native
        self._common = {
            "release": installed_version("ray-hetero") or "",
            "slice": f"{share.number + 1} of {share.ranks}",
            "level": str(kernel.level.name),
            "format": source.tensors.scheme or weights,
        }
        self._opened = opened
        self._begun: dict[str, dict[str, str]] = {}
        """Key of each layer when it began to be read."""
        self._said: set[str] = set()
        self._writer: ThreadPoolExecutor | None = None
        self._tasks: list[futures.Future[None]] = []
        self._failed = threading.Event()
        self._written = 0

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
        parts = _parts(room.half(0), room.half(1), beside)
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
            except (ValueError, OSError) as error:
                self._say(path, _why(error))
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
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            about, data = _description(descriptor)
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
        ]
        checkpoint = hashlib.sha256(json.dumps(said).encode()).hexdigest()[:16]
        return self._common | {"checkpoint": checkpoint}

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
            return kind.in_place(found, place, self._native)
        if kind is CompactWeight:
            encoding = self._native.Compact.restored(outputs, inputs, beside.numpy().tobytes())
            return CompactWeight(place.view(outputs, -1), encoding)
        packed = place.view(torch.bfloat16).view(outputs, inputs)
        return PackedWeight.made(packed, self._native)

    def keep(self, layer: str, tensors: Mapping[Key, StoredTensor], experts: RoutedExperts) -> None:
        """Write a layer behind others, in a thread; not of files that were written meanwhile."""
        if self._failed.is_set():
            return
        key = self._key(tensors)
        if key != self._begun[layer]:
            self._failed.set()
            logger.warning(
                "experts.keep_packed: the packed experts are not kept in %s: files of the "
                "checkpoint have changed while they were read", self.folder,
            )  # fmt: skip
            return
        if self._writer is None:
            self._writer = ThreadPoolExecutor(1, "ray_hetero-keep")
        self._tasks.append(self._writer.submit(self._keep, layer, key, experts))

    def finish(self) -> None:
        """Wait until all is written, and say so."""
        if self._writer is None:
            return
        self._writer.shutdown()
        for task in self._tasks:
            task.result()
        if self._written:
            logger.info(
                "experts.keep_packed: %.1f GiB of packed experts are kept in %s",
                self._written / GIB,
                self.folder,
            )

    def _keep(self, layer: str, key: dict[str, str], experts: RoutedExperts) -> None:
        if self._failed.is_set():
            return
        try:
            if not self._written:
                self.folder.mkdir(parents=True, exist_ok=True)
                _remove_leftovers(self.folder)
            self._written += _write(self.path(layer), key, experts)
        except OSError as error:
            # Without it the engine runs as well.
            self._failed.set()
            logger.warning(
                "experts.keep_packed: the packed experts are not kept in %s: %s",
                self.folder, _why(error),
            )  # fmt: skip


def _why(error: Exception) -> str:
    """Text of an error without the path, which is said beside it."""
    return (isinstance(error, OSError) and error.strerror) or str(error)


def _parts(*tensors: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Parts of what lies one behind the other in a file, with their places there."""
    begin = 0
    for tensor in tensors:
        for at in range(0, len(tensor), PART):
            yield begin + at, tensor[at : at + PART]
        begin += len(tensor)


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


def _description(descriptor: int) -> tuple[dict[str, Any], int]:
    """Description at the end of a file, and bytes before it.

    Raises:
        _UnfitError: there is none.
        OSError: it cannot be read.

    """
    size = os.fstat(descriptor).st_size
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


def _write(path: Path, key: Mapping[str, str], experts: RoutedExperts) -> int:
    """Write a file under another name, and give it its own once it is on the disk.

    Returns:
        Bytes of it.

    Raises:
        OSError: it cannot be written; nothing is left of it.

    """
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
    halves = room.half(0), room.half(1)
    end = len(halves[0]) + len(halves[1]) + len(beside)
    about = {
        "key": key, "halves": [len(half) for half in halves], "beside": len(beside),
        "weights": weights,
    }  # fmt: skip
    other = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    descriptor = os.open(other, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        # A disk that has not this much room says so here.
        os.posix_fallocate(descriptor, 0, end)
        more = torch.frombuffer(beside + b" ", dtype=torch.uint8)[:-1]
        all_parts = _parts(*halves, more)
        with ThreadPoolExecutor(WRITERS) as pool:
            digests = list(pool.map(lambda part: _put(descriptor, *part), all_parts))
        text = json.dumps({**about, "digests": digests}).encode()
        tail = len(text).to_bytes(8, "little") + hashlib.sha256(text).digest() + _MARK
        _write_fully(descriptor, memoryview(text + tail), end)
        os.fsync(descriptor)
        os.replace(other, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            other.unlink()
        raise
    finally:
        os.close(descriptor)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
    return end + len(text) + len(tail)


def _put(descriptor: int, begin: int, part: torch.Tensor) -> str:
    """Write a part, and give its digest."""
    content = part.numpy()
    _write_fully(descriptor, memoryview(content), begin)
    return hashlib.sha256(content).hexdigest()


def _write_fully(descriptor: int, view: memoryview, begin: int) -> None:
    while view:
        written = os.pwrite(descriptor, view, begin)
        view, begin = view[written:], begin + written


def _remove_leftovers(folder: Path) -> None:
    """Remove what processes that are gone have begun to write."""
    for path in folder.glob(f"*{ENDING}.*.tmp"):
        process = path.suffixes[-2][1:]
        if process.isdigit() and not Path("/proc", process).exists():
            with contextlib.suppress(FileNotFoundError):
                path.unlink()

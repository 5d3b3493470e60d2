"""Weights of experts, read from a checkpoint's files by all cores at once to where they stay.

Native code reads some rows at a time into a buffer that fits a core's cache, and writes them from
there in the order of the kernels (csrc/kernels/load.h): memory sees each byte once in each
direction.  This module needs PyTorch and the native module, not vLLM.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeVar

import torch

from ray_hetero.errors import UnsupportedError
from ray_hetero.kernels.experts.activations import Order
from ray_hetero.kernels.experts.expert_room import MakeRoom, Room, in_lines
from ray_hetero.kernels.experts.routed_experts import MULTIPLE, paired
from ray_hetero.kernels.formats import CompactWeight, HostWeight, PackedWeight
from ray_hetero.kernels.formats.base import BLOCK
from ray_hetero.kernels.formats.compact import BF16_BYTES
from ray_hetero.kernels.formats.scaled import LARGEST_SCALE, Codes, ScaledWeight

READERS = 8
"""Least number of threads that read: disks answer several at once faster than one."""
PIECE = 16 << 20
"""Bytes that a thread reads in one go, about."""
SCRATCH = 4 << 30
"""Most bytes of weights that are packed on their way to the compact format at the same time."""

Result = TypeVar("Result")
Made = list[tuple[HostWeight, HostWeight]]
"""Gate and up in one, and down, of each expert."""


@dataclass(frozen=True)
class Rows:
    """Rows of a matrix in a file, or of a part of its columns."""

    descriptor: int
    """Descriptor of the open file."""
    offset: int
    """Bytes of the file before the first row."""
    stride: int
    """Bytes from a row to the next one."""
    count: int

    @property
    def native(self) -> tuple[int, int, int, int]:
        """Arguments of the native module."""
        return self.descriptor, self.offset, self.stride, self.count


@dataclass(frozen=True)
class FileWeight:
    """A weight [N, K] of an expert in files: gate and up, one behind the other, or down."""

    codes: tuple[Rows, ...]
    """Rows of codes or of bf16."""
    inputs: int
    """K."""
    scales: tuple[Rows, ...] = ()
    """Rows of scales; none where weights are bf16."""
    stored_scales: torch.dtype | None = None
    """Type of the scales in the files."""
    group: int = 0
    """Inputs that share a scale."""
    outputs_per_scale: int = 1
    """Outputs that share a row of scales."""
    is_widened: bool = False
    """Whether scales in bf16 become float32."""

    @property
    def outputs(self) -> int:
        """N."""
        return sum(rows.count for rows in self.codes)

    @property
    def bf16_bytes(self) -> int:
        """Bytes of the weight in bf16."""
        return BF16_BYTES * self.outputs * self.inputs

    @property
    def groups(self) -> int:
        """Groups of an output."""
        return -(-self.inputs // self.group) if self.group else 0

    @property
    def codes_alone(self) -> Codes:
        """The weight as formats know it, without memory."""
        dtype = torch.float32 if self.is_widened else self.stored_scales
        scales = torch.empty((self.outputs, self.groups), dtype=dtype, device="meta")
        codes = torch.empty((self.outputs, self.inputs), dtype=torch.uint8, device="meta")
        return Codes(codes, scales, self.group)

    def suits(self, bits: int) -> bool:
        """Whether native code can read it: nothing has to be filled up."""
        return (
            self.outputs % BLOCK == 0
            and self.inputs % MULTIPLE == 0
            and all(rows.stride >= self.inputs * bits // 8 for rows in self.codes)
            and all(
                rows.count == scales.count * self.outputs_per_scale
                for rows, scales in zip(self.codes, self.scales, strict=bool(self.scales))
            )
        )


class FileReader:
    """Threads that read the weights of a rank.

    Args:
        native: the module of the kernels.
        threads: of the rank.
        count_bytes: is told in any thread how many bytes of files were read.

    """

    def __init__(
        self, native: ModuleType, threads: int, count_bytes: Callable[[int], None]
    ) -> None:
        self._native = native
        self._threads = max(READERS, threads)
        self._count_bytes = count_bytes
        self._pool: ThreadPoolExecutor | None = None
        self._scratch = threading.local()

    def close(self) -> None:
        """Read nothing that has not begun, and wait for what has."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def begin(
        self,
        weights: Sequence[tuple[FileWeight, FileWeight]],
        kind: type[HostWeight],
        order: Order,
        make_room: MakeRoom,
    ) -> Callable[[], tuple[Room, Made]]:
        """Begin to read a layer's experts.

        Args:
            weights: gate and up, and down, of each expert; all of one size.
            kind: format of the weights.
            order: of the outputs of gate and up.
            make_room: makes the memory.

        Returns:
            What waits until they are there, and gives them with their memory.  It raises
            UnsupportedError, OSError or EOFError.

        Raises:
            UnsupportedError: a shape that the kernels do not compute.

        """
        halves = weights[0]
        orders = paired(torch.arange(halves[0].outputs), order), torch.arange(halves[1].outputs)
        if kind is CompactWeight:
            return self._begin_compact(weights, orders, make_room)
        return self._begin_in_place(weights, kind, orders, make_room)

    def submit(self, function: Callable[..., Result], *args: Any) -> Future[Result]:
        """Let a thread call a function."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads, "ray_hetero-read")
        return self._pool.submit(function, *args)

    def _begin_in_place(
        self, weights: Sequence[tuple[FileWeight, FileWeight]], kind: type[HostWeight],
        orders: tuple[torch.Tensor, torch.Tensor], make_room: MakeRoom,
    ) -> Callable[[], tuple[Room, Made]]:  # fmt: skip
        """Begin to read weights of a format whose sizes are known beforehand."""
        scaled = kind if issubclass(kind, ScaledWeight) else None
        codes = [half.codes_alone for half in weights[0]]
        sizes = [
            half.bf16_bytes if scaled is None else scaled.nbytes_of(one, self._native)
            for half, one in zip(weights[0], codes, strict=True)
        ]
        room = _room_for(sizes, len(weights), make_room)
        made, tasks = [], []
        for number, pair in enumerate(weights):
            both: list[HostWeight] = []
            self._provide(room, number, sizes)
            for half, weight in enumerate(pair):
                place = room.taken(sizes[half], half)
                both.append(
                    self._packed(weight, place)
                    if scaled is None
                    else scaled.in_place(codes[half], place, self._native)
                )
                tasks.append(self._pieces(weight, kind, orders[half], room, place))
            made.append((both[0], both[1]))

        def wait() -> tuple[Room, Made]:
            for number, pieces in enumerate(tasks):
                wrong = [sum(some) for some in zip(*(one.result() for one in pieces), strict=True)]
                if scaled is None:
                    continue
                one = codes[number % 2]
                try:
                    scaled.check_values(wrong[0], one.scales.numel(), wrong[1], one.codes.numel())
                except UnsupportedError as error:
                    raise UnsupportedError(f"expert {number // 2}: {error}") from None
            return room, list(made)

        return wait

    def _begin_compact(
        self, weights: Sequence[tuple[FileWeight, FileWeight]],
        orders: tuple[torch.Tensor, torch.Tensor], make_room: MakeRoom,
    ) -> Callable[[], tuple[Room, Made]]:  # fmt: skip
        sizes = [half.bf16_bytes for half in weights[0]]
        if self._pool is None:
            self._threads = max(1, min(self._threads, SCRATCH // max(sizes)))
        count = len(weights)
        room = make_room((count * in_lines(sizes[0]), count * in_lines(sizes[1])))
        # What turns out not to suit the format takes more.
        left, right = (count * in_lines(size * 3 // 4) for size in sizes)
        room.expect((left, right))
        turns, tasks = _Turns(), []
        for number, pair in enumerate(weights):
            self._provide(room, number, [size * 3 // 4 for size in sizes])
            tasks += [
                self.submit(
                    self._compact, weight, orders[half], sizes[half], turns, 2 * number + half,
                    room, half,
                )
                for half, weight in enumerate(pair)
            ]  # fmt: skip

        def wait() -> tuple[Room, Made]:
            done = [task.result() for task in tasks]
            return room, list(zip(done[::2], done[1::2], strict=True))

        return wait

    def _compact(
        self, weight: FileWeight, order: torch.Tensor, nbytes: int, turns: _Turns, turn: int,
        room: Room, half: int,
    ) -> HostWeight:  # fmt: skip
        """A weight in the compact format, or packed if that does not suit it.

        Args:
            weight: in files.
            order: of its outputs.
            nbytes: of the weight in bf16.
            turns: of all weights of its layer, in which they take memory.
            turn: of this one.
            room: memory of the layer.
            half: of the room.

        """
        with turns.at_last(turn):
            if len(getattr(self._scratch, "memory", ())) < nbytes:
                self._scratch.memory = torch.empty(nbytes, dtype=torch.uint8)
            scratch = self._scratch.memory[:nbytes]
            self._read(weight, PackedWeight, order.tolist(), scratch)
            at, shape = scratch.data_ptr(), (weight.outputs, weight.inputs)
            encoding = self._native.Compact.chosen(at, *shape)
            size = nbytes if encoding is None else nbytes * 3 // 4
            place = turns.take(turn, lambda: room.taken(size, half))
        room.wait(place)
        if encoding is None:
            # Not by torch, whose threads belong to the main thread.
            place.numpy()[:] = scratch.numpy()
            return self._packed(weight, place)
        encoding.write(at, place.data_ptr())
        return CompactWeight(place.view(weight.outputs, -1), encoding)

    def _packed(self, weight: FileWeight, place: torch.Tensor) -> PackedWeight:
        packed = place.view(torch.bfloat16).view(weight.outputs, weight.inputs)
        return PackedWeight.made(packed, self._native)

    def _pieces(
        self, weight: FileWeight, kind: type[HostWeight], order: torch.Tensor, room: Room,
        place: torch.Tensor,
    ) -> list[Future[tuple[int, int]]]:  # fmt: skip
        """Read a weight in pieces; each gives what `_read` does."""
        blocks = weight.outputs // BLOCK
        block_bytes = len(place) // blocks
        at_once = max(1, PIECE // block_bytes)
        outputs = order.tolist()
        return [
            self.submit(
                self._read_into, room, weight, kind,
                outputs[first * BLOCK : (first + at_once) * BLOCK],
                place[first * block_bytes : (first + at_once) * block_bytes],
            )
            for first in range(0, blocks, at_once)
        ]  # fmt: skip

    def _provide(self, room: Room, number: int, sizes: Sequence[int]) -> None:
        """Let threads make memory for an expert, and for some that follow, before it is read."""
        for half, size in enumerate(sizes):
            room.provide(half, (number + 1) * in_lines(size), self.submit)

    def _read_into(
        self, room: Room, weight: FileWeight, kind: type[HostWeight], outputs: list[int],
        place: torch.Tensor,
    ) -> tuple[int, int]:  # fmt: skip
        """Read into a place of a room; see `_read`."""
        room.wait(place)
        return self._read(weight, kind, outputs, place)

    def _read(
        self, weight: FileWeight, kind: type[HostWeight], outputs: list[int], place: torch.Tensor
    ) -> tuple[int, int]:
        """Read the rows of some outputs.

        Returns:
            How many scales, and how many codes, are none that a weight can have.

        Raises:
            OSError: a file cannot be read.
            EOFError: a file is shorter than its header says.

        """
        bits, no_number = 8 * BF16_BYTES, 0
        if issubclass(kind, ScaledWeight):
            bits, no_number = kind.bits, kind.no_number
        stored = weight.stored_scales
        name = "none" if stored is None else str(stored).removeprefix("torch.")
        try:
            wrong: tuple[int, int] = self._native.load(
                codes=[rows.native for rows in weight.codes],
                scales=[rows.native for rows in weight.scales],
                scale=name, outputs_per_scale=weight.outputs_per_scale,
                is_widened=weight.is_widened, largest_scale=LARGEST_SCALE, no_number=no_number,
                inputs=weight.inputs, groups=weight.groups, bits=bits, outputs=outputs,
                block_bytes=place.nbytes // (len(outputs) // BLOCK), to=place.data_ptr(),
            )  # fmt: skip
        except OSError as error:
            raise OSError(error.errno, error.strerror, _names_of(weight)) from None
        except EOFError:
            raise EOFError(f"{_names_of(weight)}: it ends before its header says") from None
        scale_bytes = 0 if stored is None else weight.groups * stored.itemsize
        count = len(outputs)
        self._count_bytes(
            count * weight.inputs * bits // 8 + count * scale_bytes // weight.outputs_per_scale
        )
        return wrong


def _room_for(sizes: Sequence[int], count: int, make_room: MakeRoom) -> Room:
    """Memory that so many weights of these sizes fill."""
    taken = count * in_lines(sizes[0]), count * in_lines(sizes[1])
    room = make_room(taken)
    room.expect(taken)
    return room


def _names_of(weight: FileWeight) -> str:
    """Names of the files of a weight, for errors."""
    found = {rows.descriptor for rows in (*weight.codes, *weight.scales)}
    return ", ".join(os.readlink(f"/proc/self/fd/{one}") for one in sorted(found))


class _Turns:
    """Order in which threads take memory, whoever of them comes first."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._next = 0
        self._taken: set[int] = set()

    def take(self, turn: int, action: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Wait for a turn, from 0 on, and do something before the next one."""
        with self._changed:
            self._changed.wait_for(lambda: self._next == turn)
            return action()

    @contextmanager
    def at_last(self, turn: int) -> Iterator[None]:
        """Let the next ones go on behind a block, whether it took its turn or failed before."""
        try:
            yield
        finally:
            with self._changed:
                self._taken.add(turn)
                while self._next in self._taken:
                    self._taken.remove(self._next)
                    self._next += 1
                self._changed.notify_all()

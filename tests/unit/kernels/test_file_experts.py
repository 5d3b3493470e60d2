"""Experts that native code reads from files are those that torch brings into the same order."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from native_module import native as NATIVE  # noqa: E402, N812
from native_module import needs_native  # noqa: E402

from ray_hetero.compat.models.quantised_experts import StoredExperts  # noqa: E402
from ray_hetero.errors import UnsupportedError  # noqa: E402
from ray_hetero.kernels.experts.activations import SILU, Order  # noqa: E402
from ray_hetero.kernels.experts.expert_matrices import ExpertMatrices  # noqa: E402
from ray_hetero.kernels.experts.expert_room import MakeRoom, Room, SharedRoom  # noqa: E402
from ray_hetero.kernels.experts.file_experts import FileReader, FileWeight, Rows  # noqa: E402
from ray_hetero.kernels.experts.quantised_experts import KINDS, held  # noqa: E402
from ray_hetero.kernels.experts.routed_experts import RoutedExperts  # noqa: E402
from ray_hetero.kernels.formats import FORMATS, CompactWeight, PackedWeight  # noqa: E402
from ray_hetero.runtime.shared_pages import STEP  # noqa: E402

EXPERTS, HIDDEN, INNER, BLOCK = 3, 96, 64, 32
E8M0 = torch.float8_e8m0fnu


class File:
    """A file that tensors are written into, one behind the other."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w+b")
        self._file.write(b"header!")
        self.read = 0

    def add(self, tensor: torch.Tensor) -> Rows:
        """Write a matrix."""
        offset = self._file.tell()
        content = tensor.contiguous().view(torch.uint8).numpy().tobytes()
        self._file.write(content)
        self._file.flush()
        return Rows(self._file.fileno(), offset, len(content) // len(tensor), len(tensor))

    def cut(self) -> None:
        """Take the last byte away."""
        self._file.truncate(self._file.tell() - 1)

    def count(self, nbytes: int) -> None:
        """Count what was read."""
        self.read += nbytes


@pytest.fixture
def file(tmp_path: Path) -> File:
    torch.manual_seed(0)
    return File(tmp_path / "weights")


@contextmanager
def reader(file: File) -> Iterator[FileReader]:
    made = FileReader(NATIVE, 2, file.count)
    try:
        yield made
    finally:
        made.close()


def codes(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def scales(scheme: str, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    if dtype == E8M0:
        return (codes(*shape) % 100 + 20).view(E8M0)
    return torch.rand(shape).to(dtype)


def stored(scheme: str, dtype: torch.dtype) -> StoredExperts:
    """Random tensors as checkpoints have them."""
    weights = (EXPERTS, 2 * INNER, HIDDEN), (EXPERTS, HIDDEN, INNER)
    if scheme == "fp8":
        both = [(codes(*shape) & 0xF7).view(torch.float8_e4m3fn) for shape in weights]
        blocks = [(EXPERTS, n // BLOCK, k // BLOCK) for _, n, k in weights]
        return StoredExperts(
            scheme, *both, *(scales(scheme, dtype, *one) for one in blocks), block=(BLOCK, BLOCK)
        )
    both = [codes(count, n, k // 2) for count, n, k in weights]
    if scheme == "int4":
        both = [one.view(torch.int32) for one in both]
    by_group = [scales(scheme, dtype, count, n, k // 32) for count, n, k in weights]
    return StoredExperts(scheme, *both, *by_group)


def in_file(file: File, given: StoredExperts, order: Order) -> list[tuple[FileWeight, FileWeight]]:
    """A stored weight in a file: gate and up apart, unless they take turns."""
    per, parts = (BLOCK, 2) if given.scheme == "fp8" else (1, 2)
    parts = 1 if order is Order.TURNS else parts

    def weight(code: torch.Tensor, scale: torch.Tensor, parts: int, inputs: int) -> FileWeight:
        return FileWeight(
            tuple(file.add(one) for one in code.chunk(parts)), inputs,
            tuple(file.add(one) for one in scale.chunk(parts)), scale.dtype, 32, per,
            is_widened=given.scheme == "fp8" and scale.dtype == torch.bfloat16,
        )  # fmt: skip

    return [
        (
            weight(given.w13[one], given.w13_scale[one], parts, HIDDEN),
            weight(given.w2[one], given.w2_scale[one], 1, INNER),
        )
        for one in range(EXPERTS)
    ]


def assert_same(mine: Any, theirs: Any) -> None:
    assert len(mine) == len(theirs) == EXPERTS
    for ours, others in zip(mine, theirs, strict=True):
        for one, other in zip(ours, others, strict=True):
            assert type(one) is type(other)
            assert torch.equal(one.data, other.data)
            assert (one.shape, one.facts) == (other.shape, other.facts)
            assert one.data.data_ptr() % 64 == 0


@needs_native
@pytest.mark.parametrize("room", [Room, SharedRoom])
@pytest.mark.parametrize("order", [Order.HALVES, Order.TURNS])
@pytest.mark.parametrize(
    ("scheme", "dtype"),
    [
        ("mxfp4", E8M0), ("fp8", torch.float32), ("fp8", torch.bfloat16), ("fp8", E8M0),
        ("int4", torch.bfloat16), ("int4", torch.float32),
    ],
)  # fmt: skip
def test_codes_and_scales_are_where_torch_brings_them(
    file: File, scheme: str, dtype: torch.dtype, order: Order, room: MakeRoom
) -> None:
    given = stored(scheme, dtype)
    with reader(file) as threads:
        memory, weights = threads.begin(in_file(file, given, order), KINDS[scheme], order, room)()
    assert_same(weights, list(held(given, NATIVE, order)))
    assert sum(memory.used) >= sum(one.data.nbytes for pair in weights for one in pair)
    tensors = given.w13, given.w2, given.w13_scale, given.w2_scale
    assert file.read == sum(one.nbytes for one in tensors)


def plain(file: File, w13: torch.Tensor, w2: torch.Tensor) -> list[tuple[FileWeight, FileWeight]]:
    return [
        (
            FileWeight(tuple(file.add(half) for half in one.chunk(2)), HIDDEN),
            FileWeight((file.add(other),), INNER),
        )
        for one, other in zip(w13, w2, strict=True)
    ]


@needs_native
@pytest.mark.parametrize("room", [Room, SharedRoom])
@pytest.mark.parametrize("kind", ["packed", "compact"])
def test_weights_in_bf16_are_packed_or_compact(file: File, kind: str, room: MakeRoom) -> None:
    w13, w2 = torch.randn(EXPERTS, 2 * INNER, HIDDEN), torch.randn(EXPERTS, HIDDEN, INNER)
    # Two outliers; and values of a whole weight of which few have the same exponent.
    w13[0, 5, 7] = w13[0, 5, 8] = 1e20
    w2[1] = torch.ldexp(w2[1], torch.randint(-60, 60, w2[1].shape))
    w13, w2 = w13.bfloat16(), w2.bfloat16()
    level = NATIVE.levels()[-1]
    expected = RoutedExperts(
        ExpertMatrices(w13, w2), native=NATIVE, level=level, kind=FORMATS[kind], activation=SILU
    )
    with reader(file) as threads:
        wait = threads.begin(plain(file, w13, w2), FORMATS[kind], Order.HALVES, room)
        memory, weights = wait()
    assert_same(weights, expected.weights)
    kinds = {type(one) for pair in weights for one in pair}
    assert kinds == ({CompactWeight, PackedWeight} if kind == "compact" else {PackedWeight})
    found = RoutedExperts.in_room(memory, weights, native=NATIVE, level=level)
    x, ids = torch.randn(5, HIDDEN).bfloat16(), torch.randint(0, EXPERTS, (5, 2))
    assert torch.equal(found(x, None, ids), expected(x, None, ids))


def test_memory_is_there_although_all_threads_wait_for_it() -> None:
    queued = []

    def submit(function: Callable[..., Any], *given: Any) -> Future[Any]:
        queued.append(lambda: function(*given))
        return Future()

    room = SharedRoom((STEP, STEP))
    room.expect((STEP, STEP))
    room.provide(0, STEP, submit)
    place = room.taken(100, 0)
    waiting = threading.Thread(target=room.wait, args=(place,), daemon=True)
    waiting.start()
    waiting.join(20)
    assert not waiting.is_alive()
    place.fill_(7)
    for one in queued:
        one()
    assert (place == 7).all()
    assert room.pages.prepared_bytes == STEP


@needs_native
def test_columns_of_some_ranks(file: File) -> None:
    """Rows of a part of a matrix's inputs lie apart from each other."""
    w13, w2 = torch.randn(EXPERTS, 2 * INNER, HIDDEN), torch.randn(EXPERTS, HIDDEN, 2 * INNER)
    w13, w2 = w13.bfloat16(), w2.bfloat16()
    pairs = []
    for one, other in zip(w13, w2, strict=True):
        rows = file.add(other)
        right = Rows(rows.descriptor, rows.offset + rows.stride // 2, rows.stride, rows.count)
        gate_up = tuple(file.add(half) for half in one.chunk(2))
        pairs.append((FileWeight(gate_up, HIDDEN), FileWeight((right,), INNER)))
    with reader(file) as threads:
        _, weights = threads.begin(pairs, PackedWeight, Order.HALVES, Room)()
    own = ExpertMatrices(w13, w2[:, :, INNER:])
    half = RoutedExperts(own, native=NATIVE, level=NATIVE.levels()[-1])
    assert_same(weights, half.weights)


@needs_native
def test_what_no_weight_can_have_is_named(file: File) -> None:
    damaged, fine = stored("fp8", torch.float32), stored("mxfp4", E8M0)
    damaged.w2.view(torch.uint8)[2, 4, 9] = 0xFF
    with reader(file) as threads:
        begin = threads.begin(
            in_file(file, damaged, Order.HALVES), KINDS["fp8"], Order.HALVES, Room
        )
        with pytest.raises(UnsupportedError, match=r"expert 2: fp8: 1 of 6144 weights are NaN"):
            begin()
    for scheme, tensors, value in (
        ("mxfp4", fine, 228), ("fp8", stored("fp8", torch.float32), float("nan")),
        ("int4", stored("int4", torch.bfloat16), float("inf")),
    ):  # fmt: skip
        scale = tensors.w13_scale.view(torch.uint8) if scheme == "mxfp4" else tensors.w13_scale
        scale[1, 1, 2] = value
        with reader(file) as threads:
            pairs = in_file(file, tensors, Order.HALVES)
            wait = threads.begin(pairs, KINDS[scheme], Order.HALVES, Room)
            with pytest.raises(UnsupportedError, match=rf"expert 1: {KINDS[scheme].name}: \d+ of"):
                wait()


@needs_native
@pytest.mark.parametrize("kind", ["packed", "compact"])
def test_a_file_that_became_shorter_or_cannot_be_read_is_named(file: File, kind: str) -> None:
    w13 = torch.randn(EXPERTS, 2 * INNER, HIDDEN).bfloat16()
    w2 = torch.randn(EXPERTS, HIDDEN, INNER).bfloat16()
    pairs = plain(file, w13, w2)
    file.cut()
    with (
        reader(file) as threads,
        pytest.raises(EOFError, match=r"weights: it ends before its header says"),
    ):
        threads.begin(pairs, FORMATS[kind], Order.HALVES, Room)()
    folder = os.open(
        os.path.dirname(os.readlink(f"/proc/self/fd/{pairs[0][0].codes[0].descriptor}")),
        os.O_RDONLY,
    )
    moved = [
        (FileWeight((Rows(folder, 0, 2 * HIDDEN, 2 * INNER),), HIDDEN), down) for _, down in pairs
    ]
    with reader(file) as threads, pytest.raises(IsADirectoryError, match="Is a directory"):
        threads.begin(moved, FORMATS[kind], Order.HALVES, Room)()
    os.close(folder)


@needs_native
def test_sizes_that_are_none_are_refused() -> None:
    memory = torch.zeros(4096, dtype=torch.uint8)
    sizes: dict[str, Any] = {
        "codes": [(0, 0, 16, 32)], "scales": [(0, 0, 1, 32)], "scale": "float8_e8m0fnu",
        "outputs_per_scale": 1, "is_widened": False, "largest_scale": 1.0, "no_number": 0,
        "inputs": 32, "groups": 1, "bits": 4, "outputs": list(range(32)), "block_bytes": 576,
        "to": memory.data_ptr(),
    }  # fmt: skip
    for other, said in (
        ({"inputs": 16}, "multiples of 32, got 32 and 16"),
        ({"bits": 16, "codes": [(0, 0, 64, 32)]}, "got 16 and 1"),
        ({"block_bytes": 512}, "blocks of 512 bytes are too small"),
        ({"codes": [(0, 0, 16, 31)]}, "expected outputs below 31, got 31"),
        ({"scales": [(0, 0, 1, 31)]}, "expected outputs below 31, got 31"),
        ({"codes": [(0, 0, 15, 32)]}, "rows at 16 bytes or more"),
        ({"codes": [(0, -1, 16, 32)]}, "rows at 16 bytes or more"),
        ({"scale": "none"}, "scales and groups, or neither"), ({"scale": "int8"}, "got int8"),
        ({"is_widened": True}, "scales and groups, or neither"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=said):
            NATIVE.load(**sizes | other)

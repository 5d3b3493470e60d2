"""Weights in any format are the same weights: bit by bit, whatever the values."""

from __future__ import annotations

import resource

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from native_module import TESTED, level_of, native, needs_native  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402

from ray_hetero.kernels.formats import FORMATS, CompactWeight, HostWeight  # noqa: E402
from ray_hetero.kernels.formats.base import pack  # noqa: E402
from ray_hetero.offload.expand.expansions import expansion_of, part_of, stack_of  # noqa: E402

current_platform.import_kernels()
pytestmark = needs_native

N, K = 320, 160


def bits(weight: torch.Tensor) -> torch.Tensor:
    return weight.view(torch.int16)


def compact(packed: torch.Tensor) -> CompactWeight:
    """A weight that suits."""
    made = CompactWeight.made(packed, native)
    assert made is not None
    return made


def expanded(weight: HostWeight, level: str) -> torch.Tensor:
    return bits(weight.packed(native, level_of(level)))


def rare(weight: torch.Tensor) -> torch.Tensor:
    """With values of every kind, each in a few places."""
    found = (0.0, -0.0, 1e-40, -3e38, float("inf"), float("nan"))
    for value, share in zip(found, (6421, 6427, 6449, 6451, 6469, 6473), strict=True):
        weight.view(-1)[::share] = value
    return weight


WEIGHTS = {
    "normal": lambda: torch.randn(N, K).mul_(0.02),
    "uniform": lambda: torch.rand(N, K).mul_(2e-3).sub_(1e-3),
    "zero": lambda: torch.zeros(N, K),
    "one value": lambda: torch.full((N, K), -1.5),
    "rare values": lambda: rare(torch.randn(N, K).mul_(0.02)),
    "one output large": lambda: torch.cat([torch.randn(N - 1, K), 1e6 * torch.randn(1, K)]),
}


@pytest.mark.parametrize("level", TESTED)
@pytest.mark.parametrize("made", WEIGHTS.values(), ids=WEIGHTS)
def test_expanded_they_are_what_they_were(made: object, level: str) -> None:
    assert callable(made)
    torch.manual_seed(5)
    packed = pack(made().bfloat16())
    weight = compact(packed)
    assert weight.shape == (N, K)
    assert torch.equal(expanded(weight, level), bits(packed))
    assert weight.data.nbytes * 4 == packed.nbytes * 3


@pytest.mark.parametrize("name", FORMATS)
def test_each_format_holds_usual_weights_in_the_bytes_that_planning_counts(name: str) -> None:
    torch.manual_seed(6)
    plain = torch.randn(N, K).mul_(0.02).bfloat16()
    weight = FORMATS[name].made(pack(plain), native)
    assert weight is not None
    assert (weight.name, weight.shape) == (name, (N, K))
    assert weight.data.nbytes == plain.nbytes * weight.read_share
    assert len(weight.data) == N
    for level in TESTED:
        assert torch.equal(expanded(weight, level), bits(pack(plain)))
    # All blocks but the first, as a GPU expands them.
    rows = weight.data[32:].reshape(-1).view(torch.uint8)
    found = torch.empty((N - 32) * K, dtype=torch.bfloat16)
    expansion_of(part_of(stack_of(weight), 32, N), torch.device("cpu"))(rows, found)
    assert torch.equal(bits(found.view(N - 32, K)), bits(plain[32:]))


@pytest.mark.parametrize("level", TESTED)
def test_every_bf16_there_is(level: str) -> None:
    torch.manual_seed(5)
    packed = pack(torch.randn(96, 2048).mul_(0.02).bfloat16())
    packed[32:64] = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16).view(32, -1)
    weight = compact(packed)
    assert weight.encoding.packed_blocks == [1]
    assert torch.equal(expanded(weight, level), bits(packed))


def with_outliers(outputs: int, **rows: int) -> torch.Tensor:
    """[outputs, 512] of values that fill the codebook, but for some numbers of outliers in rows."""
    made = 2.0 ** (-2.0 * (torch.arange(outputs * 512) % 15)).view(outputs, 512)
    for row, count in rows.items():
        made[int(row.removeprefix("row")), :count] = 2.0**60
    return made.bfloat16()


def test_a_block_with_many_outliers_stays_packed() -> None:
    # 32 of 16384 weights are one in 512.
    for count, packed_blocks in ((30, []), (40, [2])):
        plain = pack(with_outliers(128, row70=count))
        weight = compact(plain)
        assert weight.encoding.packed_blocks == packed_blocks
        assert weight.encoding.outliers_count == (0 if packed_blocks else count)
        assert weight.gpu_bytes == (2 * 32 * 512 if packed_blocks else 10 * count)
    rows = torch.from_numpy(weight.encoding.packed_rows(2).view("int16"))
    assert torch.equal(rows, bits(plain[64:96]).flatten())
    with pytest.raises(ValueError, match="a block that stays packed"):
        weight.encoding.packed_rows(1)


def test_only_what_suits_becomes_compact() -> None:
    torch.manual_seed(5)
    usual = pack(torch.randn(512, 256).mul_(0.02).bfloat16())
    made = compact(usual)
    # Normal values are below 2^-14 of the largest once in ten thousand.
    assert 0 < made.encoding.outliers_count < 512 * 256 / 1000
    assert made.encoding.packed_blocks == []
    wide = torch.randn(512, 256).exp2().pow(20).bfloat16()
    assert CompactWeight.made(wide, native) is None


def test_a_gpu_expands_outliers_and_blocks_that_stay_packed() -> None:
    plain = with_outliers(256, row70=300, row130=3)
    weight = compact(pack(plain))
    assert weight.encoding.packed_blocks == [2]
    for begin, end in ((0, 256), (64, 160), (96, 256)):
        rows = weight.data[begin:end].reshape(-1)
        found = torch.empty((end - begin) * 512, dtype=torch.bfloat16)
        expansion_of(part_of(stack_of(weight), begin, end), torch.device("cpu"))(rows, found)
        assert torch.equal(bits(found.view(-1, 512)), bits(plain[begin:end]))


def test_what_cannot_be_compact_takes_little_memory_to_find_out() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    wide = torch.randn(4096, 4096).exp2().pow(20).bfloat16()
    made = CompactWeight.made(wide, native)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert made is None
    # 64 MiB of floats, several times while they are made; a list of outliers would be 128 more.
    assert grown < 250 << 10


def test_outliers_by_place() -> None:
    weight = torch.full((64, 512), 0.5).bfloat16()
    weight[33, 5], weight[40, 0], weight[2, 63] = 2**60, -(2**60), 2**-60
    # 15 more frequent ones that fill the codebook.
    for exponent in range(15):
        weight[8, 4 * exponent : 4 * exponent + 4] = 2.0 ** (4 * exponent - 30)
    made = compact(pack(weight))
    places, values = made.encoding.outliers(1, 2)
    found = {
        int(place): float(value)
        for place, value in zip(
            places, torch.from_numpy(values.view("int16")).view(torch.bfloat16), strict=True
        )
    }
    assert found[512 + 5] == 2**60
    assert found[8 * 512] == -(2**60)
    assert len(made.encoding.outliers(0, 2)[0]) == made.encoding.outliers_count
    with pytest.raises(ValueError, match="range of blocks"):
        made.encoding.outliers(1, 3)

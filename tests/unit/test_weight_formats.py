"""Weights in any format are the same weights: bit by bit, whatever the values."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from native_module import LEVELS, native, needs_native  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402

from ray_hetero.weight_formats import FORMATS, CompactWeight, HostWeight  # noqa: E402
from ray_hetero.weight_formats.base import pack  # noqa: E402

current_platform.import_kernels()
pytestmark = needs_native

N, K = 96, 160


def bits(weight: torch.Tensor) -> torch.Tensor:
    return weight.view(torch.int16)


def compact(packed: torch.Tensor) -> CompactWeight:
    """Compact, however many outliers that makes."""
    outputs, inputs = packed.shape
    rows = torch.empty((outputs, 3 * inputs // 2), dtype=torch.uint8)
    return CompactWeight(rows, native.Compact(packed.data_ptr(), outputs, inputs, rows.data_ptr()))


def expanded(weight: HostWeight, level: str) -> torch.Tensor:
    return bits(weight.packed(native, native.level(level)))


def rare(weight: torch.Tensor) -> torch.Tensor:
    """With values of every kind, each in a few places."""
    found = (0.0, -0.0, 1e-40, -3e38, float("inf"), float("nan"))
    for value, share in zip(found, (1601, 1607, 1609, 1613, 1619, 1621), strict=True):
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


@pytest.mark.parametrize("level", LEVELS)
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
    for level in LEVELS:
        assert torch.equal(expanded(weight, level), bits(pack(plain)))
    # Two thirds of the blocks, as a GPU expands them.
    rows = weight.data[32:].reshape(-1).view(torch.uint8)
    found = torch.empty((N - 32) * K, dtype=torch.bfloat16)
    weight.expansion(32, N, torch.device("cpu"))(rows, found)
    assert torch.equal(bits(found.view(N - 32, K)), bits(plain[32:]))


@pytest.mark.parametrize("level", LEVELS)
def test_every_bf16_there_is(level: str) -> None:
    packed = torch.arange(-(2**15), 2**15).to(torch.int16).view(512, 128).view(torch.bfloat16)
    weight = compact(packed)
    # All upper bytes are as frequent here, so what the codebook holds are 15 of them and 0.
    assert weight.encoding.outliers_count == (256 - 16) * 256
    assert torch.equal(expanded(weight, level), bits(packed))


def test_only_what_suits_becomes_compact() -> None:
    torch.manual_seed(5)
    usual = pack(torch.randn(512, 256).mul_(0.02).bfloat16())
    made = CompactWeight.made(usual, native)
    assert made is not None
    # Normal values are below 2^-14 of the largest once in ten thousand.
    assert 0 < made.encoding.outliers_count < 512 * 256 / 1000
    wide = torch.randn(512, 256).exp2().pow(20).bfloat16()
    assert CompactWeight.made(wide, native) is None


def test_exceptions_by_place() -> None:
    weight = torch.full((64, 64), 0.5).bfloat16()
    weight[33, 5], weight[40, 0], weight[2, 63] = 2**60, -(2**60), 2**-60
    # 15 more frequent ones that fill the codebook.
    for exponent in range(15):
        weight[8, 4 * exponent : 4 * exponent + 4] = 2.0 ** (4 * exponent - 30)
    packed = pack(weight)
    made = compact(packed)
    places, values = made.encoding.outliers(1, 2)
    found = {
        int(place): float(value)
        for place, value in zip(places, torch.from_numpy(values).view(torch.bfloat16), strict=True)
    }
    assert found[64 + 5] == 2**60
    assert found[8 * 64] == -(2**60)
    assert len(made.encoding.outliers(0, 2)[0]) == made.encoding.outliers_count
    with pytest.raises(ValueError, match="range of blocks"):
        made.encoding.outliers(1, 3)

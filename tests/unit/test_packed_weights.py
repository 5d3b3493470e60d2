"""Compact weights are the same weights: bit by bit, whatever the values."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from native_module import native, needs_bf16  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402

from ray_hetero.packed_weights import PackedWeight, made_compact, pack  # noqa: E402

current_platform.import_kernels()
pytestmark = needs_bf16

N, K = 96, 160


def bits(weight: torch.Tensor) -> torch.Tensor:
    return weight.view(torch.int16)


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


@pytest.mark.parametrize("made", WEIGHTS.values(), ids=WEIGHTS)
def test_expanded_they_are_what_they_were(made: object) -> None:
    assert callable(made)
    torch.manual_seed(5)
    packed = pack(made().bfloat16())
    rows = torch.empty((N, 3 * K // 2), dtype=torch.uint8)
    weight = PackedWeight(rows, native.Compact(packed.data_ptr(), N, K, rows.data_ptr()))
    assert weight.shape == (N, K)
    assert torch.equal(bits(weight.packed()), bits(packed))
    assert rows.nbytes * 4 == packed.nbytes * 3


def test_every_bf16_there_is() -> None:
    packed = torch.arange(-(2**15), 2**15).to(torch.int16).view(512, 128).view(torch.bfloat16)
    rows = torch.empty((512, 192), dtype=torch.uint8)
    weight = PackedWeight(rows, native.Compact(packed.data_ptr(), 512, 128, rows.data_ptr()))
    # All upper bytes are as frequent here, so what the book holds are 15 of them and 0.
    assert weight.compact.outliers_count == (256 - 16) * 256
    assert torch.equal(bits(weight.packed()), bits(packed))


def test_only_what_suits_becomes_compact() -> None:
    torch.manual_seed(5)
    usual = pack(torch.randn(512, 256).mul_(0.02).bfloat16())
    made = made_compact(usual, native)
    assert made.compact is not None
    # Normal values are below 2^-14 of the largest once in ten thousand.
    assert 0 < made.compact.outliers_count < 512 * 256 / 1000
    wide = torch.randn(512, 256).exp2().pow(20).bfloat16()
    assert made_compact(wide, native).data is wide


def test_exceptions_by_place() -> None:
    weight = torch.full((64, 64), 0.5).bfloat16()
    weight[33, 5], weight[40, 0], weight[2, 63] = 2**60, -(2**60), 2**-60
    # 15 more frequent ones that fill the book.
    for exponent in range(15):
        weight[8, 4 * exponent : 4 * exponent + 4] = 2.0 ** (4 * exponent - 30)
    packed = pack(weight)
    made = made_compact(packed, native)
    places, values = made.compact.outliers(1, 2)
    found = {
        int(place): float(value)
        for place, value in zip(places, torch.from_numpy(values).view(torch.bfloat16), strict=True)
    }
    assert found[64 + 5] == 2**60
    assert found[8 * 64] == -(2**60)
    assert len(made.compact.outliers(0, 2)[0]) == made.compact.outliers_count
    with pytest.raises(ValueError, match="range of blocks"):
        made.compact.outliers(1, 3)


def test_rows_of_another_shape_are_refused() -> None:
    packed = pack(torch.randn(64, 64).bfloat16())
    made = made_compact(packed, native)
    x = torch.zeros(1, 64).bfloat16()
    with pytest.raises(ValueError, match="shape that was made compact"):
        native.linear(
            x.data_ptr(), 64, made.data.data_ptr(), 0, x.data_ptr(), 1, 32, 64, False, made.compact
        )

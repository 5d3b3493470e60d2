"""Native calls take denormal numbers for 0 on all their threads, whose mode they leave alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

torch = pytest.importorskip("torch")

from native_module import TESTED, level_of, native  # noqa: E402

from ray_hetero.kernels.experts.expert_matrices import ExpertMatrices  # noqa: E402
from ray_hetero.kernels.experts.routed_experts import RoutedExperts  # noqa: E402
from ray_hetero.kernels.formats import PackedWeight  # noqa: E402
from ray_hetero.kernels.formats.base import pack  # noqa: E402
from ray_hetero.kernels.formats.fp4 import Fp4Weight  # noqa: E402
from ray_hetero.kernels.formats.scaled import Codes  # noqa: E402

if native is None:
    pytest.skip("needs the native module", allow_module_level=True)

SMALL = 2.0**-64
"""A bf16 whose square is denormal in float32, and in bf16 is no 0."""
OUTPUTS, INPUTS = 64, 64
MANY = 1 << 20
"""Elements of which PyTorch gives each thread some."""


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
    torch.set_flush_denormal(False)


def diagonal(outputs: int, inputs: int) -> torch.Tensor:
    """Weights of which each output has one input: no sum hides what a product is."""
    return torch.eye(inputs)[torch.arange(outputs) % inputs].mul_(SMALL).bfloat16()


def linear(tokens: int, level: str) -> torch.Tensor:
    weight = PackedWeight.made(pack(diagonal(OUTPUTS, INPUTS)), native)
    x = torch.full((tokens, INPUTS), SMALL).bfloat16()
    y = torch.ones((tokens, OUTPUTS), dtype=torch.bfloat16)
    native.linear(
        x=x.data_ptr(), stride=INPUTS, w=weight.data.data_ptr(), encoding=weight.encoding, bias=0,
        y=y.data_ptr(), m=tokens, level=level_of(level),
    )  # fmt: skip
    return y


def experts(tokens: int, level: str) -> torch.Tensor:
    """SiLU(64) · 64 is 2^12, so that a sum is 2^-46, and 2^-128 with the weight of a token."""
    w13 = torch.full((2, 2 * INPUTS, OUTPUTS), 1.0).bfloat16()
    w2 = torch.full((2, OUTPUTS, INPUTS), SMALL).bfloat16()
    layer = RoutedExperts(ExpertMatrices(w13, w2), native=native, level=level_of(level))
    x = torch.full((tokens, OUTPUTS), 1.0).bfloat16()
    ids = torch.zeros((tokens, 1), dtype=torch.int32)
    return layer(x, torch.full((tokens, 1), 2.0**-82), ids)


def expanded(tokens: int, level: str) -> torch.Tensor:
    """Codes of 1/2 whose scales are 2^-127."""
    codes = Codes(
        torch.full((OUTPUTS, INPUTS), 1, dtype=torch.uint8),
        torch.zeros((OUTPUTS, INPUTS // 32), dtype=torch.uint8).view(torch.float8_e8m0fnu), 32,
    )  # fmt: skip
    return Fp4Weight.stored(codes, native).packed(native, level_of(level))


def rotated(tokens: int, level: str) -> torch.Tensor:
    cos_sin = torch.full((1, 32), SMALL).bfloat16()
    rotation = native.Rotation(
        heads=1, kv_heads=1, size=32, cos_sin=cos_sin.data_ptr(), positions=1, rotated=32,
        is_interleaved=False, query_norm=None, key_norm=None,
    )  # fmt: skip
    # The second halves are 0, so that nothing is subtracted.
    qkv = torch.full((tokens, 96), SMALL).view(tokens, -1, 16)
    qkv[:, 1::2] = 0
    qkv = qkv.flatten(1).bfloat16()
    positions = torch.zeros(tokens, dtype=torch.int64)
    rotation.run(qkv.data_ptr(), 96, positions.data_ptr(), tokens, level_of(level))
    return qkv[:, :64]


CALLS: dict[str, tuple[Callable[[int, str], torch.Tensor], tuple[int, ...]]] = {
    "linear": (linear, (1, 8, 40, 300)),
    "experts": (experts, (1, 8, 40)),
    "expand": (expanded, (1,)),
    "rotation": (rotated, (1, 40)),
}
"""Native calls, one for each kind of parallel region, with numbers of tokens."""


@pytest.mark.parametrize("level", TESTED)
@pytest.mark.parametrize("name", CALLS)
def test_denormal_products_are_0(name: str, level: str, threads: None) -> None:
    call, numbers = CALLS[name]
    for tokens in numbers:
        found = call(tokens, level)
        assert float(found.float().abs().max()) == 0, f"{name} of {tokens} tokens"


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("is_flushed", [False, True])
def test_threads_keep_their_mode(name: str, is_flushed: bool, threads: None) -> None:
    call, numbers = CALLS[name]
    assert torch.set_flush_denormal(is_flushed)
    small = torch.full((MANY,), 1e-40)
    expected = small * 1
    for tokens in numbers:
        call(tokens, native.levels()[-1].name)
        assert torch.equal(small * 1, expected), f"after {name} of {tokens} tokens"
        # The calling thread alone.
        assert bool(small[:1] * 1 == 0) == is_flushed

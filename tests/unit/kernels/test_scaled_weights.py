"""Weights of codes and scales are expanded, by all instruction sets and as on a GPU, to the bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from native_module import (  # noqa: E402
    EMULATED,
    LEVELS,
    TESTED,
    level_of,
    native,
    needs_native,
)
from stored_codes import made  # noqa: E402

from ray_hetero.errors import UnsupportedError  # noqa: E402
from ray_hetero.kernels.formats import SCALED_FORMATS, ScaledWeight  # noqa: E402
from ray_hetero.kernels.formats.base import BLOCK, pack  # noqa: E402
from ray_hetero.kernels.formats.fp4 import Fp4Weight  # noqa: E402
from ray_hetero.kernels.formats.fp8 import Fp8Weight  # noqa: E402
from ray_hetero.kernels.formats.integers import Int4Weight, Int8Weight  # noqa: E402
from ray_hetero.kernels.formats.scaled import Codes  # noqa: E402
from ray_hetero.offload.expand.expansions import expansion_of, part_of, stack_of  # noqa: E402

pytestmark = needs_native
CASES: list[tuple[type[ScaledWeight], dict[str, Any]]] = [
    *((kind, {"scales": scales, "has_zeros": has_zeros})
      for kind in (Int4Weight, Int8Weight) for scales in kind.scale_types
      for has_zeros in (False, True)),
    *((Fp8Weight, {"scales": scales}) for scales in Fp8Weight.scale_types),
    (Fp8Weight, {"scales": "float32", "is_uniform": True}),
    *((Fp4Weight, {"scales": scales}) for scales in Fp4Weight.scale_types),
]  # fmt: skip


def bits(weight: torch.Tensor) -> torch.Tensor:
    return weight.view(torch.int16)


def check(kind: type[ScaledWeight], codes: Codes) -> None:
    expected = kind.expanded(codes)
    weight = kind.stored(codes, native)
    assert weight.shape == codes.shape
    for level in TESTED:
        found = weight.packed(native, level_of(level))
        assert torch.equal(bits(found), bits(pack(expected))), level
    on_gpu = torch.empty(expected.numel(), dtype=torch.bfloat16)
    expansion = expansion_of(stack_of(weight), torch.device("cpu"))
    expansion(weight.data.view(torch.uint8).view(-1), on_gpu)
    assert torch.equal(bits(on_gpu.view(expected.shape)), bits(expected))


@pytest.mark.parametrize(("kind", "options"), CASES)
@pytest.mark.parametrize(
    ("outputs", "inputs", "group"),
    [(64, 256, 128), (32, 32, 32), (96, 160, 64), (64, 96, 12), (128, 544, 544), (32, 192, 48)],
)
def test_all_codes_are_expanded_to_the_bit(
    kind: type[ScaledWeight], options: dict[str, Any], outputs: int, inputs: int, group: int
) -> None:
    check(kind, made(kind, outputs, inputs, group, **options))


@settings(max_examples=40, deadline=None)
@given(
    case=st.sampled_from(CASES),
    blocks=st.integers(1, 3),
    tiles=st.integers(1, 9),
    group=st.integers(1, 80).map(lambda fours: 4 * fours),
    seed=st.integers(0, 2**31),
)
def test_any_shape_and_any_group(
    case: tuple[type[ScaledWeight], dict[str, Any]], blocks: int, tiles: int, group: int, seed: int
) -> None:
    kind, options = case
    check(kind, made(kind, 32 * blocks, 32 * tiles, group, seed=seed, **options))


@pytest.mark.parametrize("kind", SCALED_FORMATS.values())
def test_a_part_of_the_outputs_is_expanded_by_itself(kind: type[ScaledWeight]) -> None:
    codes = made(kind, 160, 96, 32)
    weight, expected = kind.stored(codes, native), kind.expanded(codes)
    part = torch.empty(64 * 96, dtype=torch.bfloat16)
    expansion = expansion_of(part_of(stack_of(weight), 32, 96), torch.device("cpu"))
    expansion(weight.data[32:96].view(torch.uint8).view(-1), part)
    assert torch.equal(bits(part.view(64, 96)), bits(expected[32:96]))


def exact(kind: type[ScaledWeight], codes: Codes) -> torch.Tensor:
    """The weight before it is rounded to bf16, as few tokens are multiplied with it."""
    values = kind.values(codes.codes).double()
    zeros = kind.zero() if codes.zeros is None else codes.for_each_weight(codes.zeros)
    return (values - zeros) * codes.for_each_weight(codes.scales)


FEW = 32
"""Tokens up to which codes are multiplied as they are; a matrix product's are expanded first."""


def check_products(kind: type[ScaledWeight], codes: Codes, level: str) -> None:
    outputs, inputs = codes.shape
    weight = kind.stored(codes, native)
    bias = torch.randn(outputs)
    # With short groups, more than a few tokens have expanded weights too.
    of_short = 3 if level_of(level).has_tiles else 8
    few = of_short if codes.group % BLOCK else FEW
    for tokens in (1, 2, 3, 4, 6, 9, 17, 32, 33, 70):
        plain = exact(kind, codes) if tokens <= few else kind.expanded(codes).double()
        x = torch.randn(tokens, inputs).bfloat16()
        y = torch.full((tokens, outputs), torch.nan, dtype=torch.bfloat16)
        native.linear(
            x=x.data_ptr(), stride=x.stride(0), w=weight.data.data_ptr(), encoding=weight.encoding,
            bias=bias.data_ptr(), y=y.data_ptr(), m=tokens, level=level_of(level),
        )  # fmt: skip
        expected = x.double() @ plain.T + bias
        # Sums of products in float32, of which some are large, then one rounding to bf16.
        room = 2 * inputs * 2**-24 * (x.double().abs() @ plain.abs().T)
        assert ((y.double() - expected).abs() <= room + 2**-8 * expected.abs() + 1e-30).all()


@pytest.mark.parametrize("level", TESTED)
@pytest.mark.parametrize(("kind", "options"), CASES)
def test_products_are_those_of_the_weight(
    kind: type[ScaledWeight], options: dict[str, Any], level: str
) -> None:
    check_products(kind, made(kind, 96, 1184, 64, **options), level)


@pytest.mark.parametrize("level", TESTED)
@pytest.mark.parametrize("group", [12, 16, 32, 48, 160, 2176])
@pytest.mark.parametrize(("kind", "has_zeros"), [(Int4Weight, True), (Fp4Weight, False)])
def test_products_have_groups_of_any_size(
    kind: type[ScaledWeight], group: int, level: str, *, has_zeros: bool
) -> None:
    check_products(kind, made(kind, 32, 2176, group, has_zeros=has_zeros), level)


@pytest.mark.skipif(not EMULATED, reason="needs emulated levels")
@pytest.mark.parametrize("group", [12, 128])
@pytest.mark.parametrize(("kind", "has_zeros"), [(Int4Weight, True), (Fp4Weight, False)])
def test_one_tokens_products_in_float32_are_those_of_pairs_to_the_bit(
    kind: type[ScaledWeight], group: int, *, has_zeros: bool
) -> None:
    weight = kind.stored(made(kind, 32, 2176, group, has_zeros=has_zeros), native)
    x = torch.randn(2176).bfloat16()
    found = []
    for name in ("emulated_amx", "emulated_avx512_bf16"):
        # Less what they are rounded to, sums show their lowest bits.
        y = torch.full((32,), torch.nan, dtype=torch.bfloat16)
        native.linear(
            x=x.data_ptr(), stride=2176, w=weight.data.data_ptr(), encoding=weight.encoding,
            bias=0, y=y.data_ptr(), m=1, level=EMULATED[name],
        )  # fmt: skip
        bias = -y.float()
        native.linear(
            x=x.data_ptr(), stride=2176, w=weight.data.data_ptr(), encoding=weight.encoding,
            bias=bias.data_ptr(), y=y.data_ptr(), m=1, level=EMULATED[name],
        )  # fmt: skip
        found.append((bias, y))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(bits(found[0][1]), bits(found[1][1]))


def test_fp8_without_denormal_codes_and_with_one_in_any_place() -> None:
    codes = made(Fp8Weight, 32, 128, 128)
    is_denormal = (codes.codes & 0x78) == 0
    codes.codes[is_denormal] |= 0x28
    check(Fp8Weight, codes)
    for place in range(0, codes.codes.numel(), 257):
        before = int(codes.codes.view(-1)[place])
        codes.codes.view(-1)[place] = (place & 0x80) | (place % 8)
        check(Fp8Weight, codes)
        codes.codes.view(-1)[place] = before


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_the_result_does_not_depend_on_threads(threads: int) -> None:
    codes = made(Int4Weight, 320, 3072, 128)
    weight = Int4Weight.stored(codes, native)
    before = torch.get_num_threads()
    found = []
    for tokens in (1, 8, 40):
        x = torch.randn(tokens, 3072, generator=torch.Generator().manual_seed(1)).bfloat16()
        for count in (2, threads):
            y = torch.empty(tokens, 320, dtype=torch.bfloat16)
            torch.set_num_threads(count)
            try:
                native.linear(
                    x=x.data_ptr(), stride=3072, w=weight.data.data_ptr(),
                    encoding=weight.encoding, bias=0, y=y.data_ptr(), m=tokens,
                    level=native.level(LEVELS[-1]),
                )  # fmt: skip
            finally:
                torch.set_num_threads(before)
            found.append(y)
        assert torch.equal(found[-1], found[-2])


def test_scales_of_zero_and_tiny_ones() -> None:
    codes = made(Int4Weight, 32, 128, 32, scales="float32")
    codes.scales[:, 0] = 0.0
    codes.scales[:, 1] = 2.0**-60
    codes.scales[:, 2] *= -1
    check(Int4Weight, codes)


@pytest.mark.parametrize(
    ("kind", "change", "said"),
    [
        (
            Int4Weight,
            {"outputs": 48},
            r"outputs and inputs in multiples of 32, got 48",
        ),
        (Int4Weight, {"group": 6}, r"int4: expected groups in multiples of 4 inputs, got 6"),
        (
            Fp8Weight,
            {"scales": "float8_e4m3fn"},
            r"expected scales as float32 or .* got float8",
        ),
        (Fp8Weight, {"has_zeros": True}, r"fp8: expected no zero points"),
    ],
)
def test_what_kernels_do_not_compute_is_refused(
    kind: type[ScaledWeight], change: dict[str, Any], said: str
) -> None:
    sizes = {"outputs": 64, "inputs": 96, "group": 32, **change}
    with pytest.raises(UnsupportedError, match=said):
        kind.stored(made(kind, **sizes), native)


@pytest.mark.parametrize("wrong", [torch.inf, torch.nan, 1e31])
def test_scales_that_are_no_numbers_are_refused(wrong: float) -> None:
    codes = made(Int8Weight, 32, 64, 32, scales="float32")
    codes.scales[3, 1] = wrong
    with pytest.raises(UnsupportedError, match=r"int8: 1 of 64 scales are infinite, NaN or above"):
        Int8Weight.stored(codes, native)


def test_a_factor_that_is_no_number_is_refused() -> None:
    codes = replace(made(Fp4Weight, 32, 64, 16, scales="float8_e4m3fn"), factor=torch.nan)
    with pytest.raises(UnsupportedError, match=r"fp4: the factor of all scales is nan"):
        Fp4Weight.stored(codes, native)


def test_nan_weights_are_refused() -> None:
    codes = made(Fp8Weight, 32, 64, 32)
    codes.codes[5, 7] = 0xFF
    with pytest.raises(UnsupportedError, match=r"fp8: 1 of 2048 weights are NaN"):
        Fp8Weight.stored(codes, native)

"""Routed experts of quantised checkpoints are those whose weights their codes stand for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from native_module import BETWEEN_PRODUCTS, LEVELS, level_of, native  # noqa: E402
from test_experts import Given, assert_close, routed  # noqa: E402
from test_scaled_weights import exact  # noqa: E402

from ray_hetero.compat.models.quantised_experts import StoredExperts  # noqa: E402
from ray_hetero.errors import UnsupportedError  # noqa: E402
from ray_hetero.kernels.experts.activations import (  # noqa: E402
    SILU,
    SWIGLU_OAI,
    Activation,
    Order,
)
from ray_hetero.kernels.experts.quantised_experts import KINDS, codes_of, held  # noqa: E402
from ray_hetero.kernels.experts.routed_experts import RoutedExperts  # noqa: E402

if native is None:
    pytest.skip("needs the native module", allow_module_level=True)

EXPERTS, HIDDEN = 6, 128
RELU2 = Activation("relu2_no_mul")


def words(codes: torch.Tensor) -> torch.Tensor:
    """[…, K / 8], int32: eight codes of four bits a word, from the lowest bits on."""
    nibbles = codes.unflatten(-1, (-1, 2))
    return (nibbles[..., 0] | nibbles[..., 1] << 4).contiguous().view(torch.int32)


def fp8(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape).mul_(8).clamp(-400, 400).to(torch.float8_e4m3fn)


def int8(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randint(-128, 128, shape, dtype=torch.int8)


def small(shape: tuple[int, ...]) -> torch.Tensor:
    """Scales that leave weights near 0.1."""
    return torch.rand(shape).mul_(0.02).add_(0.005)


def stored(name: str, inner: int, outputs: int = 0) -> StoredExperts:
    """A layer as a checkpoint of each kind holds it; with a gate unless outputs are given."""
    outputs = outputs or 2 * inner
    w13, w2 = (EXPERTS, outputs, HIDDEN), (EXPERTS, HIDDEN, inner)
    if name == "fp8-tensor":
        return StoredExperts("fp8", fp8(w13), fp8(w2), small((EXPERTS,)), small((EXPERTS,)))
    if name == "fp8-channel":
        scales = (small((EXPERTS, one, 1)) for one in (outputs, HIDDEN))
        return StoredExperts("fp8", fp8(w13), fp8(w2), *scales)
    if name == "int8":
        scales = (small((EXPERTS, one, 1)) / 16 for one in (outputs, HIDDEN))
        return StoredExperts("int8", int8(w13), int8(w2), *scales)
    if name == "fp8-block":
        rows, columns = 16, 32
        scales = (
            small((EXPERTS, -(-outputs // rows), -(-inputs // columns)))
            for _, outputs, inputs in (w13, w2)
        )
        return StoredExperts("fp8", fp8(w13), fp8(w2), *scales, block=(rows, columns))
    if name == "mxfp8":
        exponents = (
            torch.randint(118, 122, (*shape[:2], shape[2] // 32), dtype=torch.uint8)
            for shape in (w13, w2)
        )
        return StoredExperts("fp8", fp8(w13), fp8(w2), *exponents, block=(1, 32))
    codes = [torch.randint(16, shape, dtype=torch.uint8) for shape in (w13, w2)]
    if name == "nvfp4":
        parts = (words(one).view(torch.uint8) for one in codes)
        scales = (
            torch.rand(*shape[:2], shape[2] // 16).add_(0.5).to(torch.float8_e4m3fn)
            for shape in (w13, w2)
        )
        factors = (small((EXPERTS,)), small((EXPERTS,)))
        return StoredExperts("nvfp4", *parts, *scales, w13_factor=factors[0], w2_factor=factors[1])
    if name == "mxfp4":
        exponents = (
            torch.randint(121, 125, (*shape[:2], shape[2] // 32), dtype=torch.uint8)
            for shape in (w13, w2)
        )
        return StoredExperts("mxfp4", *(words(one).view(torch.uint8) for one in codes), *exponents)
    group = 16
    scales = (small((*shape[:2], shape[2] // group)).bfloat16() for shape in (w13, w2))
    if name in ("gptq", "awq"):
        return packed_by_library(name, codes, list(scales))
    made = StoredExperts("int4", *map(words, codes), *scales)
    if name == "int4":
        return made
    zeros = (
        words(torch.randint(16, (EXPERTS, shape[2] // group, shape[1]), dtype=torch.uint8))
        for shape in (w13, w2)
    )
    w13_zero, w2_zero = (one.transpose(1, 2).contiguous() for one in zeros)
    return replace(made, w13_zero=w13_zero, w2_zero=w2_zero)


AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
"""Which of eight neighbouring outputs lies where in a word, from its lowest bits on."""


def packed_by_library(
    name: str, codes: list[torch.Tensor], scales: list[torch.Tensor]
) -> StoredExperts:
    """Integers with zero points as AutoGPTQ and AutoAWQ pack them."""
    zeros = [torch.randint(1, 16, one.shape, dtype=torch.uint8) for one in scales]
    if name == "gptq":
        held = [words(one).transpose(1, 2).contiguous() for one in codes]
        points = [words(one.transpose(1, 2) - 1) for one in zeros]
    else:

        def along_outputs(one: torch.Tensor) -> torch.Tensor:
            by_input = one.transpose(1, 2).unflatten(-1, (-1, 8))
            return words(by_input[..., AWQ_ORDER].flatten(-2))

        held, points = ([along_outputs(one) for one in some] for some in (codes, zeros))
    by_group = [one.transpose(1, 2).contiguous() for one in scales]
    found = StoredExperts("int4", *held, *by_group, *points, layout=name)
    for expert in range(EXPERTS):
        for i, one in enumerate(codes_of(found, expert)):
            assert torch.equal(one.codes, codes[i][expert])
            assert one.zeros is not None
            assert torch.equal(one.zeros, zeros[i][expert])
    return found


def plain(given: StoredExperts, **how: Any) -> Given:
    """The same layer in float32, as few tokens are multiplied with it."""
    kind = KINDS[given.scheme]
    pairs = [codes_of(given, expert) for expert in range(EXPERTS)]
    w13, w2 = (torch.stack([exact(kind, pair[i]).float() for pair in pairs]) for i in range(2))
    return Given(w13, w2, **how)


# The best level, and those that are emulated.
@pytest.mark.parametrize(
    ("inner", "level"),
    [(32, LEVELS[-1]), *((96, level) for level in BETWEEN_PRODUCTS[len(LEVELS) - 1 :])],
)
@pytest.mark.parametrize(
    "name",
    [
        "fp8-tensor",
        "fp8-channel",
        "fp8-block",
        "mxfp4",
        "mxfp8",
        "nvfp4",
        "int4",
        "int4-zeros",
        "gptq",
        "awq",
        "int8",
    ],
)
def test_results_are_those_of_the_weights(name: str, inner: int, level: str) -> None:
    torch.manual_seed(inner)
    for activation in (SILU, SWIGLU_OAI, RELU2):
        outputs = inner if activation is RELU2 else 2 * inner
        given = stored(name, inner, outputs)
        w13_bias, w2_bias = torch.randn(EXPERTS, outputs), torch.randn(EXPERTS, HIDDEN)
        made = RoutedExperts.of_weights(
            held(given, native, activation.order), EXPERTS, w13_bias, w2_bias,
            native=native, level=level_of(level), activation=activation,
        )  # fmt: skip
        expected = plain(
            given, w13_bias=w13_bias, w2_bias=w2_bias, activation=activation,
        )  # fmt: skip
        for tokens in (1, 5, 40):
            x = torch.randn(tokens, HIDDEN).bfloat16()
            ids, weights = routed(tokens, EXPERTS, 2), torch.rand(tokens, 2)
            assert_close(made(x, weights, ids), expected.expected(x, weights, ids))


def filled_up(given: StoredExperts) -> RoutedExperts:
    """Experts whose inner size does not fill blocks; their sums are those of the weights."""
    made = RoutedExperts.of_weights(
        held(given, native, Order.HALVES), EXPERTS,
        native=native, level=native.level(LEVELS[-1]),
    )  # fmt: skip
    x = torch.randn(3, HIDDEN).bfloat16()
    ids, weights = routed(3, EXPERTS, 2), torch.rand(3, 2)
    assert_close(made(x, weights, ids), plain(given).expected(x, weights, ids))
    return made


def test_an_inner_size_that_does_not_fill_blocks_is_filled_up() -> None:
    torch.manual_seed(0)
    assert filled_up(stored("fp8-block", 48)).hidden == HIDDEN


def test_integers_of_eight_bits_are_filled_up_with_zeros() -> None:
    torch.manual_seed(0)
    filled_up(stored("int8", 48))


def test_experts_take_the_bytes_of_their_codes() -> None:
    inner = 96
    made = RoutedExperts.of_weights(
        held(stored("mxfp4", inner), native, Order.HALVES), EXPERTS,
        native=native, level=native.level(LEVELS[-1]),
    )  # fmt: skip
    weights = EXPERTS * 3 * inner * HIDDEN
    # Half a byte a weight, and an exponent for each 32.
    assert made.nbytes == pytest.approx(weights / 2 + weights / 32, rel=0.01)


def test_powers_of_two_stay_bytes() -> None:
    """MXFP8 takes a byte for the scale of 32 weights, NVFP4 for that of 16."""
    weights = EXPERTS * 3 * 96 * HIDDEN
    for name, bytes_each in (("mxfp8", 1 + 1 / 32), ("nvfp4", 1 / 2 + 1 / 16)):
        made = RoutedExperts.of_weights(
            held(stored(name, 96), native, Order.HALVES), EXPERTS,
            native=native, level=native.level(LEVELS[-1]),
        )  # fmt: skip
        assert made.nbytes == pytest.approx(weights * bytes_each, rel=0.01)


def test_a_damaged_scale_and_an_unknown_shape_are_refused() -> None:
    given = stored("fp8-tensor", 32)
    given.w13_scale[3] = float("nan")
    with pytest.raises(UnsupportedError, match=r"expert 3: fp8: .*scales are infinite, NaN"):
        list(held(given, native, Order.HALVES))
    odd = replace(stored("fp8-channel", 32), w2_scale=small((EXPERTS, 5, 1)))
    with pytest.raises(UnsupportedError, match="expected one scale, or one for each of 128"):
        list(held(odd, native, Order.HALVES))

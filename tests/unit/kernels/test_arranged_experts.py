"""Experts that all cores bring into the order of the kernel are those that torch brings there."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from native_module import native as NATIVE  # noqa: E402, N812
from native_module import needs_native  # noqa: E402

from ray_hetero.compat.models.quantised_experts import StoredExperts  # noqa: E402
from ray_hetero.errors import UnsupportedError  # noqa: E402
from ray_hetero.kernels.experts.activations import Order  # noqa: E402
from ray_hetero.kernels.experts.arranged_experts import arranged  # noqa: E402
from ray_hetero.kernels.experts.expert_room import Room, SharedRoom  # noqa: E402
from ray_hetero.kernels.experts.quantised_experts import held  # noqa: E402

EXPERTS, HIDDEN, INNER = 3, 96, 64


def stored(scheme: str, inner: int = INNER, halves: int = 2) -> StoredExperts:
    """Random codes with scales of the sizes that checkpoints have."""

    def codes(*shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8)

    outputs = halves * inner
    if scheme == "fp8":
        blocks = (
            (EXPERTS, -(-outputs // 32), HIDDEN // 32),
            (EXPERTS, HIDDEN // 32, -(-inner // 32)),
        )
        return StoredExperts(
            scheme,
            (codes(EXPERTS, outputs, HIDDEN) & 0x77).view(torch.float8_e4m3fn),
            (codes(EXPERTS, HIDDEN, inner) & 0xF7).view(torch.float8_e4m3fn),
            *(torch.rand(shape) for shape in blocks),
            block=(32, 32),
        )
    group = 32 if scheme == "mxfp4" else 16
    given = (
        codes(EXPERTS, outputs, HIDDEN // 2), codes(EXPERTS, HIDDEN, inner // 2),
        codes(EXPERTS, outputs, HIDDEN // group) % 100 + 20,
        codes(EXPERTS, HIDDEN, inner // group) % 100 + 20,
    )  # fmt: skip
    if scheme == "mxfp4":
        return StoredExperts(scheme, *given)
    scales = (one.view(torch.float8_e4m3fn) for one in given[2:])
    return StoredExperts(
        scheme, *given[:2], *scales, w13_factor=torch.rand(EXPERTS), w2_factor=torch.rand(EXPERTS)
    )


@needs_native
@pytest.mark.parametrize("room", [Room, SharedRoom])
@pytest.mark.parametrize("order", list(Order))
@pytest.mark.parametrize("scheme", ["mxfp4", "nvfp4", "fp8"])
def test_bits_and_scales_are_where_torch_brings_them(scheme: str, order: Order, room: Any) -> None:
    torch.manual_seed(0)
    given, native = (
        stored(scheme, halves=1 if order is Order.ALONE else 2),
        NATIVE,
    )
    found = arranged(given, native, order, room)
    assert found is not None
    memory, weights = found
    expected = list(held(given, native, order))
    assert len(weights) == len(expected) == EXPERTS
    for mine, theirs in zip(weights, expected, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            assert torch.equal(one.data, other.data)
            assert (one.shape, one.layout) == (other.shape, other.layout)
            assert one.data.data_ptr() % 64 == 0
    assert sum(memory.used) >= sum(one.data.nbytes for pair in weights for one in pair)


@needs_native
def test_what_has_to_be_filled_up_or_cannot_be_computed_is_left_or_named() -> None:
    native = NATIVE
    # An inner size that is no multiple of 32 is filled up by torch.
    assert arranged(stored("fp8", inner=48), native, Order.TURNS, Room) is None
    damaged = stored("mxfp4")
    damaged.w2_scale[1, 5, 1] = 255
    with pytest.raises(UnsupportedError, match=r"expert 1: fp4: 1 of \d+ scales are infinite"):
        arranged(damaged, native, Order.TURNS, Room)


@needs_native
def test_sizes_that_are_none_are_refused() -> None:
    native, memory = NATIVE, torch.zeros(4096, dtype=torch.uint8)
    sizes: dict[str, Any] = {
        "codes": memory.data_ptr(), "code_stride": 16, "scales": memory.data_ptr(),
        "scale_stride": 1, "inputs": 32, "groups": 1, "scale_bytes": 1, "bits": 4,
        "outputs": list(range(32)), "stored": 32, "block_bytes": 576, "to": memory.data_ptr(),
    }  # fmt: skip
    native.arrange(**sizes)
    for other, said in (
        ({"inputs": 16}, "multiples of 32, got 32 and 16"), ({"outputs": [0]}, "got 1 and 32"),
        ({"bits": 5}, "got 5 and 1"), ({"scale_bytes": 3}, "got 4 and 3"),
        ({"block_bytes": 512}, "blocks of 512 bytes are too small"),
        ({"stored": 31}, "expected outputs below 31, got 31"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=said):
            native.arrange(**sizes | other)

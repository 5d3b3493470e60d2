"""Routed experts of quantised checkpoints: their codes in the order of the kernel.

An expert's gate and up are two halves of one weight.  The kernel wants 16 outputs of the gate, then
their 16 of up, so codes, scales and zero points are brought into that order; the bits stay.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import torch
from torch.nn.functional import pad

from ray_hetero.compat.models.quantised_experts import StoredExperts
from ray_hetero.errors import UnsupportedError
from ray_hetero.kernels.experts.activations import Order
from ray_hetero.kernels.experts.routed_experts import MULTIPLE, paired
from ray_hetero.kernels.formats import HostWeight
from ray_hetero.kernels.formats.fp4 import Fp4Weight
from ray_hetero.kernels.formats.fp8 import Fp8Weight
from ray_hetero.kernels.formats.integers import Int4Weight, Int8Weight
from ray_hetero.kernels.formats.scaled import Codes, ScaledWeight
from ray_hetero.kernels.formats.stored_codes import (
    block_floats,
    check_groups,
    micro_floats,
    nano_floats,
    row_floats,
    unpacked,
)

AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]
"""Place in a word of AutoAWQ's of each of eight neighbouring outputs."""
KINDS: dict[str, type[ScaledWeight]] = {
    "fp8": Fp8Weight, "int4": Int4Weight, "int8": Int8Weight, "mxfp4": Fp4Weight,
    "nvfp4": Fp4Weight,
}  # fmt: skip
"""Formats by `StoredExperts.scheme`."""


def held(
    stored: StoredExperts, native: ModuleType, order: Order
) -> Iterator[tuple[HostWeight, HostWeight]]:
    """Gate and up in one, and down, of each expert.

    Args:
        stored: the checkpoint's tensors.
        native: the module of the kernels.
        order: of the outputs of gate and up.

    Raises:
        UnsupportedError: a shape, a scale or a code that the kernels do not compute.

    """
    kind = KINDS[stored.scheme]
    for expert in range(len(stored.w13)):
        gate_up, down = codes_of(stored, expert)
        filling = -down.shape[1] % MULTIPLE
        try:
            yield (
                kind.stored(_paired(gate_up, order), native),
                kind.stored(_filled(down, filling), native),
            )
        except UnsupportedError as error:
            raise UnsupportedError(f"expert {expert}: {error}") from None


def codes_of(stored: StoredExperts, expert: int) -> tuple[Codes, Codes]:
    """Codes of an expert's weights: gate and up [2 · inner, hidden], and down [hidden, inner].

    Raises:
        UnsupportedError: scales of a shape that no checkpoint known here has.

    """
    return (
        _codes(
            stored,
            stored.w13[expert],
            stored.w13_scale[expert],
            stored.w13_zero,
            stored.w13_factor,
            expert,
        ),
        _codes(
            stored,
            stored.w2[expert],
            stored.w2_scale[expert],
            stored.w2_zero,
            stored.w2_factor,
            expert,
        ),
    )


def _codes(
    stored: StoredExperts, weight: torch.Tensor, scale: torch.Tensor, zeros: torch.Tensor | None,
    factor: torch.Tensor | None, expert: int,
) -> Codes:  # fmt: skip
    if stored.scheme == "int4":
        return _integers(stored, weight, scale, None if zeros is None else zeros[expert])
    if stored.scheme == "mxfp4":
        return micro_floats(weight, scale)
    if stored.scheme == "nvfp4":
        assert factor is not None, "vLLM registers a factor for each expert"
        return nano_floats(weight, scale, float(factor[expert]))
    # Outputs of gate and up are put in another order.
    if stored.block is not None:
        return block_floats(weight, scale, stored.block, by_output=True)
    outputs = len(weight)
    if scale.numel() not in (1, outputs):
        raise UnsupportedError(
            f"experts in {stored.scheme}: expected one scale, or one for each of {outputs} "
            f"outputs, got {tuple(scale.shape)}"
        )
    if stored.scheme == "int8":
        codes = weight.contiguous().view(torch.uint8) ^ Int8Weight.zero()
        return Codes(codes, scale.float().expand(outputs, 1), weight.shape[1])
    return row_floats(weight, scale, by_output=True)


def _integers(
    stored: StoredExperts, words: torch.Tensor, scale: torch.Tensor, zeros: torch.Tensor | None
) -> Codes:
    """Integers of four bits as the libraries pack them.

    Args:
        stored: the layer; its layout is compressed-tensors ([N, K / 8], scales [N, groups], zeros
            [N / 8, groups]), gptq ([K / 8, N], [groups, N], [groups, N / 8], each less 1), or awq
            ([K, N / 8], the others as gptq, each itself).
        words: int32, eight codes each.
        scale: of groups.
        zeros: words, or None for the middle of the codes.

    Raises:
        UnsupportedError: scales that are not those of groups.

    """
    bits, layout = Int4Weight.bits, stored.layout
    if layout == "compressed-tensors":
        of_groups = None if zeros is None else unpacked(zeros.t(), bits).t()
        codes = unpacked(words, bits)
    elif layout == "gptq":
        of_groups = None if zeros is None else unpacked(zeros, bits).t() + 1
        codes, scale = unpacked(words.t(), bits), scale.t()
    else:
        of_groups = None if zeros is None else _in_order(unpacked(zeros, bits)).t()
        codes, scale = _in_order(unpacked(words, bits)).t(), scale.t()
    inputs, groups = codes.shape[1], scale.shape[1]
    if stored.block is not None:
        group = stored.block[1]
        check_groups(inputs, groups, group)
        return Codes(codes, scale, min(group, inputs), of_groups)
    if inputs % groups:
        raise UnsupportedError(
            f"experts in int4: {inputs} inputs with {groups} scales, and nothing says how many "
            f"share one: {inputs} / {groups} is no whole number"
        )
    return Codes(codes, scale, inputs // groups, of_groups)


def _in_order(codes: torch.Tensor) -> torch.Tensor:
    """Codes [M, N] that lie in their words as AutoAWQ has them."""
    return codes.unflatten(1, (-1, len(AWQ_PLACES)))[..., AWQ_PLACES].flatten(1)


def _paired(codes: Codes, order: Order) -> Codes:
    """Outputs of gate and up in the kernel's order, filled up with such as are 0."""

    def of(rows: torch.Tensor) -> torch.Tensor:
        as_bytes = rows.contiguous().view(torch.uint8) if rows.dtype.itemsize == 1 else rows
        return paired(as_bytes, order).view(rows.dtype)

    zeros = None if codes.zeros is None else of(codes.zeros)
    return Codes(of(codes.codes), of(codes.scales), codes.group, zeros, codes.factor)


def _filled(codes: Codes, filling: int) -> Codes:
    """Inputs filled up with such as are multiplied with 0."""
    if filling == 0:
        return codes
    inputs = codes.shape[1]
    # One scale for an output stays one.
    group = inputs + filling if codes.group == inputs else codes.group
    missing = -(-(inputs + filling) // group) - codes.groups

    def of(rows: torch.Tensor, count: int) -> torch.Tensor:
        as_bytes = rows.contiguous().view(torch.uint8) if rows.dtype.itemsize == 1 else rows
        return pad(as_bytes, (0, count)).view(rows.dtype)

    zeros = None if codes.zeros is None else of(codes.zeros, missing)
    return Codes(of(codes.codes, filling), of(codes.scales, missing), group, zeros, codes.factor)

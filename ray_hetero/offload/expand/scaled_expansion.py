"""Codes with scales on a GPU as bf16, in one kernel where Triton is installed.

The same by torch's operators (`scaled.ScaledWeight.expanded`) makes float32 intermediates of
several times the size, and takes some ten times as long as the codes take over the link.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch

from ray_hetero.kernels.formats import SCALED_FORMATS
from ray_hetero.kernels.formats.base import BLOCK
from ray_hetero.kernels.formats.scaled import Codes, Layout, ScaledWeight, layout_of, name_of
from ray_hetero.log import logger
from ray_hetero.offload.expand.stacks import Expansion, Stack
from ray_hetero.offload.expand.triton_runtime import kernels, runs_with_triton

ROWS = 16
"""Rows of words that a program of the kernel expands: 64 inputs of codes of four bits, else 32."""
CHECKED_INPUTS = 160
"""Inputs of the weight that the kernel is tried with: whole programs and a part of one."""
CHECKED_BLOCKS = 2
CHUNK_WEIGHTS = 1 << 22
"""Weights that a GPU expands at once, in float32."""
KNOWN = ("int4", "int8", "fp8", "fp4")
"""Formats whose codes the kernel (triton_kernels.py) reads; a new one does without it at first."""


@dataclass(frozen=True)
class TorchExpansion:
    """Expansion of weights with torch's operators, some blocks at a time."""

    kind: type[ScaledWeight]
    inputs: int
    layout: Layout

    def __call__(self, rows: torch.Tensor, weights: torch.Tensor, first: int = 0) -> None:
        """Write weights as `Expansion` does."""
        blocks = weights.numel() // (BLOCK * self.inputs)
        data, into = rows.view(blocks, -1), weights.view(blocks, BLOCK, self.inputs)
        step = max(1, CHUNK_WEIGHTS // (BLOCK * self.inputs))
        for begin in range(0, blocks, step):
            some = slice(begin, begin + step)
            codes = self._codes(data[some])
            into[some] = self.kind.expanded(codes).view(-1, BLOCK, self.inputs)

    def _codes(self, data: torch.Tensor) -> Codes:
        layout, groups = self.layout, -(-self.inputs // self.layout.group)
        at, end, _ = layout.places(self.inputs, self.kind.bits)
        codes = self.kind.codes(data[:, :at], self.inputs)
        scales = _of_groups(data[:, at:end].contiguous().view(layout.scales), groups)
        zeros = None
        if layout.has_zeros:
            zeros = _of_groups(data[:, end : end + groups * BLOCK], groups)
        return Codes(codes, scales, layout.group, zeros, layout.factor)


def _of_groups(blocks: torch.Tensor, groups: int) -> torch.Tensor:
    """[blocks · outputs, groups] from [blocks, groups · outputs]."""
    return blocks.reshape(len(blocks), groups, -1).transpose(1, 2).reshape(-1, groups)


@dataclass(frozen=True)
class TritonExpansion:
    """Expansion of weights in one kernel."""

    kind: type[ScaledWeight]
    inputs: int
    layout: Layout

    def __call__(self, rows: torch.Tensor, weights: torch.Tensor, first: int = 0) -> None:
        """Write weights as `Expansion` does."""
        kind, layout = self.kind, self.layout
        blocks = weights.numel() // (BLOCK * self.inputs)
        width = 16 // kind.bits
        scales_at, zeros_at, _ = layout.places(self.inputs, kind.bits)
        scales = rows.view(layout.scales) if layout.scales.itemsize > 1 else rows
        grid = (-(-self.inputs // (width * ROWS)), blocks)
        kernels().expand_scaled[grid](
            rows, rows.view(torch.int16), scales, weights, self.inputs, rows.numel() // blocks,
            scales_at, zeros_at, layout.group, layout.factor,
            kind.name, name_of(layout.scales), layout.outputs, kind.zero(), layout.has_zeros, ROWS,
            layout.group % (width * ROWS) == 0,
        )  # fmt: skip


def expansion_of(stack: Stack, device: torch.device) -> Expansion:
    """Expansion of the weights of a stack, whose rows say all: it is that of any outputs.

    Args:
        stack: of codes with scales.
        device: the GPU; for tests the CPU.

    """
    kind, layout = SCALED_FORMATS[stack.format], layout_of(stack.facts)
    # Each expert has a factor of its own, which the kernel is only handed.
    has_kernel = device.type == "cuda" and _works(kind, replace(layout, factor=1.0), device)
    return (TritonExpansion if has_kernel else TorchExpansion)(kind, stack.shape[1], layout)


@functools.cache
def _works(kind: type[ScaledWeight], layout: Layout, device: torch.device) -> bool:
    """Whether the kernel can be used on a device, and expands a small weight as torch does."""
    instead = (
        f"weights as {kind.name} are expanded by torch's operators, which makes prompts several "
        "times as long,"
    )
    if kind.name not in KNOWN:
        logger.warning("%s because there is no kernel for them", instead)
        return False
    return runs_with_triton(lambda: is_right(kind, layout, device), instead)


def is_right(kind: type[ScaledWeight], layout: Layout, device: torch.device) -> bool:
    """Whether the kernel and torch's operators expand a small weight of random bytes alike.

    Args:
        kind: of the weight's format.
        layout: of its scales and zero points.
        device: where both are computed.

    """
    scales_at, zeros_at, end = layout.places(CHECKED_INPUTS, kind.bits)
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(
        256, (CHECKED_BLOCKS, scales_at), dtype=torch.uint8, generator=generator
    )  # fmt: skip
    if kind.no_number:
        codes[(codes & kind.no_number) == kind.no_number] = 0
    scales = (zeros_at - scales_at) // layout.scales.itemsize
    drawn = 0.25 + torch.rand((CHECKED_BLOCKS, scales), generator=generator)
    # Behind the scales are zero points, where there are any.
    zeros = torch.randint(
        1 << kind.bits, (CHECKED_BLOCKS, end - zeros_at), dtype=torch.uint8, generator=generator
    )
    whole = torch.cat([codes, drawn.to(layout.scales).view(torch.uint8), zeros], 1).to(device)
    expected, found = torch.empty(
        (2, CHECKED_BLOCKS * BLOCK * CHECKED_INPUTS), dtype=torch.bfloat16, device=device
    )
    TorchExpansion(kind, CHECKED_INPUTS, layout)(whole.view(-1), expected)
    TritonExpansion(kind, CHECKED_INPUTS, layout)(whole.view(-1), found)
    return bool(torch.equal(expected.view(torch.int16), found.view(torch.int16)))

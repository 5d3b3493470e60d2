"""Codes with scales, and weights in 12 bits, made bf16 on a GPU, by one kernel of Triton and by
torch's operators.

    python benchmarks/gpu_expansions.py

Milliseconds for 7168 outputs of 4096 inputs, a piece of an 8B model's widest layer, and bytes read
and written a second.  Needs torch with CUDA, and neither vLLM nor Ray.
"""

from __future__ import annotations

from functools import partial

import torch
from gpu_timing import milliseconds

from ray_hetero.kernels.formats.base import BLOCK
from ray_hetero.kernels.formats.fp4 import Fp4Weight
from ray_hetero.kernels.formats.fp8 import Fp8Weight
from ray_hetero.kernels.formats.integers import Int4Weight, Int8Weight
from ray_hetero.kernels.formats.scaled import Layout, ScaledWeight
from ray_hetero.offload.expand import compact_expansion, scaled_expansion

OUTPUTS, INPUTS = 7168, 4096
CASES: tuple[tuple[type[ScaledWeight], Layout], ...] = (
    (Int4Weight, Layout(128, torch.bfloat16, False, False, 1.0)),
    (Int4Weight, Layout(128, torch.bfloat16, False, True, 1.0)),
    (Fp8Weight, Layout(128, torch.float32, True, False, 1.0)),
    (Fp8Weight, Layout(INPUTS, torch.float32, False, False, 1.0)),
    (Int8Weight, Layout(INPUTS, torch.float32, False, False, 1.0)),
    (Fp4Weight, Layout(32, torch.float8_e8m0fnu, False, False, 1.0)),
    (Fp4Weight, Layout(16, torch.float8_e4m3fn, False, False, 0.4)),
)


def main() -> None:
    """Measure and print."""
    gpu = torch.device("cuda:0")
    print(torch.cuda.get_device_name(gpu))
    compact(gpu)
    for kind, layout in CASES:
        is_right = scaled_expansion.is_right(kind, layout, gpu)
        *_, block = layout.places(INPUTS, kind.bits)
        rows = torch.randint(120, (OUTPUTS // BLOCK * block,), dtype=torch.uint8, device=gpu)
        weight = torch.empty(OUTPUTS * INPUTS, dtype=torch.bfloat16, device=gpu)
        for expansion in (
            scaled_expansion.TritonExpansion(kind, INPUTS, layout),
            scaled_expansion.TorchExpansion(kind, INPUTS, layout),
        ):
            taken = milliseconds(partial(expansion, rows, weight), 9)
            moved = (rows.numel() + 2 * weight.numel()) / taken / 1e6
            print(
                f"{kind.name}, groups of {layout.group}, scales {layout.scales}, "
                f"zero points {layout.has_zeros}, equal {is_right}: "
                f"{type(expansion).__name__} {taken:.3f} ms, {moved:.0f} GB/s"
            )


def compact(gpu: torch.device) -> None:
    """Weights in 12 bits."""
    upper = compact_expansion.upper_bytes(list(range(50, 66))).to(gpu)[None]
    rows = torch.randint(256, (OUTPUTS * INPUTS * 3 // 2,), dtype=torch.uint8, device=gpu)
    weight = torch.empty(OUTPUTS * INPUTS, dtype=torch.bfloat16, device=gpu)
    for expand in (compact_expansion.expand_with_triton, compact_expansion.expand_with_torch):
        taken = milliseconds(partial(expand, rows, upper, INPUTS, weight), 9)
        moved = (rows.numel() + 2 * weight.numel()) / taken / 1e6
        print(f"12 bits: {expand.__name__} {taken:.3f} ms, {moved:.0f} GB/s")


if __name__ == "__main__":
    main()

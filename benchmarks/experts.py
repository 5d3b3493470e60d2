"""Time of a layer of routed experts, measured on several layers in turn so that no cache helps.

    python benchmarks/experts.py
    python benchmarks/experts.py --shape 256x7168x2048x8 --layers 1
    python benchmarks/experts.py --kt-kernel DIR --kernels packed,compact,kt-kernel
    python benchmarks/experts.py --kt-kernel DIR --kernels fp8,kt-kernel-fp8

Kernels:

    packed, compact  this project's, of weights in bf16 that are held in that format
    fp8              this project's, of a checkpoint in FP8 with scales for blocks of 128 x 128
    mxfp4, mxfp8, nvfp4
                     this project's, of random codes with scales as these formats have them
    mxfp4-zeros      the same as mxfp4 with scales of 0, whose products would be denormal: it takes
                     the time of mxfp4
    vllm             vLLM's for CPUs, of weights in bf16
    kt-kernel        kt-kernel's, of weights in bf16
    kt-kernel-fp8    kt-kernel's, of the weights of `fp8`

Prints for each kernel and number of tokens the milliseconds of a layer, the GB/s of the bytes that
it reads (the experts that are used, as they are held), and these as a share of what the processors
can read at most; a kernel's lines before the next one is made.  Weights are those of
expert_weights.py; each token chooses its experts evenly.  Needs PyTorch and the native modules;
vLLM only for the kernel `vllm`, and kt_kernel.py says what the last two need.  Start it with the
environment of a CPU rank (OMP_NUM_THREADS, LD_PRELOAD, GOMP_CPU_AFFINITY), and leave kt-kernel one
processor more than threads.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
import torch
from expert_weights import (
    SCALE_BLOCK,
    VARIANTS,
    BlockScaled,
    Repeated,
    Shape,
    experts_of,
    fp8_experts_of,
)

from placement.host.cpulist import parse_cpulist
from placement.host.native import read_bandwidth
from ray_hetero import _streaming_linear as native
from ray_hetero.kernels.experts.activations import Order
from ray_hetero.kernels.experts.expert_matrices import ExpertMatrices
from ray_hetero.kernels.experts.routed_experts import RoutedExperts, paired
from ray_hetero.kernels.formats import FORMATS
from ray_hetero.kernels.formats.fp4 import Fp4Weight
from ray_hetero.kernels.formats.fp8 import Fp8Weight
from ray_hetero.kernels.formats.scaled import Codes, ScaledWeight

KT_KINDS = {"kt-kernel": "AMXBF16_MOE", "kt-kernel-fp8": "AMXFP8_MOE"}
"""kt-kernel's classes by kernel; each is in its builds for AMX and for AVX512-BF16."""
Compute = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(x, weights, ids) → y, of one layer."""


@dataclass
class Layer:
    """How one kernel computes a layer, and what an expert's weights take there."""

    compute: Compute
    expert_bytes: float


def own_layer(shape: Shape, kind: str, level: Any) -> Layer:
    """This project's kernel."""
    gate_ups, downs = experts_of(shape)
    experts = RoutedExperts(
        ExpertMatrices(
            Repeated(gate_ups, shape.experts),  # type: ignore[arg-type]
            Repeated(downs, shape.experts),  # type: ignore[arg-type]
        ),
        native=native, level=level, kind=FORMATS[kind],
    )  # fmt: skip
    return Layer(experts, experts.nbytes / shape.experts)


def fp8_layer(shape: Shape, level: Any) -> Layer:
    """This project's kernel, of weights in FP8 as a CPU rank holds those of a checkpoint."""
    gate_ups, downs = fp8_experts_of(shape)
    few = [
        (fp8_weight(gate_up, is_gate_up=True), fp8_weight(down, is_gate_up=False))
        for gate_up, down in zip(gate_ups, downs, strict=True)
    ]
    experts = RoutedExperts.of_weights(
        itertools.islice(itertools.cycle(few), shape.experts), shape.experts,
        native=native, level=level,
    )  # fmt: skip
    return Layer(experts, experts.nbytes / shape.experts)


def fp8_weight(weight: BlockScaled, *, is_gate_up: bool) -> Fp8Weight:
    """Each output gets scales of its own, since those of gate and up are put in another order.

    The same as `held` in kernels/experts/quantised_experts.py, which needs vLLM.
    """
    codes = weight.codes.view(torch.uint8)
    scales = weight.scales.repeat_interleave(SCALE_BLOCK, 0)
    if is_gate_up:
        codes, scales = (paired(one, Order.HALVES) for one in (codes, scales))
    return Fp8Weight.stored(Codes(codes, scales, SCALE_BLOCK), native)


@dataclass(frozen=True)
class Coded:
    """A format of codes with scales for groups."""

    kind: type[ScaledWeight]
    group: int
    scales: Callable[[tuple[int, int]], torch.Tensor]
    """Scales of a shape."""


def exponents(first: int, last: int) -> Callable[[tuple[int, int]], torch.Tensor]:
    """Scales as powers of two, whose codes are from `first` up to `last`."""
    return lambda shape: torch.randint(first, last + 1, shape, dtype=torch.uint8).view(
        torch.float8_e8m0fnu
    )


CODED = {
    "mxfp4": Coded(Fp4Weight, 32, exponents(118, 124)),
    "mxfp4-zeros": Coded(Fp4Weight, 32, exponents(0, 0)),
    "mxfp8": Coded(Fp8Weight, 32, exponents(114, 118)),
    "nvfp4": Coded(
        Fp4Weight, 16, lambda shape: torch.rand(shape).add_(0.5).to(torch.float8_e4m3fn)
    ),
}
"""Formats whose codes are random: their time does not depend on values."""
FACTOR = 2.0**-6
"""Factor of scales in E4M3."""


def coded_layer(shape: Shape, name: str, level: Any) -> Layer:
    """This project's kernel, of random codes."""
    coded = CODED[name]
    # No code is NaN.
    most = 16 if coded.kind.bits == Fp4Weight.bits else 0x7F

    def weight(outputs: int, inputs: int) -> ScaledWeight:
        codes = torch.randint(most, (outputs, inputs), dtype=torch.uint8)
        scales = coded.scales((outputs, inputs // coded.group))
        return coded.kind.stored(Codes(codes, scales, coded.group, factor=FACTOR), native)

    few = [
        (weight(2 * shape.inner, shape.hidden), weight(shape.hidden, shape.inner))
        for _ in range(VARIANTS)
    ]
    experts = RoutedExperts.of_weights(
        itertools.islice(itertools.cycle(few), shape.experts), shape.experts,
        native=native, level=level,
    )  # fmt: skip
    return Layer(experts, experts.nbytes / shape.experts)


def vllm_layer(shape: Shape) -> Layer:
    """vLLM's kernel for CPUs."""
    from vllm import _custom_ops as ops

    isa = "amx" if torch.cpu._is_amx_tile_supported() else "vec"
    w13, w2 = (
        ops.cpu_prepack_moe_weight(torch.stack(list(Repeated(few, shape.experts))), isa)
        for few in experts_of(shape)
    )

    def compute(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        y = torch.empty_like(x)
        ops.cpu_fused_moe(y, x, w13, w2, None, None, weights, ids, "silu", isa)
        return y

    return Layer(compute, 2 * shape.weights)


def kt_layer(shape: Shape, kernel: Any, most_tokens: int, *, is_fp8: bool) -> Layer:
    """kt-kernel's."""

    def addresses(gate_ups: list[torch.Tensor], downs: list[torch.Tensor]) -> list[list[int]]:
        gates, ups = zip(*(one.chunk(2) for one in gate_ups), strict=True)
        return [
            [few[number % VARIANTS].data_ptr() for number in range(shape.experts)]
            for few in (gates, ups, downs)
        ]

    sizes = (shape.experts, shape.chosen, shape.hidden, shape.inner)
    if is_fp8:
        both = fp8_experts_of(shape)
        codes, scales = (
            addresses(*([getattr(one, part) for one in few] for few in both))
            for part in ("codes", "scales")
        )
        layer = kernel.layer(sizes, *codes, most_tokens, scales)
        expert_bytes = sum(few[0].nbytes for few in both)
    else:
        layer = kernel.layer(sizes, *addresses(*experts_of(shape)), most_tokens)
        expert_bytes = 2 * shape.weights

    def compute(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        y, wide = torch.empty_like(x), ids.long()
        layer(*wide.shape, wide.data_ptr(), weights.data_ptr(), x.data_ptr(), y.data_ptr())
        return y

    return Layer(compute, expert_bytes)


def measured(layers: list[Layer], shape: Shape, tokens: int, repeats: int) -> tuple[float, float]:
    """Seconds of a layer, the median of some rounds over all, and bytes that it reads."""
    x = torch.randn(tokens, shape.hidden).bfloat16()
    weights = torch.rand(tokens, shape.chosen)
    times, used = [], []
    for _ in range(repeats + 1):
        routes = [shape.route(tokens) for _ in layers]
        used += [len(ids.unique()) for ids in routes]
        start = time.perf_counter()
        for layer, ids in zip(layers, routes, strict=True):
            layer.compute(x, weights, ids)
        times.append((time.perf_counter() - start) / len(layers))
    return statistics.median(times[1:]), statistics.mean(used) * layers[0].expert_bytes


def maker(name: str, shape: Shape, options: argparse.Namespace) -> Callable[[], Layer]:
    """Function that makes the layers of a kernel."""
    if name in FORMATS or name in CODED or name == Fp8Weight.name:
        level = native.level(options.level) if options.level else native.levels()[-1]
        print(f"{name}: {level}", flush=True)
        if name == Fp8Weight.name:
            return functools.partial(fp8_layer, shape, level)
        if name in CODED:
            return functools.partial(coded_layer, shape, name, level)
        return functools.partial(own_layer, shape, name, level)
    if name == "vllm":
        from vllm.platforms import current_platform

        current_platform.import_kernels()
        return functools.partial(vllm_layer, shape)
    if name in KT_KINDS and options.kt_kernel:
        from kt_kernel import KtKernel

        build = "amx" if torch.cpu._is_amx_tile_supported() else "avx512_bf16"
        print(f"{name}: {KT_KINDS[name]} of its build for {build}", flush=True)
        kernel = KtKernel(options.kt_kernel, torch.get_num_threads(), build, KT_KINDS[name])
        return functools.partial(
            kt_layer, shape, kernel, max(options.tokens), is_fp8=name == "kt-kernel-fp8"
        )
    known = ", ".join((*FORMATS, Fp8Weight.name, *CODED, "vllm"))
    sys.exit(f"{name}: expected {known}, or {' or '.join(KT_KINDS)} with --kt-kernel")


def cpus() -> list[int]:
    """Those that the threads of this process are bound to."""
    bound = os.environ.get("GOMP_CPU_AFFINITY")
    if bound:
        return list(parse_cpulist(",".join(bound.replace(",", " ").split())))
    return sorted(os.sched_getaffinity(0))


def main() -> None:
    """Measure and print one line a kernel and number of tokens."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", type=Shape.parse, default="128x2048x768x8",
                        help="experts x hidden x inner x experts of a token")  # fmt: skip
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--tokens", type=lambda text: [int(one) for one in text.split(",")],
                        default="1,8,32,128,1024")  # fmt: skip
    parser.add_argument("--kernels", default="packed,compact")
    parser.add_argument("--level", help="instruction set; the best of this processor")
    parser.add_argument("--kt-kernel", type=Path, metavar="DIR", help="see kt_kernel.py")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--label", default="")
    options = parser.parse_args()
    threads = torch.get_num_threads()
    probe = read_bandwidth(cpus()[:threads])
    print(f"{threads} threads, whose processors read {probe / 1e9:.1f} GB/s", flush=True)
    for name in options.kernels.split(","):
        make = maker(name, options.shape, options)
        layers = [make() for _ in range(options.layers)]
        for tokens in options.tokens:
            seconds, nbytes = measured(layers, options.shape, tokens, options.repeats)
            result = {
                "label": options.label, "kernel": name, "tokens": tokens, "threads": threads,
                "ms": round(seconds * 1000, 3), "gb_s": round(nbytes / seconds / 1e9, 1),
                "of_probe": round(nbytes / seconds / probe, 3),
            }  # fmt: skip
            print("RESULT " + json.dumps(result), flush=True)
        # kt-kernel's threads end with it.
        del layers, make


if __name__ == "__main__":
    main()

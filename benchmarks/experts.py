"""What a layer of routed experts costs, on several layers in turn so that no cache helps.

    python benchmarks/experts.py
    python benchmarks/experts.py --shape 256x7168x2048x8 --layers 1
    python benchmarks/experts.py --kt-kernel DIR --kernels packed,compact,kt-kernel

Prints for each kernel and number of tokens the milliseconds of a layer, the GB/s of the bytes that
it reads (the experts that are used, as they are held), and these as a share of what the processors
can read at most.  Weights are heavy-tailed, as trained ones are (Student's t with 5 degrees of
freedom); each token chooses its experts evenly.  Needs PyTorch and the native modules; vLLM only
for the kernel `vllm`.  Start it with the environment of a CPU rank (OMP_NUM_THREADS, LD_PRELOAD,
GOMP_CPU_AFFINITY).
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
import torch

from placement.host.cpulist import parse_cpulist
from placement.host.native import read_bandwidth
from ray_hetero import _streaming_linear as native
from ray_hetero.kernels.experts import RoutedExperts
from ray_hetero.weight_formats import FORMATS

DEGREES = 5
VARIANTS = 4
"""Experts of different values; the others are copies of these."""
Compute = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(x, weights, ids) → y, of one layer."""


@dataclass(frozen=True)
class Shape:
    """A layer's experts."""

    experts: int
    hidden: int
    inner: int
    chosen: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        """From experts x hidden x inner x experts of a token."""
        return cls(*map(int, text.split("x")))

    @property
    def weights(self) -> int:
        """Of one expert."""
        return 3 * self.hidden * self.inner

    def route(self, tokens: int) -> torch.Tensor:
        """Ids [tokens, chosen] of experts that are chosen evenly, none twice by a token."""
        return torch.rand(tokens, self.experts).topk(self.chosen).indices.int()


@dataclass
class Layer:
    """How one kernel computes a layer, and what an expert's weights take there."""

    compute: Compute
    expert_bytes: float


def heavy_tailed(outputs: int, inputs: int) -> torch.Tensor:
    """Random weights [outputs, inputs], bf16."""
    values = torch.distributions.StudentT(float(DEGREES)).sample((outputs, inputs))
    return (values * inputs**-0.5).bfloat16()


def experts_of(shape: Shape) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Gate and up [2 · inner, hidden] and down [hidden, inner] of some experts."""
    return (
        [heavy_tailed(2 * shape.inner, shape.hidden) for _ in range(VARIANTS)],
        [heavy_tailed(shape.hidden, shape.inner) for _ in range(VARIANTS)],
    )


class Repeated:
    """Experts [E, …] that take the memory of a few; iterated over by who packs them."""

    def __init__(self, few: list[torch.Tensor], count: int) -> None:
        self._few = few
        self.shape = (count, *few[0].shape)

    def __iter__(self) -> Iterator[torch.Tensor]:
        for number in range(self.shape[0]):
            yield self._few[number % len(self._few)]


def own_layer(shape: Shape, kind: str, level: Any) -> Layer:
    """This project's kernel."""
    gate_ups, downs = experts_of(shape)
    experts = RoutedExperts(
        Repeated(gate_ups, shape.experts),  # type: ignore[arg-type]
        Repeated(downs, shape.experts),  # type: ignore[arg-type]
        native=native, level=level, kind=FORMATS[kind],
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


def kt_layer(shape: Shape, kernel: Any, most_tokens: int) -> Layer:
    """kt-kernel's."""
    gate_ups, downs = experts_of(shape)
    gates, ups = zip(*(one.chunk(2) for one in gate_ups), strict=True)
    addresses = [
        [few[number % VARIANTS].data_ptr() for number in range(shape.experts)]
        for few in (gates, ups, downs)
    ]
    sizes = (shape.experts, shape.chosen, shape.hidden, shape.inner)
    layer = kernel.layer(sizes, *addresses, most_tokens)

    def compute(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        y, wide = torch.empty_like(x), ids.long()
        layer(*wide.shape, wide.data_ptr(), weights.data_ptr(), x.data_ptr(), y.data_ptr())
        return y

    return Layer(compute, 2 * shape.weights)


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
    """What makes the layers of a kernel."""
    if name in FORMATS:
        level = native.level(options.level) if options.level else native.levels()[-1]
        print(f"{name}: {level}", flush=True)
        return functools.partial(own_layer, shape, name, level)
    if name == "vllm":
        from vllm.platforms import current_platform

        current_platform.import_kernels()
        return functools.partial(vllm_layer, shape)
    if name == "kt-kernel" and options.kt_kernel:
        from kt_kernel import KtKernel

        kernel = KtKernel(options.kt_kernel, torch.get_num_threads())
        return functools.partial(kt_layer, shape, kernel, max(options.tokens))
    sys.exit(f"{name}: expected {', '.join(FORMATS)}, vllm, or kt-kernel with --kt-kernel")


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
        del layers


if __name__ == "__main__":
    main()

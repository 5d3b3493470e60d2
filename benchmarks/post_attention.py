"""Gain of fusing the layers of a CPU rank: the same layers as products alone, operator by
operator, and as one operator each; milliseconds a layer, the three in turns.

    python benchmarks/post_attention.py --shape 1b --tokens 1,4

Without attention.  Start it with the environment of a CPU rank (OMP_NUM_THREADS, LD_PRELOAD,
GOMP_CPU_AFFINITY).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable

os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
import torch
from shapes import SHAPES, layer_bytes

from ray_hetero.config import CpuConfig
from ray_hetero.kernels.formats import PackedWeight
from ray_hetero.kernels.formats.base import pack
from ray_hetero.kernels.layers.layer_parts import Linear, Norm, PostAttention, QkvInput
from ray_hetero.kernels.layers.post_attention import PostAttentionBlock
from ray_hetero.kernels.linear import streaming_linear
from ray_hetero.kernels.linear.streaming_linear import StreamingLinear

Ways = dict[str, Callable[[torch.Tensor, torch.Tensor], None]]


def packed(outputs: int, inputs: int) -> Linear:
    """Random weights."""
    weight = torch.randn(outputs, inputs).mul_(inputs**-0.5).bfloat16()
    return Linear(PackedWeight.made(pack(weight), streaming_linear._native), None)


def made(shape: dict[str, int], kernel: StreamingLinear) -> PostAttentionBlock:
    """One layer, from its attention to the next."""
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    kv = shape["num_key_value_heads"] * hidden // shape["num_attention_heads"]
    first, second = (Norm(torch.ones(hidden).bfloat16(), 1e-5) for _ in range(2))
    parts = PostAttention(
        packed(hidden, hidden), first, packed(2 * inner, hidden), packed(hidden, inner),
        QkvInput(second, packed(hidden + 2 * kv, hidden)),
    )  # fmt: skip
    return PostAttentionBlock(parts, kernel)


def ways(layers: list[PostAttentionBlock], kernel: StreamingLinear) -> Ways:
    """How to compute all layers, from [M, hidden] and a residual of that shape."""

    def products(x: torch.Tensor, residual: torch.Tensor) -> None:
        inner = x.new_zeros((len(x), layers[0].parts.down.weight.shape[1]))
        for layer in layers:
            for linear in layer.parts.linears:
                width = linear.weight.shape[1]
                kernel.compute(x if width == x.shape[1] else inner, linear.weight, None)

    def operators(x: torch.Tensor, residual: torch.Tensor) -> None:
        for layer in layers:
            _, residual = layer.one_by_one(x, residual)

    def fused(x: torch.Tensor, residual: torch.Tensor) -> None:
        for layer in layers:
            _, residual = layer(x, residual)

    return {"products": products, "operators": operators, "fused": fused}


def main() -> None:
    """Measure and print one line a way and number of tokens."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", default="1,8,32")
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    kernel = streaming_linear.choose(CpuConfig(linear_kernel="streaming"))
    assert kernel is not None
    shape = SHAPES[options.shape]
    layers = [made(shape, kernel) for _ in range(options.layers)]
    for tokens in map(int, options.tokens.split(",")):
        x, residual = (torch.randn(tokens, shape["hidden_size"]).bfloat16() for _ in range(2))
        times: dict[str, list[float]] = {}
        for _ in range(options.repeats + 1):
            for name, compute in ways(layers, kernel).items():
                start = time.perf_counter()
                compute(x, residual)
                times.setdefault(name, []).append(time.perf_counter() - start)
        for name, seconds in times.items():
            median = statistics.median(seconds[1:]) / len(layers)
            result = {
                "way": name, "tokens": tokens, "ms_a_layer": round(1000 * median, 3),
                "gb_s": round(layer_bytes(shape) / median / 1e9, 1),
                "threads": torch.get_num_threads(), "shape": options.shape,
            }  # fmt: skip
            print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()

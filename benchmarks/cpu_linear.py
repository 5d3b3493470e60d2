"""Bandwidth of the linear kernels that a CPU rank may use, on the weights of 8B-shaped layers.

Weights are heavy-tailed, as trained ones are.  Prints, for each kernel and number of tokens,
milliseconds and GB/s of weights for all layers, each weight counted with 16 bits (`gb_s`) and with
the bytes that are really read (`read_gb_s`).
Start it with the environment of a CPU rank (OMP_NUM_THREADS, LD_PRELOAD, GOMP_CPU_AFFINITY).
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
import torch
from heavy_tailed import drawn_matrix, drawn_values

from ray_hetero import _streaming_linear
from ray_hetero.kernels.formats import FORMATS, SCALED_FORMATS, HostWeight
from ray_hetero.kernels.formats.base import pack
from ray_hetero.kernels.formats.scaled import Codes

LEVELS = {level.name: level for level in _streaming_linear.levels()[2:]}
"""Sets of instructions that this processor has, without those for tests."""
HELD = (*FORMATS, *SCALED_FORMATS)
KERNELS = (
    "onednn",
    "sgl",
    "torch",
    "torch-packed",
    *(f"{name}-{level}" for name in HELD for level in LEVELS),
)
OF_VLLM = {"onednn", "sgl"}
"""Kernels that need vLLM's build for CPUs; the others need torch alone, which has a oneDNN too."""
SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}


@dataclass(frozen=True)
class Kernel:
    """Kernel of one layer."""

    run: Callable[[torch.Tensor], torch.Tensor]
    nbytes: int
    """Bytes of its weight, all of which a call reads."""


def kernels(weight: torch.Tensor, wanted: Collection[str], most_tokens: int) -> dict[str, Kernel]:
    """Each of the wanted kernels over its own copy of the weight, [N, K].

    `torch-packed` is oneDNN with weights in the blocks that it chooses for `most_tokens`, as
    Inductor calls it when it freezes a model; `torch` gives oneDNN the weight as it is.
    """
    made: dict[str, Kernel] = {}
    packed = pack(weight)
    made["torch"] = Kernel(lambda x: torch.nn.functional.linear(x, weight), weight.nbytes)
    if "torch-packed" in wanted:
        blocks = torch.ops.mkldnn._reorder_linear_weight(weight, most_tokens)
        made["torch-packed"] = Kernel(
            lambda x: torch.ops.mkldnn._linear_pointwise(x, blocks, None, "none", [], ""),
            weight.nbytes,
        )
    if OF_VLLM & set(wanted):
        from vllm import _custom_ops as ops

        # Builds of vLLM for AVX2 lack some of these.
        if "onednn" in wanted and hasattr(torch.ops._C, "create_onednn_mm_handler"):
            handler = ops.create_onednn_mm(weight.t(), 32)
            made["onednn"] = Kernel(lambda x: ops.onednn_mm(handler, x, None), weight.nbytes)
        if hasattr(torch.ops._C, "weight_packed_linear"):
            made["sgl"] = Kernel(
                lambda x: ops.weight_packed_linear_cpu(x, packed, weight.shape[0], None),
                weight.nbytes,
            )
    for name in HELD:
        if any(f"{name}-{level}" in wanted for level in LEVELS):
            held = held_as(name, packed)
            for level in LEVELS:
                run = functools.partial(_streaming, held, LEVELS[level])
                made[f"{name}-{level}"] = Kernel(run, held.data.nbytes)
    return {name: kernel for name, kernel in made.items() if name in wanted}


def held_as(name: str, packed: torch.Tensor) -> HostWeight:
    """The weight in a format; of quantised ones only the shape is that of the weight."""
    if name in FORMATS:
        held = FORMATS[name].made(packed, _streaming_linear)
        assert held is not None
        return held
    outputs, inputs = packed.shape
    scales, group = {
        "int4": (torch.rand(outputs, inputs // 128).bfloat16(), 128),
        "int8": (torch.rand(outputs, 1), inputs),
        "fp8": (torch.rand(outputs // 32, inputs // 128), 128),
        "fp4": (torch.full((outputs, inputs // 32), 0.5).to(torch.float8_e8m0fnu), 32),
    }[name]
    if name == "fp8":
        # As scales for blocks leave them: few codes are denormal, which some levels look up.
        values = packed.view(-1).float() / packed.abs().max() * torch.finfo(torch.float8_e4m3fn).max
        codes = values.to(torch.float8_e4m3fn).view(torch.uint8).view(outputs, inputs)
    else:
        codes = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8)
    return SCALED_FORMATS[name].stored(Codes(codes, scales, group), _streaming_linear)


def _streaming(weight: HostWeight, level: object, x: torch.Tensor) -> torch.Tensor:
    tokens = x.shape[0]
    y = torch.empty(tokens, weight.shape[0], dtype=x.dtype)
    _streaming_linear.linear(
        x=x.data_ptr(), stride=x.stride(0), w=weight.data.data_ptr(), encoding=weight.encoding,
        bias=0, y=y.data_ptr(), m=tokens, level=level,
    )  # fmt: skip
    return y


def main() -> None:
    """Measure and print one line a kernel and number of tokens."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", default="1,8,32,128")
    parser.add_argument("--label", default="")
    parser.add_argument("--kernels", default=",".join(KERNELS))
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    wanted = options.kernels.split(",")
    most_tokens = max(map(int, options.tokens.split(",")))
    if OF_VLLM & set(wanted):
        from vllm.platforms import current_platform

        current_platform.import_kernels()
    layers = []
    nbytes = 0
    drawn = drawn_values()
    random = {shape: drawn_matrix(drawn, *shape) for shape in SHAPES.values()}
    for _ in range(options.layers):
        for shape in SHAPES.values():
            weight = random[shape].clone()
            nbytes += weight.nbytes
            layers.append((shape[1], kernels(weight, wanted, most_tokens)))
    for name in (name for name in wanted if name in layers[0][1]):
        for tokens in map(int, options.tokens.split(",")):
            inputs = {k: torch.randn(tokens, k).to(torch.bfloat16) for k in (4096, 14336)}
            times = []
            for _ in range(options.repeats + 1):
                start = time.perf_counter()
                for width, made in layers:
                    if name in made:
                        made[name].run(inputs[width])
                times.append(time.perf_counter() - start)
            best = sorted(times[1:])[len(times[1:]) // 2]
            read = sum(made[name].nbytes for _, made in layers if name in made)
            result = {
                "label": options.label, "kernel": name, "tokens": tokens,
                "ms": round(best * 1000, 2), "gb_s": round(nbytes / best / 1e9, 1),
                "read_gb_s": round(read / best / 1e9, 1),
                "threads": torch.get_num_threads(),
            }  # fmt: skip
            print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()

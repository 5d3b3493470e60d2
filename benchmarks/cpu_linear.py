"""Bandwidth of the linear kernels that a CPU rank may use, on the weights of 8B-shaped layers.

Prints, for each kernel and number of tokens, milliseconds and GB/s of weights for all layers;
compact weights are counted with the 16 bits that they stand for.
Start it with the environment of a CPU rank (OMP_NUM_THREADS, LD_PRELOAD, GOMP_CPU_AFFINITY).
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import time
from collections.abc import Callable

os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
import torch

from ray_hetero import _streaming_linear
from ray_hetero.kernels.packed_weights import PackedWeight, made_compact, pack

KERNELS = ("onednn", "sgl", "streaming-avx512", "streaming-amx", "compact-avx512", "compact-amx")
SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}


def kernels(weight: torch.Tensor) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """Each kernel over its own copy of the weight, [N, K]."""
    from vllm import _custom_ops as ops

    made: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {}
    handler = ops.create_onednn_mm(weight.t(), 32)
    made["onednn"] = lambda x: ops.onednn_mm(handler, x, None)
    packed = pack(weight)
    made["sgl"] = lambda x: ops.weight_packed_linear_cpu(x, packed, weight.shape[0], None)
    made["torch"] = lambda x: torch.nn.functional.linear(x, weight)
    plain, compact = PackedWeight(packed), made_compact(packed, _streaming_linear)
    assert compact.compact is not None
    for name, use_amx in (("avx512", False), ("amx", True)):
        if use_amx <= _streaming_linear.has_amx():
            made[f"streaming-{name}"] = functools.partial(_streaming, plain, use_amx)
            made[f"compact-{name}"] = functools.partial(_streaming, compact, use_amx)
    return made


def _streaming(weight: PackedWeight, use_amx: bool, x: torch.Tensor) -> torch.Tensor:
    (outputs, inputs), tokens = weight.shape, x.shape[0]
    y = torch.empty(tokens, outputs, dtype=x.dtype)
    _streaming_linear.linear(
        x.data_ptr(), x.stride(0), weight.data.data_ptr(), 0, y.data_ptr(), tokens, outputs, inputs,
        use_amx, weight.compact,
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
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    wanted = options.kernels.split(",")
    layers = []
    nbytes = 0
    random = {shape: torch.randn(shape).mul_(0.02).to(torch.bfloat16) for shape in SHAPES.values()}
    for _ in range(options.layers):
        for shape in SHAPES.values():
            weight = random[shape].clone()
            nbytes += weight.nbytes
            layers.append((shape[1], {k: f for k, f in kernels(weight).items() if k in wanted}))
    for name in wanted:
        for tokens in map(int, options.tokens.split(",")):
            inputs = {k: torch.randn(tokens, k).to(torch.bfloat16) for k in (4096, 14336)}
            times = []
            for _ in range(options.repeats + 1):
                start = time.perf_counter()
                for width, made in layers:
                    if name in made:
                        made[name](inputs[width])
                times.append(time.perf_counter() - start)
            best = sorted(times[1:])[len(times[1:]) // 2]
            result = {
                "label": options.label, "kernel": name, "tokens": tokens,
                "ms": round(best * 1000, 2), "gb_s": round(nbytes / best / 1e9, 1),
                "threads": torch.get_num_threads(),
            }  # fmt: skip
            print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()

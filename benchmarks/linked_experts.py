"""Time of a layer of experts on a GPU that reads it from host memory, by operation.

    python benchmarks/linked_experts.py
    python benchmarks/linked_experts.py --shape 256x7168x2048x8 --layers 1 --gib 4
    python benchmarks/linked_experts.py --kinds compact --tokens 8192 --profile
    python benchmarks/linked_experts.py --kinds compact --tokens 512,1024,7168 --split 0,0.5,0.75,1

Needs a GPU, vLLM and the native modules.  Milliseconds a layer, medians, several layers in turn:

    link      its experts copied to the GPU, nothing computed
    gpu       all computed, nothing copied
    layer     both, as a stage has it computed
    floor     the larger of `link` and `gpu`

and, with `--cores`, what the cores of this process take.  With `--split` a process beside this one
holds the experts, as an expert rank does, and what is measured is a layer of which the GPU computes
some shares of the experts while that process computes the others: those that are given, and the
one that a stage would choose.  Weights are heavy-tailed, as those of `experts.py`; tokens choose
evenly.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import time
from typing import Any

os.environ.setdefault("VLLM_TARGET_DEVICE", "cuda")
import split_experts
import torch
from expert_weights import Shape
from gpu_timing import copied, milliseconds, without_copies

from placement.units import GIB
from ray_hetero.kernels.experts.expert_rates import random_tokens
from ray_hetero.kernels.experts.routed_experts import RoutedExperts
from ray_hetero.offload.expand.compact_expansion import choose_expand
from ray_hetero.offload.experts.gpu_experts import GpuExperts
from ray_hetero.offload.experts.linked_experts import received, shared


def main() -> None:
    """Measure, and print a line for each format and number of tokens."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", type=Shape.parse, default=Shape(128, 2048, 768, 8))
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--kinds", default="packed,compact")
    parser.add_argument("--tokens", default="256,512,1024,2048,8192")
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cores", action="store_true")
    parser.add_argument("--split", default="", help="shares of the experts that the GPU computes")
    parser.add_argument("--profile", action="store_true", help="name the kernels of a layer")
    options = parser.parse_args()
    for kind in options.kinds.split(","):
        if options.split:
            split_experts.measure(options, kind, torch.device("cuda:0"))
        else:
            measure(options, kind)


def measure(options: argparse.Namespace, kind: str) -> None:
    """Measure one format and print it."""
    shape, device = options.shape, torch.device("cuda:0")
    layers, slices = [], []
    for _ in range(options.layers):
        layer = split_experts.made_layer(shape, kind)
        pages = shared(layer)
        assert pages is not None
        layers.append(layer)
        slices.append((received(pages.descriptor, len(pages.memory)),))
    start = time.perf_counter()
    gpu = GpuExperts(device, slices, shape.chosen, options.gib)
    about = {
        "gpu": torch.cuda.get_device_name(), "kind": kind, "layers": len(layers),
        "layer_gib": round(gpu.nbytes / len(layers) / GIB, 3), "piece": gpu.experts,
        "taken_gib": round(gpu.gpu_bytes / GIB, 2),
        "huge": round(pages.huge_bytes / pages.prepared_bytes, 2),
        "expanded_by": choose_expand(device).__name__,
        "take_s": round(time.perf_counter() - start, 1),
    }  # fmt: skip
    print("ABOUT " + json.dumps(about), flush=True)
    # Private names: what only a benchmark leaves out.
    reader, turn = gpu._reader, itertools.count()

    def copy() -> None:
        copied(reader, gpu._pieces.first(next(turn) % len(layers), shape.experts))

    link = milliseconds(copy, options.repeats)
    for tokens in map(int, options.tokens.split(",")):
        given = random_tokens(tokens, shape.hidden, shape.experts, shape.chosen)
        x, weights, ids = (tensor.to(device) for tensor in given)

        def run(x: Any = x, weights: Any = weights, ids: Any = ids) -> None:
            # As in a step: nothing is computed while the first layer's pieces come.
            for layer in range(len(layers)):
                gpu.begin(ids, layer)
                gpu.sums(x, weights, ids, layer)

        found: dict[str, float] = {"link_ms": link}
        with without_copies(reader):
            found["gpu_ms"] = round(milliseconds(run, options.repeats) / len(layers), 2)
        found["layer_ms"] = round(milliseconds(run, options.repeats) / len(layers), 2)
        found["floor_ms"] = max(link, found["gpu_ms"])
        if options.cores:
            found["cores_ms"] = on_cores(layers, given, options.repeats)
        result = {
            "kind": kind, "tokens": tokens, **found,
            "link_gb_s": round(gpu.nbytes / len(layers) / link / 1e6, 1),
            "peak_gib": round(torch.cuda.max_memory_allocated() / GIB, 2),
        }  # fmt: skip
        print("RESULT " + json.dumps(result), flush=True)
        if options.profile:
            activities = [torch.profiler.ProfilerActivity.CUDA]
            with torch.profiler.profile(activities=activities) as profile:
                run()
                torch.cuda.synchronize()
            print(profile.key_averages().table(sort_by="cuda_time_total", row_limit=16))


def on_cores(layers: list[RoutedExperts], given: Any, repeats: int) -> float:
    """Milliseconds of a layer on the cores, in pieces as tokens are handed over."""
    x, weights, ids = given
    turn = itertools.count()

    def compute() -> None:
        layer = layers[next(turn) % len(layers)]
        for begin in range(0, len(x), 1024):
            rows = slice(begin, begin + 1024)
            layer(x[rows], weights[rows], ids[rows])

    return milliseconds(compute, repeats)


if __name__ == "__main__":
    main()

"""Whole layers of an 8B shape on a GPU, their weights streamed from host memory: where time goes.

    python benchmarks/prefill_layers.py --tokens 128,512,1024,2048,4096,8192
    python benchmarks/prefill_layers.py --tokens 2048 --cached 0,6144,30720   # later chunks
    python benchmarks/prefill_layers.py --tokens 8192 --profile               # which kernels
    python benchmarks/prefill_layers.py --tokens 8192 --ranks 2               # of a group of ranks
    OMP_NUM_THREADS=30 python benchmarks/prefill_layers.py --tokens 1024 --beside-gib 4.9  # mixed

Needs torch with CUDA, and neither vLLM nor Ray.  Milliseconds a step, medians:

    link      all weights copied to the GPU, nothing computed
    gpu       all computed, the weights not copied
    step      both, hidden states in and out, keys and values down; what a stage takes
    floor     the larger of `link` and `gpu`
    beside    so many GiB read by all threads of the cores, as by requests that decode beside a
              prompt, and nothing else; step_beside: `step` while they are read

Weights are random bits of the compact format (12 bits a weight; `--packed` has 16), so results mean
nothing; the cores write keys and values into the cache with torch, not with vLLM's kernel, which
takes about as long.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from gpu_timing import copied, milliseconds, without_copies
from shapes import SHAPES

from ray_hetero.kernels.formats import CompactWeight, PackedWeight
from ray_hetero.kernels.layers.kv_layouts import Caches
from ray_hetero.kernels.layers.layer_parts import AttentionShape, Norm, PostAttention, Scores
from ray_hetero.kernels.layers.step_rows import Request, StepRows
from ray_hetero.offload.expand.compact_expansion import choose_expand
from ray_hetero.offload.prefill.gpu_layers import AttentionMemory, GpuLayers
from ray_hetero.offload.prefill.offload_gpu import OffloadGpu
from ray_hetero.offload.weights.weight_pieces import WholeWeight

BLOCK = 128
OUTLIERS = 3e-4
"""Share of weights beside the rows, as trained weights have it."""


class RandomCompact:
    """Parts of a compact weight beside its rows, of random weights."""

    def __init__(self, outputs: int, inputs: int) -> None:
        self.codebook = [0x30 + number % 16 for number in range(16)]
        self._inputs = inputs
        self.shape = (outputs, inputs)
        self.packed_blocks: list[int] = []
        self.outliers_count = int(OUTLIERS * outputs * inputs)

    def outliers(self, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Places and values in some blocks."""
        weights = (end - begin) * 32 * self._inputs
        count = int(OUTLIERS * weights)
        return np.arange(count, dtype=np.int64) * (weights // max(1, count)), np.zeros(
            count, dtype=np.uint16
        )


def random_weight(outputs: int, inputs: int, *, is_compact: bool) -> Any:
    """A weight of random bits."""
    some = torch.randint(0x30, 0x3F, (1 << 20,), dtype=torch.uint8)
    width = inputs * 3 // 2 if is_compact else 2 * inputs
    data = torch.empty(outputs * width, dtype=torch.uint8)
    for begin in range(0, len(data), len(some)):
        data[begin : begin + len(some)] = some[: len(data) - begin]
    rows = data.view(outputs, width)
    if is_compact:
        return CompactWeight(rows, RandomCompact(outputs, inputs))
    return PackedWeight(rows.view(torch.bfloat16), SimpleNamespace(shape=(outputs, inputs)))


def made_layers(options: argparse.Namespace, gpu: OffloadGpu) -> tuple[list[Any], AttentionShape]:
    """Layers as `GpuLayers` takes them."""
    shape = SHAPES[options.shape]
    hidden, inner, heads = (
        shape[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads")
    )
    attention = AttentionShape(heads, shape["num_key_value_heads"], hidden // heads)
    cos_sin = torch.rand(options.most + options.cached[-1] + 1, attention.size).bfloat16()

    def norm() -> Any:
        return Norm(torch.ones(hidden).bfloat16(), 1e-5)

    ranks = options.ranks

    def made(outputs: int, inputs: int) -> list[Any]:
        return [random_weight(outputs, inputs, is_compact=not options.packed) for _ in range(ranks)]

    def linear(whole: WholeWeight) -> Any:
        gpu.add_whole(whole)
        return SimpleNamespace(weight=whole, bias=None)

    def by_columns(*sizes: int) -> Any:
        own = [size // ranks for size in sizes]
        return linear(WholeWeight.by_columns(made(sum(own), hidden), own))

    def by_rows(inputs: int) -> Any:
        return linear(WholeWeight.by_rows(made(hidden, inputs // ranks)))

    layers = [
        SimpleNamespace(
            input=SimpleNamespace(
                norm=norm(), qkv=by_columns(hidden, attention.keys, attention.keys)
            ),
            attention=SimpleNamespace(
                cos_sin=cos_sin, norms=[], scores=Scores(attention.size**-0.5)
            ),
            parts=PostAttention(
                by_rows(hidden), norm(), by_columns(inner, inner), by_rows(inner)
            ),
        )
        for _ in range(options.layers)
    ]  # fmt: skip
    return layers, attention


class Write:
    """Writes keys and values into a cache: as many bytes as vLLM's kernel writes."""

    isa = "amx"

    def __init__(self) -> None:
        self.impl = self

    def do_kv_cache_update(
        self, _: Any, keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:  # fmt: skip
        """Write them into blocks that lie one after the other, with all threads."""
        tokens, heads, size = keys.shape
        blocks = -(-tokens // BLOCK)
        first = int(slots[0]) // BLOCK
        for at, part in ((0, keys), (size, values)):
            into = cache[first : first + blocks, :, :, at : at + size].transpose(1, 2)
            whole = tokens // BLOCK
            into[:whole].copy_(part[: whole * BLOCK].view(whole, BLOCK, heads, size))
            if whole < blocks:
                into[whole, : tokens % BLOCK].copy_(part[whole * BLOCK :])


def link_only(gpu: OffloadGpu) -> None:
    """Copy all weights once."""
    # Private names: what only a benchmark leaves out.
    copied(gpu.reader, (placed.piece for found in gpu._pieces.values() for placed in found))


def main() -> None:
    """Measure, and print a line for each number of tokens."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--tokens", default="128,256,512,1024,2048,4096,8192")
    parser.add_argument("--cached", default="0", help="tokens before the step's, with commas")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=1, help="that hold a part of each layer")
    parser.add_argument("--packed", action="store_true", help="16 bits a weight")
    parser.add_argument("--beside-gib", type=float, help="that the cores read meanwhile")
    parser.add_argument("--profile", action="store_true", help="name the kernels of a step")
    options = parser.parse_args()
    tokens = sorted(map(int, options.tokens.split(",")))
    options.most, options.cached = tokens[-1], sorted(map(int, options.cached.split(",")))
    gpu = OffloadGpu(torch.device("cuda:0"), options.most)
    layers, shape = made_layers(options, gpu)
    start = time.perf_counter()
    taken = gpu.take(layers[0].parts.output.weight.shape[0])
    memory = AttentionMemory(gpu, shape)
    about = {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "layers": len(layers),
        "ranks": options.ranks,
        "weight_gib": round(taken.weight_bytes / 2**30, 2),
        "taken_gib": round((taken.gpu_bytes + memory.gpu_bytes) / 2**30, 2),
        "allocated_gib": round(torch.cuda.memory_allocated() / 2**30, 2),
        "expanded_by": choose_expand(gpu.device).__name__,
        "take_s": round(time.perf_counter() - start, 1),
    }  # fmt: skip
    print("ABOUT " + json.dumps(about), flush=True)
    blocks = -(-(options.most + options.cached[-1]) // BLOCK)
    caches = tuple(
        torch.zeros(blocks, shape.kv_heads, BLOCK, 2 * shape.size, dtype=torch.bfloat16)
        for _ in layers
    )
    memory.uploads.lock(caches)
    on_gpu = GpuLayers(layers, gpu, memory)
    link = milliseconds(lambda: link_only(gpu), options.repeats)
    for count in tokens:
        for cached in options.cached:
            measure(options, on_gpu, gpu, caches, count, cached, link)


def measure(
    options: argparse.Namespace, on_gpu: GpuLayers, gpu: OffloadGpu,
    caches: tuple[torch.Tensor, ...], count: int, cached: int, link: float,
) -> None:  # fmt: skip
    """Measure one step and print it."""
    hidden = torch.randn(count, SHAPES[options.shape]["hidden_size"]).bfloat16()
    blocks = tuple(range(-(-cached // BLOCK)))
    none = torch.empty(0, dtype=torch.int64)
    rows = StepRows(none, none, none.int(), slice(0, count), (Request(0, count, cached, blocks),))
    slots = torch.arange(cached, cached + count)
    places = Caches(tuple(Write() for _ in caches), caches, slots)

    def step(meanwhile: Callable[[], object] = lambda: None) -> None:
        on_gpu(slots, hidden, None, rows, places, meanwhile)

    with without_copies(gpu.reader):
        alone = milliseconds(step, options.repeats)
    both = milliseconds(step, options.repeats)
    peak = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    result = {
        "tokens": count, "cached": cached, "link_ms": link, "gpu_ms": alone, "step_ms": both,
        "floor_ms": max(link, alone), "peak_gib": peak,
    }  # fmt: skip
    if options.beside_gib:
        # Written once: pages that nobody has written are all one page.
        there = torch.ones(int(options.beside_gib * 2**28))
        result["beside_ms"] = milliseconds(there.sum, options.repeats)
        result["step_beside_ms"] = milliseconds(lambda: step(there.sum), options.repeats)
    print("RESULT " + json.dumps(result), flush=True)
    if options.profile:
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            step()
            torch.cuda.synchronize()
        print(profile.key_averages().table(sort_by="cuda_time_total", row_limit=16))


if __name__ == "__main__":
    main()

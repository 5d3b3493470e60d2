"""Decode steps that cores and a GPU share: milliseconds by tokens and by columns given away.

    python benchmarks/shared_decode.py                      # 16 layers of the 8B shape
    python benchmarks/shared_decode.py --tokens 32,128 --parts 0,4,8,12
    python benchmarks/shared_decode.py --steady 0,8,12      # columns, in one step after the other
    python benchmarks/shared_decode.py --device cpu --format fp8 --bytes 13,14   # what steps read
    python benchmarks/shared_decode.py --device cpu --shape 1b --layers 2   # to try it

Whole steps of decoder layers with heavy-tailed weights in 12 bits (or `--format`), requests of one
token each, no engine around them.  In `columns_ms` the GPU computes so many sixteenths of the
columns of every layer's gate and up, with weights that cross its link meanwhile
(ray_hetero/offload/decode/shared_decode.py).  `link_ms` is what a layer's weights behind the
attention take on the link, nothing computed.

With `--steady` only steps that follow one another are measured, with these sixteenths of the
columns on the GPU and a pause as other stages take between two of them: medians of their
milliseconds, of which the cores waited `waited_ms` for columns, and the processor time in which a
thread ordered the GPU's part, operation by operation or as a graph.

With `--bytes` nothing is measured: of a step with these sixteenths of the columns on the GPU, the
gigabytes of all weights, of the GPU's, and of what cores and link read from the host's memory.  The
rest stays on the GPU from step to step.

Start it with the environment of a CPU rank (OMP_NUM_THREADS, LD_PRELOAD, GOMP_CPU_AFFINITY).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
import torch
from cpu_linear import held_as
from gpu_timing import copied
from heavy_tailed import drawn_matrix, drawn_values
from shapes import SHAPES, head_size

from placement.host.cpulist import parse_cpulist
from ray_hetero import _streaming_linear as native
from ray_hetero.kernels.formats.base import pack
from ray_hetero.kernels.layers.decode_step import StepRequests, address_of
from ray_hetero.kernels.layers.kv_layouts import ROWS, TILES
from ray_hetero.kernels.layers.layer_parts import (
    AttentionShape,
    Linear,
    Norm,
    PostAttention,
    QkvInput,
    Scores,
)
from ray_hetero.kernels.linear.streaming_linear import StreamingLinear
from ray_hetero.offload.decode.mlp_columns import MlpColumnOffload, columns_of
from ray_hetero.offload.decode.share_choice import (
    Shares,
    best_shares,
    kept_blocks,
    most_parts,
)
from ray_hetero.offload.decode.shared_decode import BLOCK, SharedDecode, step_seconds
from ray_hetero.offload.prefill.gpu_layers import AttentionMemory
from ray_hetero.offload.prefill.offload_gpu import OffloadGpu

STEPS = 12
"""Steps of a steady measurement."""


def made_layers(options: argparse.Namespace, gpu: OffloadGpu) -> list[Any]:
    """Layers as `SharedDecode` takes them, each with weights of its own in memory."""
    shape = SHAPES[options.shape]
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    heads, kv_heads, size = (
        shape["num_attention_heads"], shape["num_key_value_heads"], head_size(shape),
    )  # fmt: skip
    drawn = drawn_values()
    sizes = {
        "qkv": ((heads + 2 * kv_heads) * size, hidden), "output": (hidden, heads * size),
        "gate_up": (2 * inner, hidden), "down": (hidden, inner),
    }  # fmt: skip
    first: dict[str, Any] = {
        name: held_as(options.format, pack(drawn_matrix(drawn, outputs, inputs)))
        for name, (outputs, inputs) in sizes.items()
    }
    cos_sin = torch.rand(8, size).bfloat16()
    norm = Norm(torch.ones(hidden).bfloat16(), 1e-5)
    attention = SimpleNamespace(
        rotation=native.Rotation(
            heads=heads, kv_heads=kv_heads, size=size, cos_sin=cos_sin.data_ptr(), positions=8,
            rotated=size, is_interleaved=False, query_norm=None, key_norm=None,
        ),
        scores=Scores(size**-0.5), shape=AttentionShape(heads, kv_heads, size), kept=cos_sin,
    )  # fmt: skip

    def product(name: str) -> Linear:
        weight = replace(first[name], data=first[name].data.clone())
        gpu.add(weight)
        return Linear(weight, None)

    return [
        SimpleNamespace(
            input=QkvInput(norm, product("qkv")), attention=attention, mlp=None,
            parts=PostAttention(
                product("output"), norm, product("gate_up"), product("down")
            ),
        )
        for _ in range(options.layers)
    ]  # fmt: skip


def link_ms(layers: list[Any], gpu: OffloadGpu) -> float:
    """Milliseconds in which a layer's weights behind its attention cross the link."""
    # Private names: what only a benchmark leaves out.
    wanted = [linear.weight.data.data_ptr() for layer in layers for linear in layer.parts.linears]
    began = time.perf_counter()
    copied(gpu.reader, (placed.piece for at in wanted for placed in gpu._pieces[at]))
    torch.cuda.synchronize()
    return round(1e3 * (time.perf_counter() - began) / len(layers), 3)


class Steady:
    """Steps that follow one another, of requests of one token each.

    Args:
        layers: of a step.
        kernel: what computes them on the cores.
        columns: of their MLPs.
        pause_s: between two steps.

    """

    def __init__(
        self, layers: list[Any], kernel: StreamingLinear, columns: MlpColumnOffload, pause_s: float
    ) -> None:
        self._layers, self._kernel, self._columns = layers, kernel, columns
        self._step = SharedDecode(layers, kernel, columns, Shares(()))
        self._pause_s = pause_s
        self._ordered_s = 0.0
        order = columns._order

        def timed(kind: Any) -> None:
            began = time.thread_time()
            order(kind)
            self._ordered_s += time.thread_time() - began

        columns._order = timed  # type: ignore[method-assign]

    def measure(self, tokens: int, parts: int, *, as_graphs: bool) -> dict[str, Any]:
        """Measure steps of so many tokens with so many parts of all columns on the GPU."""
        run = self._runner(tokens, parts)
        graphs = self._columns.graphs
        graphs._is_refused = not as_graphs
        for number in range(3):
            if number == 2 and as_graphs:
                self._step.prepare(tokens, parts)
            run()
        replayed, waited_s = graphs.replayed, self._columns.native.waited_s
        self._ordered_s, taken = 0.0, []
        for _ in range(STEPS):
            time.sleep(self._pause_s)
            began = time.perf_counter()
            run()
            taken.append(time.perf_counter() - began)
        each = 1e3 / STEPS
        return {
            "tokens": tokens, "parts": parts, "graphs": graphs.replayed - replayed,
            "ms": round(1e3 * statistics.median(taken), 2), "least_ms": round(1e3 * min(taken), 2),
            "waited_ms": round(each * (self._columns.native.waited_s - waited_s), 2),
            "order_ms": round(each * self._ordered_s, 2),
        }  # fmt: skip

    def _runner(self, tokens: int, parts: int) -> Callable[[], Any]:
        own, shape = torch.arange(tokens), self._layers[0].attention.shape
        cache = torch.zeros(tokens, shape.kv_heads, BLOCK, 2 * shape.size, dtype=torch.bfloat16)
        requests = StepRequests(
            torch.zeros_like(own), own * BLOCK, torch.ones(tokens, dtype=torch.int32),
            own.int().unsqueeze(1),
        )  # fmt: skip
        self._kept = requests, cache  # known by their addresses
        isa = TILES if self._kernel.level.name == "amx" else ROWS
        given = [requests.native(native, cache, isa)]
        caches = [address_of(cache)] * len(self._layers)
        hidden = torch.randn(tokens, self._layers[0].parts.norm.weight.shape[0]).bfloat16()
        return partial(self._step.run, parts, given, caches, hidden, None)


def measure_steady(steady: Steady, options: argparse.Namespace) -> None:
    """Measure the parts and tokens that were asked for, and print a line for each."""
    for tokens in map(int, options.tokens.split(",")):
        for parts in map(int, options.steady.split(",")):
            # Graphs last: from then on such steps are ordered as one.
            for as_graphs in (False, True) if parts else (False,):
                found = steady.measure(tokens, parts, as_graphs=as_graphs)
                print("STEADY " + json.dumps(found), flush=True)


def tell_bytes(layers: list[Any], columns: MlpColumnOffload, options: argparse.Namespace) -> None:
    """Print what steps read, a line for each share of the columns."""
    weights = sum(
        linear.weight.data.nbytes
        for layer in layers
        for linear in (layer.input.qkv, *layer.parts.linears)
    )
    for parts in map(int, options.bytes.split(",")):
        step = columns._pieces_of(kept_blocks(columns.blocks, columns.output_blocks, parts))
        kept = columns._gpu.reader.kept
        columns._keep(step)
        of_gpu = sum(piece.weight.nbytes for piece in step.pieces)
        found = {"weights_gb": weights, "gpu_gb": of_gpu, "host_gb": weights - kept.nbytes}
        told = {name: round(nbytes / 1e9, 3) for name, nbytes in found.items()}
        print("BYTES " + json.dumps({"format": options.format, "parts": parts} | told), flush=True)


def main() -> None:
    """Measure, and print a line for each number of tokens."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--format", default="compact", help="of weights: compact, fp8, int4, int8")
    parser.add_argument("--tokens", default="1,8,32,64,128")
    parser.add_argument("--parts", default="", help="parts given away; all, if empty")
    parser.add_argument("--steady", help="parts of all columns; then nothing else is measured")
    parser.add_argument("--bytes", help="parts of all columns; then nothing is measured")
    parser.add_argument("--pause-ms", type=float, default=7, help="between steps of --steady")
    parser.add_argument("--step-tokens", type=int, default=8192, help="--max-num-batched-tokens")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--cores", default="", help="of the thread that orders the GPU's work")
    options = parser.parse_args()
    kernel = StreamingLinear(native)
    gpu = OffloadGpu(
        torch.device(options.device), options.step_tokens, parse_cpulist(options.cores)
    )
    layers = made_layers(options, gpu)
    taken = gpu.take(layers[0].parts.output.weight.shape[0])
    # A decode step's pieces stay in what prompts need it for.
    AttentionMemory(gpu, layers[0].attention.shape)
    columns = columns_of(layers, gpu, kernel)
    assert columns is not None
    if options.bytes:
        tell_bytes(layers, columns, options)
        return
    seconds = step_seconds(layers, kernel, columns)
    about = {
        "format": options.format, "level": kernel.level.name,
        "threads": torch.get_num_threads(), "device": options.device,
        "torch": torch.__version__, "layers": len(layers),
        "weight_gib": round(taken.weight_bytes / 2**30, 2), "gpu_bytes": taken.gpu_bytes,
        "link_ms": link_ms(layers, gpu) if gpu.device.type == "cuda" else None,
    }  # fmt: skip
    print("ABOUT " + json.dumps(about), flush=True)
    if options.steady:
        measure_steady(Steady(layers, kernel, columns, options.pause_ms / 1e3), options)
        return
    asked = [int(one) for one in options.tokens.split(",")]
    most = most_parts(columns.output_blocks)
    if not options.parts:
        print(best_shares(seconds, len(layers), asked, most), flush=True)
    given = [int(one) for one in options.parts.split(",") if one] or range(most + 1)
    for tokens in asked:
        found = {parts: round(1e3 * seconds(tokens, parts), 2) for parts in given}
        print("RESULT " + json.dumps({"tokens": tokens, "columns_ms": found}), flush=True)


if __name__ == "__main__":
    main()

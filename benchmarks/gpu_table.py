"""Rows of an embedding on a GPU: looked up by the GPU in host memory, or by the cores and sent.

    OMP_NUM_THREADS=30 python benchmarks/gpu_table.py --tokens 512,8192

Milliseconds until the rows are there, and until the calling thread can go on; medians.  Tokens are
drawn from a few hundred rows, which the processor's caches hold, and from the whole vocabulary.
Needs torch with CUDA and Triton, and neither vLLM nor Ray.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from ray_hetero.kernels.prompts.gpu_table import GpuTable
from ray_hetero.kernels.prompts.step_memory import StepMemory

VOCABULARY, HIDDEN = 128256, 4096
FEW = 500
ROUNDS = 9


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", default="512,8192", help="of a step, with commas")
    counts = [int(text) for text in parser.parse_args().tokens.split(",")]
    gpu = torch.device("cuda:0")
    torch.cuda.set_device(gpu)
    print(f"{torch.cuda.get_device_name(gpu)}, {torch.get_num_threads()} threads")
    table = torch.randn(1024, HIDDEN).bfloat16().repeat(VOCABULARY // 1024 + 1, 1)[:VOCABULARY]
    stream, most = torch.cuda.Stream(), max(counts)
    memory = StepMemory(gpu, most, HIDDEN, HIDDEN, HIDDEN)
    there = torch.empty(most, HIDDEN, dtype=torch.bfloat16, device=gpu)
    by_gpu = GpuTable(table.contiguous(), most, memory, stream)

    def alone(tokens: torch.Tensor) -> None:
        with torch.cuda.stream(stream):
            by_gpu(tokens, there[: len(tokens)])

    def cores(tokens: torch.Tensor) -> None:
        memory.embedded(table, tokens, stream)

    for count in counts:
        for rows in (FEW, VOCABULARY):
            tokens = torch.randint(rows, (count,))
            for name, look_up in (("the GPU", alone), ("the cores", cores)):
                print(f"{count} tokens of {rows} rows, by {name}: {times(look_up, tokens, stream)}")


def times(
    look_up: Callable[[torch.Tensor], None], tokens: torch.Tensor, stream: torch.cuda.Stream
) -> str:
    """Medians as text."""
    found = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        look_up(tokens)
        goes_on = time.perf_counter()
        stream.synchronize()
        found.append((time.perf_counter() - began, goes_on - began))
    whole, own = (1000 * statistics.median(column) for column in zip(*found, strict=True))
    return f"there after {whole:.2f} ms, goes on after {own:.2f} ms"


if __name__ == "__main__":
    main()

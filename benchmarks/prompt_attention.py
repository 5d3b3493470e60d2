"""Attention of prompts on a CPU rank beside PyTorch's, which is the library to compare with.

    python benchmarks/prompt_attention.py --tokens 512,2048,8192 --json prompt-attention.json

A CPU rank leaves the attention of prompts that no GPU computes to vLLM's kernel, which reads keys
and values out of the paged cache; PyTorch's `scaled_dot_product_attention` (its flash attention for
CPUs) has them side by side.  Both are causal, in bfloat16, over one prompt.  Prints for each number
of tokens the shortest milliseconds of some rounds, the ways in turns, the rate over the products
that a causal prompt needs, and the largest difference between both results.  Start it with the
environment of a CPU rank (OMP_NUM_THREADS, LD_PRELOAD, GOMP_CPU_AFFINITY).
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
import torch
from vllm import _custom_ops as ops
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

HEADS, KV_HEADS, SIZE = 32, 8, 128
"""Heads of queries and of keys, and their elements, of the 8B shape."""
BLOCK = 128
"""Tokens of a KV block, as engines with CPU ranks have it."""


def of_vllm(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Attention by vLLM's kernel, [tokens, heads, size], over a cache that is filled."""
    tokens = len(q)
    isa = _get_attn_isa(torch.bfloat16, BLOCK, SIZE)
    blocks = -(-tokens // BLOCK)
    cache = torch.zeros(blocks, KV_HEADS, 2 * BLOCK, SIZE, dtype=torch.bfloat16)
    keys, values = cache.chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(k, v, keys, values, torch.arange(tokens), isa)
    starts, lengths = (torch.tensor(one, dtype=torch.int32) for one in ([0, tokens], [tokens]))
    table = torch.arange(blocks, dtype=torch.int32).unsqueeze(0)
    plan = ops.cpu_attn_get_scheduler_metadata(
        1, HEADS, KV_HEADS, SIZE, lengths, torch.bfloat16, starts, True, -1, isa, True
    )
    output = torch.empty_like(q)

    def run() -> torch.Tensor:
        ops.cpu_attention_with_kv_cache(
            q, keys, values, output, starts, lengths, SIZE**-0.5, True, None, -1, table, 0.0, plan,
            None,
        )  # fmt: skip
        return output

    return run


def of_torch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Attention by PyTorch's kernel; its own layout is made before."""
    each = [one.transpose(0, 1).unsqueeze(0).contiguous() for one in (q, k, v)]

    def run() -> torch.Tensor:
        found = torch.nn.functional.scaled_dot_product_attention(
            *each, is_causal=True, enable_gqa=True
        )
        return found[0].transpose(0, 1)

    return run


def main() -> None:
    """Time both and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", default="512,2048,8192", help="of a prompt, with commas")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="where to write the figures")
    options = parser.parse_args()
    current_platform.import_kernels()
    # The kernel lets a process use tiles once it has asked.
    torch.cpu._init_amx()
    torch.manual_seed(0)
    found = []
    for tokens in map(int, options.tokens.split(",")):
        q, k, v = (
            torch.randn(tokens, heads, SIZE).bfloat16() for heads in (HEADS, KV_HEADS, KV_HEADS)
        )
        ways = {"vllm": of_vllm(q, k, v), "torch": of_torch(q, k, v)}
        results = {name: run().float().clone() for name, run in ways.items()}
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(options.rounds):
            for name, run in ways.items():
                begin = time.perf_counter()
                run()
                seconds[name].append(time.perf_counter() - begin)
        # Of the pairs that are not masked, two products of each head.
        flops = 4 * HEADS * SIZE * tokens * (tokens + 1) / 2
        row = {
            "tokens": tokens,
            "ms": {name: 1e3 * min(times) for name, times in seconds.items()},
            "all_ms": {name: [1e3 * one for one in times] for name, times in seconds.items()},
            "gflop_s": {name: flops / min(times) / 1e9 for name, times in seconds.items()},
            "difference": float((results["vllm"] - results["torch"]).abs().max()),
        }
        row["of_the_librarys_rate"] = row["gflop_s"]["vllm"] / row["gflop_s"]["torch"]
        found.append(row)
        print(
            f"{tokens:6} tokens: vLLM {row['ms']['vllm']:9.2f} ms, "
            f"torch {row['ms']['torch']:9.2f} ms, {row['of_the_librarys_rate']:.2f} of its rate, "
            f"difference {row['difference']:.4f}",
            flush=True,
        )
    if options.json:
        cores = torch.get_num_threads()
        options.json.write_text(json.dumps({"threads": cores, "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Memory of CPU ranks beside the weights that they hold and their KV cache.

    python benchmarks/host_memory.py --shapes none,1b --out host-memory

Every shape is an engine of its own.  `none` has no weights to speak of: what it takes is the
process itself, which every rank pays once.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from memory import proportional_bytes
from rich.console import Console
from rich.table import Table
from shapes import SHAPES, head_bytes, kv_bytes, layer_bytes, write_shape

MIB = 1 << 20


def main() -> None:
    """Run every shape in a process of its own, write and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default="none,1b")
    parser.add_argument("--stages", type=int, default=2, help="CPU ranks, one a pipeline stage")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--config", default="{}", help="more of the ray_hetero configuration")
    parser.add_argument("--one", help="measure this shape here, print a line of JSON")
    parser.add_argument("--out", type=Path, required=True, help="without ending")
    options = parser.parse_args()
    if options.one:
        print("RANKS " + json.dumps(measure(options.one, options)), flush=True)
        return
    found = {shape: in_a_process(shape) for shape in options.shapes.split(",")}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    Console(width=120).print(table(found))


def in_a_process(shape: str) -> list[dict[str, int]]:
    """Measure one shape.

    Raises:
        SystemExit: its engine failed.

    """
    command = [sys.executable, *sys.argv, "--one", shape]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    for line in done.stdout.splitlines():
        if line.startswith("RANKS "):
            return list(json.loads(line.removeprefix("RANKS ")))
    raise SystemExit(f"{shape} failed ({done.returncode}):\n{done.stdout[-2000:]}")


def measure(shape: str, options: argparse.Namespace) -> list[dict[str, int]]:
    """Bytes of each rank of an engine that has answered a request."""
    from vllm import LLM, SamplingParams

    # The ranks are sent a function.
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    config = {"layout": [["cpu"]] * options.stages, "cpu": {"ranks_per_socket": options.stages}}
    llm = LLM(
        model=str(write_shape(shape)),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=1024,
        max_num_seqs=8,
        max_num_batched_tokens=1024,
        enforce_eager=options.eager,
        distributed_executor_backend="ray_hetero",
        pipeline_parallel_size=options.stages,
        additional_config={"ray_hetero": config | json.loads(options.config)},
    )
    params = SamplingParams(max_tokens=8, ignore_eos=True, detokenize=False)
    llm.generate([{"prompt_token_ids": [3] * 900}], params, use_tqdm=False)
    cache = llm.llm_engine.vllm_config.cache_config
    tokens = cache.num_gpu_blocks * cache.block_size
    pids = llm.collective_rpc(pid_of)
    return [
        held(shape, rank, options.stages, tokens) | resident(pid) for rank, pid in enumerate(pids)
    ]


def pid_of(worker: Any) -> int:
    """On a rank: its process."""
    import os

    return os.getpid()


def held(shape: str, rank: int, ranks: int, tokens: int) -> dict[str, int]:
    """Bytes that a rank has to hold: its share of the layers and of the KV cache."""
    numbers = SHAPES[shape]
    layers = numbers["num_hidden_layers"]
    mine = layers // ranks + (rank < layers % ranks)
    ends = (rank == 0) + (rank == ranks - 1)
    return {
        "weights": mine * layer_bytes(numbers) + ends * head_bytes(numbers),
        "kv": tokens * kv_bytes(numbers) * mine // layers,
    }


def resident(pid: int) -> dict[str, int]:
    """Bytes that a process has now, and had at most."""
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    (peak,) = (int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM:"))
    return proportional_bytes(pid) | {"peak_rss": peak}


def table(found: dict[str, list[dict[str, int]]]) -> Table:
    """One row a rank."""
    shown = Table(title="Host memory of CPU ranks, MiB")
    for column in ("shape", "rank", "weights", "KV", "resident", "of it anonymous", "peak",
                   "÷ (weights + KV)", "less the smallest shape's, ÷ (weights + KV)"):  # fmt: skip
        shown.add_column(column, justify="right")
    smallest = min(found, key=lambda shape: found[shape][0]["weights"])
    for shape, ranks in found.items():
        for rank, row in enumerate(ranks):
            needed = row["weights"] + row["kv"]
            process = found[smallest][rank]
            extra = process["pss"] - process["weights"] - process["kv"]
            mib = (row[key] // MIB for key in ("weights", "kv", "pss", "anonymous", "peak_rss"))
            ratios = (row["pss"] / needed, (row["pss"] - extra) / needed)
            shown.add_row(shape, str(rank), *map(str, mib), *(f"{r:.2f}" for r in ratios))
    return shown


if __name__ == "__main__":
    main()

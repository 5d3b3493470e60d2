"""Start-up, prefill and decode of TP 2 over two CPU ranks, side by side with vLLM's own `mp`.

Both engines run in turns, in processes of their own, on the same shape, prompts and cores; the
ratios are of the medians.  Writes the raw results and a table after every round.

    python benchmarks/against_mp.py --rounds 5 --out against-mp
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

from engine_rounds import CHECKOUT, run_engine, write_rounds
from rich.table import Table

MOST_TOKENS = 1024
"""Tokens of a step.  Both warm up with as many; more would hide the cost of a start."""
FIGURES = {
    "startup_s": "start-up, s",
    "prefill_s": "prefill of the batch, s",
    "decode_ms": "decode step, ms",
}


def run(
    backend: str, shape: str, batches: str, timeout_s: float, checkout: Path
) -> list[dict[str, float]]:
    """One engine from start to end, with the code of a checkout; its results, one a batch size."""
    points = ",".join(f"{batch}x128" for batch in batches.split(","))
    arguments = ["--shape", shape, "--points", points, "--repeats", "3", "--output-tokens", "25"]
    engine: dict[str, int | str] = {"max_num_batched_tokens": MOST_TOKENS}
    environment: dict[str, str] = {}
    if backend != "mp":
        config = '{"cpu": {"ranks_per_socket": 2, "kv_cache_gib": 1}}'
        arguments += ["--layout", '[["cpu", "cpu"]]', "--config", config]
    else:
        engine |= {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
        arguments += ["--backend", "mp"]
        # Stock vLLM takes one NUMA node for one rank unless it is told to pretend.
        environment |= {"VLLM_CPU_SIM_MULTI_NUMA": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    arguments += ["--engine", json.dumps(engine)]
    return run_engine(backend, arguments, timeout_s, checkout=checkout, environment=environment)


def table(results: dict[str, list[dict[str, float]]], batches: list[int]) -> Table:
    """Medians of both and their ratios."""
    shown = Table(title="TP 2 on CPU, ray_hetero against stock mp")
    others = [backend for backend in results if backend != "ray_hetero"]
    for column in ("figure", "batch", *results, *(f"ray_hetero ÷ {other}" for other in others)):
        shown.add_column(column)
    for key, name in FIGURES.items():
        for batch in batches[:1] if key == "startup_s" else batches:
            found = {
                backend: statistics.median(r[key] for r in rows if r["batch"] == batch)
                for backend, rows in results.items()
            }
            ratios = [f"{found['ray_hetero'] / found[other]:.2f}" for other in others]
            cells = [f"{value:.3g}" for value in found.values()]
            shown.add_row(name, "" if key == "startup_s" else str(batch), *cells, *ratios)
    return shown


def main() -> None:
    """Run all rounds, write and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shape", default="1b")
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--timeout", type=float, default=600)
    parser.add_argument("--before", type=Path, help="another checkout of this project, beside both")
    parser.add_argument("--out", type=Path, required=True, help="without ending")
    options = parser.parse_args()
    checkouts = {"ray_hetero": CHECKOUT, "mp": CHECKOUT}
    if options.before is not None:
        checkouts["before"] = options.before.resolve()
    results: dict[str, list[dict[str, float]]] = {backend: [] for backend in checkouts}
    for number in range(1, options.rounds + 1):
        for backend, collected in results.items():
            collected += run(
                backend, options.shape, options.batches, options.timeout, checkouts[backend]
            )
        shown = table(results, [int(batch) for batch in options.batches.split(",")])
        write_rounds(options.out, results, number, shown, width=100)


if __name__ == "__main__":
    main()

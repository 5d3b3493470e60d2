"""Prefill and decode of other families than Llama on CPU, beside a Llama of the same linear layers.

An engine of one CPU rank for each shape, in turns, in processes of their own, with dummy weights.
Ratios are of a round's own Llama, and their median is what counts: 1.05 is the most that norms,
soft caps and activations should cost.  Writes the raw results and a table after every round.

    python benchmarks/family_steps.py --rounds 5 --out families
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

from engine_rounds import run_engine, write_rounds
from rich.table import Table
from shapes import FAMILIES

LLAMA = "1b-4"
FIGURES = {"decode_ms": "decode step, ms", "prefill_s": "prefill of the batch, s"}

Rows = dict[str, list[dict[str, float]]]
"""One row for each round and batch, by shape."""


def run(shape: str, options: argparse.Namespace) -> list[dict[str, float]]:
    """One engine from start to end; its results, one a batch size."""
    points = ",".join(f"{batch}x{options.prompt}" for batch in options.batches.split(","))
    config = {"cpu": {"ranks_per_socket": 1, "kv_cache_gib": 1}}
    # One table of KV blocks for layers with a window and without, as Llama has.
    engine = {"max_num_batched_tokens": 1024, "disable_hybrid_kv_cache_manager": True}
    arguments = [
        "--shape", shape, "--points", points, "--eager",
        "--repeats", str(options.repeats), "--output-tokens", str(options.output_tokens),
        "--layout", '[["cpu"]]', "--config", json.dumps(config),
        "--engine", json.dumps(engine),
    ]  # fmt: skip
    return run_engine(shape, arguments, options.timeout)


def ratios(results: Rows, figure: str, batch: int) -> dict[str, list[float]]:
    """A figure of each family over that of the same round's Llama, round by round."""
    values = {
        name: [row[figure] for row in rows if row["batch"] == batch]
        for name, rows in results.items()
    }
    return {
        name: [own / llama for own, llama in zip(of_shape, values[LLAMA], strict=True)]
        for name, of_shape in values.items()
        if name != LLAMA
    }


def table(results: Rows, batches: list[int]) -> Table:
    """Medians, and medians of the ratios with their spread."""
    shown = Table(title=f"One CPU rank, beside Llama ({LLAMA})")
    for column in ("figure", "batch", *results, *(f"{name} ÷ {LLAMA}" for name in FAMILIES)):
        shown.add_column(column)
    for figure, title in FIGURES.items():
        for batch in batches:
            medians = [
                statistics.median(row[figure] for row in rows if row["batch"] == batch)
                for rows in results.values()
            ]
            found = ratios(results, figure, batch)
            cells = [
                f"{statistics.median(own):.3f} ({min(own):.2f} to {max(own):.2f})"
                for own in found.values()
            ]
            shown.add_row(title, str(batch), *(f"{value:.3g}" for value in medians), *cells)
    return shown


def main() -> None:
    """Run all rounds, write and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each")
    parser.add_argument("--output-tokens", type=int, default=65)
    parser.add_argument("--repeats", type=int, default=5, help="of each point in an engine")
    parser.add_argument("--timeout", type=float, default=600, help="seconds of an engine")
    parser.add_argument("--out", type=Path, required=True, help="without ending")
    options = parser.parse_args()
    results: Rows = {name: [] for name in (LLAMA, *FAMILIES)}
    for number in range(1, options.rounds + 1):
        # In the other direction every other time: what a neighbour takes falls on both ends.
        for name in list(results)[:: 1 if number % 2 else -1]:
            results[name] += run(name, options)
        shown = table(results, [int(batch) for batch in options.batches.split(",")])
        write_rounds(options.out, results, number, shown, width=160)


if __name__ == "__main__":
    main()

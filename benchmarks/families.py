"""Prefill and decode of other families than Llama on CPU, beside a Llama of the same linear layers.

An engine of one CPU rank for each shape, in turns, in processes of their own, with dummy weights.
Ratios are of a round's own Llama, and their median is what counts: 1.05 is the most that norms,
soft caps and activations should cost.  Writes the raw results and a table after every round.

    python benchmarks/families.py --rounds 5 --out families
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table
from shapes import FAMILIES

ENGINE_RUN = Path(__file__).with_name("engine_run.py")
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
    command = [
        sys.executable, str(ENGINE_RUN), "--shape", shape, "--points", points, "--eager",
        "--repeats", str(options.repeats), "--output-tokens", str(options.output_tokens),
        "--layout", '[["cpu"]]', "--config", json.dumps(config),
        "--engine", json.dumps(engine),
    ]  # fmt: skip
    # Ray's workers import from the driver's folder before anything else.
    checkout = ENGINE_RUN.parents[1]
    path = os.pathsep.join(filter(None, (str(checkout), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": path}, cwd=checkout, capture_output=True,
        text=True, timeout=options.timeout, check=False,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{shape} failed ({done.returncode}):\n{done.stderr[-3000:]}")
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    return [json.loads(line.removeprefix("RESULT ")) for line in lines]


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


def write(options: argparse.Namespace, results: Rows, rounds: int) -> None:
    """Write and print what is known after so many rounds."""
    about = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": "python benchmarks/families.py " + " ".join(sys.argv[1:]),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "rounds": rounds,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    raw = json.dumps(about | {"results": results}, indent=1)
    options.out.with_suffix(".json").write_text(raw + "\n")
    console = Console(record=True, width=160)
    console.print(table(results, [int(batch) for batch in options.batches.split(",")]))
    options.out.with_suffix(".txt").write_text(f"{json.dumps(about)}\n{console.export_text()}")


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
        write(options, results, number)


if __name__ == "__main__":
    main()

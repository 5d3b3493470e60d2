"""Start-up, prefill and decode of TP 2 over two CPU ranks, side by side with vLLM's own `mp`.

Both engines run in turns, in processes of their own, on the same shape, prompts and cores; the
ratios are of the medians.  Writes the raw results and a table after every round.

    python benchmarks/against_mp.py --rounds 5 --out against-mp
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

ENGINE_RUN = Path(__file__).with_name("engine_run.py")
MOST_TOKENS = 1024
"""Of one step.  Both warm up with that many; with more, that would hide what starting costs."""
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
    command = [
        sys.executable,
        str(checkout / "benchmarks" / ENGINE_RUN.name),
        "--shape",
        shape,
        "--points",
        points,
    ]
    command += ["--repeats", "3", "--output-tokens", "25"]
    engine: dict[str, int | str] = {"max_num_batched_tokens": MOST_TOKENS}
    path = os.pathsep.join(filter(None, (str(checkout), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"PYTHONPATH": path}
    if backend != "mp":
        config = '{"cpu": {"ranks_per_socket": 2, "kv_cache_gib": 1}}'
        command += ["--layout", '[["cpu", "cpu"]]', "--config", config]
    else:
        engine |= {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
        command += ["--backend", "mp"]
        # Stock vLLM takes one NUMA node for one rank unless it is told to pretend.
        environment |= {"VLLM_CPU_SIM_MULTI_NUMA": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    command += ["--engine", json.dumps(engine)]
    # Ray's workers import from the driver's folder before anything else.
    done = subprocess.run(
        command, env=environment, cwd=checkout, capture_output=True, text=True, timeout=timeout_s,
        check=False,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{backend} failed ({done.returncode}):\n{done.stderr[-3000:]}")
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    return [json.loads(line.removeprefix("RESULT ")) for line in lines]


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


def write(
    options: argparse.Namespace, results: dict[str, list[dict[str, float]]], rounds: int
) -> None:
    """Write and print what is known after so many rounds."""
    shown = table(results, [int(b) for b in options.batches.split(",")])
    about = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": "python benchmarks/against_mp.py " + " ".join(sys.argv[1:]),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "rounds": rounds,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    raw = json.dumps(about | {"results": results}, indent=1)
    options.out.with_suffix(".json").write_text(raw + "\n")
    console = Console(record=True, width=100)
    console.print(shown)
    options.out.with_suffix(".txt").write_text(f"{json.dumps(about)}\n{console.export_text()}")


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
    here = ENGINE_RUN.parents[1]
    checkouts = {"ray_hetero": here, "mp": here}
    if options.before is not None:
        checkouts["before"] = options.before.resolve()
    results: dict[str, list[dict[str, float]]] = {backend: [] for backend in checkouts}
    for number in range(1, options.rounds + 1):
        for backend, collected in results.items():
            collected += run(
                backend, options.shape, options.batches, options.timeout, checkouts[backend]
            )
        write(options, results, number)


if __name__ == "__main__":
    main()

"""Half of a model's layers outside the GPU, served in every way there is, in one run.

    python benchmarks/side_by_side.py --out docs/gpu-host/side-by-side

Contenders that fail or are not installed are reported, with the end of their output.  The floor
is measured in the same run, before every contender: the bandwidth of the socket's compute cores.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from engine_run import SHAPES
from rich.console import Console
from rich.table import Table

from placement import native
from placement.sockets import sockets_of
from placement.sysfs import read_host

HERE = Path(__file__).parent
ENGINE = [sys.executable, str(HERE / "engine_run.py")]
GPU_BANDWIDTH = 4.3e12
"""Bytes/s of an H200 as a device-to-device copy was measured there; only 1-4 % of the floor."""


def contenders(layers: int, layer_gib: float) -> dict[str, list[str]]:
    """Name → command; each holds half of the layers outside the GPU, but for all-GPU."""
    half_gib = layer_gib * layers / 2
    uva = json.dumps({"cpu_offload_gb": round(half_gib, 2)})
    prefetch = json.dumps({"offload_group_size": 2, "offload_num_in_group": 1})
    stock = [*ENGINE, "--backend", "uni"]
    return {
        "ray_hetero cpu→gpu": [*ENGINE, "--layout", '[["cpu"],["gpu"]]', "--compile"],
        "vLLM UVA offload": [*stock, "--engine", uva],
        "vLLM prefetch offload": [*stock, "--engine", prefetch],
        "ray_hetero gpu→cpu": [*ENGINE, "--layout", '[["gpu"],["cpu"]]', "--compile"],
        "transformers + accelerate": [sys.executable, str(HERE / "accelerate_run.py")],
        "all on the GPU": [*stock, "--compile"],
    }


def probe(cpus: tuple[int, ...]) -> float:
    """Bytes/s that the compute cores read together now."""
    return native.read_bandwidth(cpus, nbytes_per_thread=256 << 20, seconds=1.0)


def run(command: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """One contender in a process of its own."""
    command = [*command, "--shape", options.shape, "--batches", options.batches]
    command += ["--repeats", str(options.repeats)]
    start = time.monotonic()
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=options.timeout, check=False
        )
        output, status = done.stdout + done.stderr, done.returncode
    except subprocess.TimeoutExpired as late:
        output, status = (late.stdout or b"").decode(errors="replace"), -1
    lines = [line for line in output.splitlines() if line.startswith("RESULT ")]
    return {
        "status": status,
        "seconds": round(time.monotonic() - start, 1),
        "results": [json.loads(line.removeprefix("RESULT ")) for line in lines],
        "end_of_output": "" if status == 0 else output[-2000:],
    }


def layer_bytes(shape: dict[str, int]) -> int:
    """Bytes of one decoder layer's matrices in bf16."""
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    kv = shape["num_key_value_heads"] * hidden // shape["num_attention_heads"]
    return 2 * (2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * inner)


def show(found: dict[str, dict[str, Any]], held: int, rest: int) -> Table:
    """One row a contender and batch, the floor of the CPU contenders beside them."""
    table = Table(title="Half the layers outside the GPU, prompts of 128 tokens")
    for column in ("contender", "batch", "decode step, ms", "floor, ms", "÷ floor", "prefill, s"):
        table.add_column(column)
    for name, outcome in found.items():
        bandwidth = statistics.median(outcome["bandwidth"])
        floor = 1000 * (held / bandwidth + rest / GPU_BANDWIDTH)
        for result in outcome["results"]:
            is_ours = name.startswith("ray_hetero")
            cells = (f"{floor:.1f}", f"{result['decode_ms'] / floor:.2f}") if is_ours else ("", "")
            table.add_row(
                name, str(result["batch"]), f"{result['decode_ms']:.1f}", *cells,
                f"{result['prefill_s']:.2f}",
            )  # fmt: skip
        if outcome["status"] != 0:
            table.add_row(name, "", f"failed ({outcome['status']})", "", "", "")
    return table


def main() -> None:
    """Run all contenders, write and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="8b")
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--timeout", type=float, default=200)
    parser.add_argument("--only", default="", help="names with commas; all by default")
    parser.add_argument("--reserved-cores", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True, help="without ending")
    options = parser.parse_args()
    shape = SHAPES[options.shape]
    one = layer_bytes(shape)
    layers = shape["num_hidden_layers"]
    held = one * (layers // 2)
    rest = one * (layers - layers // 2) + 2 * shape["vocab_size"] * shape["hidden_size"]
    socket = sockets_of(read_host(gpus=False))[0]
    cpus = socket.cpus[options.reserved_cores :]
    found: dict[str, dict[str, Any]] = {}
    for name, command in contenders(layers, one / (1 << 30)).items():
        if options.only and name not in options.only.split(","):
            continue
        before = probe(cpus)
        found[name] = run(command, options)
        found[name]["bandwidth"] = [before, probe(cpus)]
        print(name, found[name]["status"], found[name]["results"], flush=True)
    about = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": "python benchmarks/side_by_side.py " + " ".join(sys.argv[1:]),
        "cores": os.cpu_count(),
        "compute_cores": len(cpus),
        "layer_bytes": one,
        "contenders": found,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.with_suffix(".json").write_text(json.dumps(about, indent=1) + "\n")
    console = Console(record=True, width=110)
    console.print(show(found, held, rest))
    options.out.with_suffix(".txt").write_text(console.export_text())


if __name__ == "__main__":
    main()

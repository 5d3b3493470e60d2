"""The stage boundary between two processes of one host, without a model: there and back again.

    python benchmarks/boundary.py --kinds cpu,gpu --out boundary

Prints, for each number of tokens, half of the way there and back, and what the boundary itself
says that an exchange takes.  Contents are compared once for each number of tokens.

With `--reading-mib` a CPU stage reads so much memory with all its threads before each message, as
it does in a decode step: what a message needs is then in no cache, and the receiver has slept.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import floor
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from ray_hetero.distributed.gloo_link import GlooLink
from ray_hetero.distributed.linking import LINKS
from ray_hetero.distributed.neighbour import Neighbours
from ray_hetero.distributed.stage_boundary import StageBoundary
from ray_hetero.kernels.step_route import PROMPT_TOKENS, StepLimits, StepRoute


def main() -> None:
    """Start both processes, print and write what the first one has measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", default="cpu,cpu", help="cpu or gpu, of both stages")
    parser.add_argument("--tokens", default="1,8,32,128,1024,8192")
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--gloo", action="store_true", help="as between two hosts")
    parser.add_argument("--reading-mib", type=int, default=0, help="before each message; 0: none")
    parser.add_argument("--reserved-cores", type=int, default=0, help="that CPU ranks leave free")
    parser.add_argument("--out", type=Path, required=True, help="without ending")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        answers = context.Queue()
        processes = [
            context.Process(target=stage, args=(rank, options, f"{folder}/store", answers))
            for rank in range(2)
        ]
        for process in processes:
            process.start()
        found = answers.get(timeout=300)
        for process in processes:
            process.join()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    Console().print(table(found, options))


def stage(rank: int, options: argparse.Namespace, store: str, answers: Any) -> None:
    """One process: a boundary in each direction."""
    kind = options.kinds.split(",")[rank]
    if kind == "cpu":
        cpus = cores_of(options)[rank]
        os.sched_setaffinity(0, cpus)
        torch.set_num_threads(len(cpus))
    device = torch.device("cuda:0" if kind == "gpu" else "cpu")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    tokens = [int(number) for number in options.tokens.split(",")]
    template = {
        name: torch.zeros(1, options.hidden, dtype=torch.bfloat16, device=device)
        for name in ("hidden_states", "residual")
    }
    links = [GlooLink()] if options.gloo else LINKS
    there, back = (
        StageBoundary(Neighbours.in_line(dist.new_group([0, 1]), ranks, stage), device, links=links)
        for ranks, stage in (([0, 1], rank), ([1, 0], 1 - rank))
    )
    for boundary in (there, back):
        boundary.agree(template, max(tokens))
    found = [measure(rank, there, back, device, number, options) for number in tokens]
    if rank == 0:
        answers.put(found)
    dist.barrier()


def cores_of(options: argparse.Namespace) -> dict[int, tuple[int, ...]]:
    """Logical CPUs of each stage that computes on the CPU."""
    stages = [stage for stage, kind in enumerate(options.kinds.split(",")) if kind == "cpu"]
    return dict(zip(stages, floor.compute_cpus(options.reserved_cores, len(stages)), strict=True))


def measure(
    rank: int,
    there: StageBoundary,
    back: StageBoundary,
    device: torch.device,
    tokens: int,
    options: argparse.Namespace,
) -> dict[str, float]:
    """Medians of one number of tokens, milliseconds; only the first process has them all."""
    sent = {
        name: torch.full((tokens, options.hidden), value, dtype=torch.bfloat16, device=device)
        for name, value in (("hidden_states", 1.5), ("residual", -2.0))
    }
    rounds = max(20, options.rounds * 128 // max(128, tokens))
    weights = torch.ones(options.reading_mib << 18) if device.type == "cpu" else torch.ones(0)
    times, exchanges = [], []
    for number in range(rounds):
        for boundary in (there, back):
            # Of prompts: a stream that waits for decode steps would not be timed here.
            boundary.begin_step(StepRoute.of_rows(tokens, PROMPT_TOKENS, StepLimits()))
        if rank == 0:
            weights.sum()
        start = time.perf_counter()
        if rank == 0:
            there.isend(sent)
            received = receive(back, device)
        else:
            received = receive(there, device)
            weights.sum()
            back.isend(received)
        times.append(time.perf_counter() - start)
        exchanges.append(there.take().exchange_s + back.take().exchange_s)
        if number == 0:
            for name, tensor in sent.items():
                assert torch.equal(received[name][:tokens], tensor), f"{name} of {tokens} tokens"
    return {
        "tokens": tokens,
        "half_round_ms": 1000 * statistics.median(times) / 2,
        # One send and one arrival, of the two directions.
        "exchange_ms": 1000 * statistics.median(exchanges),
    }


def receive(boundary: StageBoundary, device: torch.device) -> dict[str, torch.Tensor]:
    """The tensors of a step, there to compute with."""
    tensors, handles, callbacks = boundary.irecv()
    for handle in handles:
        handle.wait()
    for callback in callbacks:
        callback()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return tensors


def table(found: list[dict[str, float]], options: argparse.Namespace) -> Table:
    """One row a number of tokens."""
    shown = Table(title=f"Stage boundary {options.kinds}, {options.hidden} wide, bf16")
    for column in ("tokens", "one way, ms", "exchange as the boundary counts it, ms"):
        shown.add_column(column, justify="right")
    for row in found:
        shown.add_row(
            f"{row['tokens']:.0f}", f"{row['half_round_ms']:.3f}", f"{row['exchange_ms']:.3f}"
        )
    return shown


if __name__ == "__main__":
    main()

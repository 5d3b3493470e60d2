"""One model with some of its layers outside the GPU, served in every way there is, in one run.

    python benchmarks/side_by_side.py --out results                   # half of an 8B shape outside
    python benchmarks/side_by_side.py --case budget --out results-20b  # 40 GB in 24 GiB of GPU
    python benchmarks/side_by_side.py --case in-flight --out results-in-flight
    python benchmarks/side_by_side.py --points 8x128x256 --arrival 8192 --step-tokens 2048 \\
        --out results-arrival              # a prompt comes while eight requests decode
    python benchmarks/side_by_side.py --case drafts --out results-drafts  # speculative decoding
    python benchmarks/side_by_side.py --case formats --out results-formats  # FP8 and four bits
    python benchmarks/side_by_side.py --shape 30b-a3b-16 --outside 8 --out results-experts
    python benchmarks/side_by_side.py --shape 30b-a3b-16 --outside 8 --heavy-tailed \\
        --llama-bench BUILD/bin/llama-bench --out results-llama-cpp  # beside llama.cpp
    python benchmarks/side_by_side.py --in-turns --contenders 'ray_hetero cpu-gpu' \\
        --before ../before --out results-change  # a change beside the code before it

On a host without a GPU, two CPU ranks beside vLLM's own `mp`, and in the case `formats` one rank
beside vLLM's own.  `--list` names the contenders,
`--contenders` chooses some.  Results are written after each contender, into what `--out` already
holds, so that a run may be done in parts.  With `--in-turns` all contenders start, those with CPU
ranks two at a time behind the others, and measure in turns, once each a round, so that all see the
same minutes of the host.  Contenders
that fail, are late or are not installed are reported with the end of their output (all of it is in
the folder OUT-logs).  The floor is measured in the same run: the CPU ranks' cores before and after
each contender, the GPU and its link once.  `side_by_side_report.py` makes the table and the plot.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import contender_process
import contenders
import floor
from contenders import GIB, Contender, Split
from engine_run import Point
from heavy_tailed import heavy_tailed_folder, write_checkpoint
from shapes import SHAPES, head_bytes, layer_bytes
from side_by_side_report import table

from placement.host.gpus import read_gpus

STARTING = 2
"""Engines that start at the same time: their CPU ranks warm up on the same cores, and five of them
took more than 200 s for what one does in 100."""
ON_GPUS = ("link", "gpu")
"""Memories that contenders without CPU ranks read.  These start first, all at the same time: none
measures the cores in its start."""
BESIDE_BUDGET = 1.3
"""Memory of a GPU that a contender takes, as a multiple of its budget: what CUDA takes for each
process is not in that."""
CASES = {
    "half": "8b", "budget": "20b", "in-flight": "8b", "drafts": "8b", "formats": "8b",
}  # fmt: skip
"""Shape of each case where there is a GPU; without one it is a smaller one."""
OUTPUT_TOKENS = {"budget": 256, "drafts": 128}
IN_FLIGHT = "32x128"
BATCHES = (1, 8, 32, 128)
PROMPTS = (128, 1024, 8192)


@dataclass(frozen=True)
class Run:
    """Options and values that all contenders of a run share."""

    options: argparse.Namespace
    split: Split
    points: str
    ranks: list[tuple[int, ...]]
    """Logical CPUs of each CPU rank, whose bandwidth is measured between contenders."""
    found: dict[str, Any]
    """Measurements; written after each contender."""


def parse_options() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="without ending")
    parser.add_argument("--case", choices=CASES, default="half")
    parser.add_argument("--shape", choices=SHAPES)
    parser.add_argument("--outside", type=int, help="layers outside the GPU; half by default")
    parser.add_argument("--contenders", help="names with commas; else all but the eager ones")
    parser.add_argument(
        "--before", type=Path, help="another built checkout: the first contender with its code"
    )
    parser.add_argument("--list", action="store_true", help="name the contenders and stop")
    parser.add_argument("--points", help="batch x prompt, or batch x prompt x output, with commas")
    parser.add_argument("--points-of", action="append", default=[], metavar="CONTENDER=POINTS",
                        help="other points of one contender, without the arrival")  # fmt: skip
    parser.add_argument("--most-prompt-tokens", type=int, default=16384,
                        help="of all requests of a point; larger points are left out")  # fmt: skip
    parser.add_argument(
        "--output-tokens", type=int, help="of each request; 32, budget: 256, drafts: 128"
    )
    parser.add_argument("--step-tokens", type=int, help="most tokens of a step")
    parser.add_argument("--arrival", type=int, default=0,
                        help="tokens of a prompt that comes while others decode")  # fmt: skip
    parser.add_argument("--arrival-points", help="points at which it comes, beside --points")
    parser.add_argument("--gpu-budget-gib", type=float, help="that may be used; budget: 24")
    parser.add_argument("--prefetch-step", type=int, help="layers that vllm prefetch copies ahead")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--point-seconds", type=float, default=60, help="then no more repeats")
    parser.add_argument("--timeout", type=float, default=400, help="of one contender")
    parser.add_argument("--reserved-cores", type=int, help="that CPU ranks leave free")
    parser.add_argument("--heavy-tailed", action="store_true",
                        help="weights in bf16 from a checkpoint with such ones")  # fmt: skip
    parser.add_argument("--in-turns", action="store_true",
                        help="start all side by side, then measure in turns")  # fmt: skip
    parser.add_argument("--starting", type=int,
                        help="CPU ranks' engines that start at once; --in-turns: 2")  # fmt: skip
    parser.add_argument("--kv-room-gib", type=float,
                        help="of each engine's GPU; --in-turns: 2")  # fmt: skip
    parser.add_argument("--eager", action="store_true", help="compile nothing")
    parser.add_argument("--llama-bench", type=Path, metavar="PATH", help="compare llama.cpp too")
    parser.add_argument("--gguf", type=Path, metavar="FILE",
                        help="its model; else written with the heavy-tailed weights")  # fmt: skip
    parser.add_argument("--n-cpu-moe", type=int,
                        help="layers with experts on the CPU there; else --outside")  # fmt: skip
    parser.add_argument("--llama-threads", type=int, help="else as many as the CPU ranks have")
    return parser.parse_args()


def main() -> None:
    """Run the contenders one after the other, write and print."""
    options = parse_options()
    gpu = floor.gpu_figures()
    split = split_of(options, has_gpu=gpu is not None)
    reserved = options.reserved_cores
    if reserved is None:
        # As the engine keeps them on its own node.
        reserved = 2 if gpu is not None and (os.cpu_count() or 1) >= 8 else 0
    is_one = gpu is not None or options.case == "formats"
    ranks = floor.compute_cpus(reserved, 1 if is_one else 2)
    there = [*all_contenders(options, split, gpu), *of_llama_cpp(options, split, gpu, ranks)]
    unasked = {one.name for one in there if one.name.endswith(" eager")}
    if options.case != "formats":
        unasked |= {one.name for one in there if one.name.endswith(contenders.STORED)}
    wanted = chosen(there, options.contenders, unasked)
    if options.before:
        wanted.append(contenders.of_checkout(wanted[0], options.before.resolve()))
    wanted = with_points(wanted, options.points_of)
    if options.list:
        print("\n".join(contender.name for contender in wanted))
        return
    points, left_out = points_of(options)
    found = opened(options.out, about(options, split, gpu) | {"points_left_out": left_out})
    run = Run(options, split, points, ranks, found)
    if options.in_turns:
        taking_turns(wanted, run)
    else:
        one_after_the_other(wanted, run)
    if options.arrival_points or not options.arrival:
        print(table(found, width=130), end="")


def one_after_the_other(wanted: list[Contender], run: Run) -> None:
    """Start, measure and end each contender before the next; written down after each."""
    outcomes = run.found["contenders"]
    for contender in wanted:
        before = floor.socket_bandwidths(run.ranks)
        outcome = measured(contender, run)
        outcome["bandwidths"] = [before, floor.socket_bandwidths(run.ranks)]
        earlier = outcomes.get(contender.name)
        outcomes[contender.name] = merged(earlier, outcome) if earlier else outcome
        write(run.options.out, run.found)
        print(contender.name, outcome["status"], outcome["points"] or outcome["arrivals"],
              flush=True)  # fmt: skip


def taking_turns(wanted: list[Contender], run: Run) -> None:
    """Start the contenders, some side by side, and have each measure once a round, in their order.

    Written down after each turn.  A contender that does not start, or fails in a turn, has the
    points of the rounds before and the end of its output.
    """
    outcomes = run.found["contenders"]
    if run.options.heavy_tailed:
        # Once, which engines that start at the same time would all do.
        write_checkpoint(run.split.shape, heavy_tailed_folder(run.split.shape))
    with ExitStack() as stack:
        turns: dict[str, contender_process.Turns] = {}
        share = budget_share(run.options, run.found["gpu"])
        gpus = gpus_of(len(wanted), visible_gpus() or [""], share)
        placed = list(zip(wanted, gpus, strict=True))
        on_gpus = [one for one in placed if one[0].reads in ON_GPUS]
        others = [one for one in placed if one not in on_gpus]
        for some, at_once in ((on_gpus, len(placed)), (others, run.options.starting or STARTING)):
            with ThreadPoolExecutor(at_once) as pool:
                starts = [
                    (contender, gpu, pool.submit(started, contender, run, stack, gpu))
                    for contender, gpu in some
                ]
            for contender, gpu, start in starts:
                outcomes[contender.name] = outcome_of(contender, run) | {"on_gpu": gpu}
                try:
                    turns[contender.name] = start.result()
                except contender_process.NoTurnError as error:
                    outcomes[contender.name] |= {
                        "status": "not started", "end_of_output": str(error)
                    }  # fmt: skip
        rounds: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in turns}
        for _ in range(run.options.repeats):
            for name in [one.name for one in wanted if one.name in turns]:
                # Ranks of the engine before look for messages without a pause for a second.
                time.sleep(1.5)
                outcomes[name]["bandwidths"].append(floor.socket_bandwidths(run.ranks))
                before = floor.cpu_ticks()
                try:
                    said = turns[name].next()
                except contender_process.NoTurnError as error:
                    outcomes[name] |= {"status": "failed", "end_of_output": str(error)}
                    del turns[name]
                    write(run.options.out, run.found)
                    continue
                stolen = floor.stolen_share(before, floor.cpu_ticks())
                outcomes[name]["stolen_shares"].append(stolen)
                rounds[name].append(said.answers("RESULT "))
                outcomes[name]["arrivals"] += said.answers("ARRIVAL ")
                outcomes[name]["points"] = [together(of) for of in zip(*rounds[name], strict=True)]
                write(run.options.out, run.found)
                print(name, said.seconds, rounds[name][-1] or outcomes[name]["arrivals"][-1],
                      flush=True)  # fmt: skip


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES has them."""
    if (named := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name for name in named.split(",") if name]
    return [str(number) for number in range(len(read_gpus()))]


def gpus_of(count: int, gpus: list[str], share: float | None) -> list[str]:
    """The GPU of each of so many contenders: the first one as far as it has room for them.

    GPUs of one host differ by some percent, as one of them is warmer than another.

    Args:
        count: of contenders.
        gpus: that there are.
        share: of a GPU's memory that each contender may use; None where that is not known.

    """
    room = 1 if share is None else max(1, int(1 / (BESIDE_BUDGET * share)))
    return [gpus[number // room % len(gpus)] for number in range(count)]


def started(contender: Contender, run: Run, stack: ExitStack, gpu: str) -> contender_process.Turns:
    """The contender, ready to measure; the stack ends it.

    Args:
        contender: what is started.
        run: what it has in common with the others.
        stack: ends it.
        gpu: the one that it sees, so that a host of several has room for more contenders; empty
            where there is none.

    """
    claims = Path(tempfile.gettempdir()) / f"ray_hetero-turns-{os.getpid()}-{id(contender)}"
    # Engines that take turns share their socket; claims are there to prevent that.
    environment = {**contender.environment, "RAY_HETERO_CLAIM_DIR": str(claims)}
    if gpu:
        environment["CUDA_VISIBLE_DEVICES"] = gpu
    command, log = [*command_of(contender, run), "--turns"], log_of(contender, run)
    return stack.enter_context(
        contender_process.in_turns(command, environment, log, run.options.timeout)
    )


def together(rounds: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    """One point of several rounds: medians, and the figures of all rounds."""
    found: dict[str, Any] = {}
    for name, value in rounds[-1].items():
        if name.endswith("_all"):
            found[name] = [figure for one in rounds for figure in one[name]]
        elif isinstance(value, float) and all(one.get(name) is not None for one in rounds):
            found[name] = round(statistics.median(one[name] for one in rounds), 4)
        else:
            found[name] = value
    return found


def split_of(options: argparse.Namespace, *, has_gpu: bool) -> Split:
    """Shape and layers outside the GPU."""
    shape = options.shape or (CASES[options.case] if has_gpu else "1b")
    layers = SHAPES[shape]["num_hidden_layers"]
    if not has_gpu:
        return Split(shape, layers)
    few = 2 if options.case == "in-flight" else layers // 2
    return Split(shape, options.outside or few)


def all_contenders(
    options: argparse.Namespace, split: Split, gpu: dict[str, Any] | None
) -> list[Contender]:
    """The contenders of a case."""
    if options.case == "in-flight":
        texts = (options.points or IN_FLIGHT).split(",")
        points = [Point.parse(text, options.output_tokens or 32) for text in texts]
        sockets = None if gpu else floor.sockets()
        return contenders.in_flight(split, points, sockets=sockets, step_tokens=options.step_tokens)
    if gpu is None:
        if options.case == "drafts":
            return contenders.drafting(split, sockets=floor.sockets())
        if options.case == "formats":
            return contenders.cpu_formats(floor.compute_cpus(0, 1)[0])
        return contenders.cpu_only(floor.sockets())
    # In the budget case one step holds the prompts of all eight requests, and a second buffer for
    # prefetching does not fit beside half of the layers.
    is_half = options.case != "budget"
    engine = {"max_num_batched_tokens": options.step_tokens or (8192 if is_half else 1024)}
    ahead = options.prefetch_step or (2 if is_half else 1)
    share = budget_share(options, gpu)
    if options.case == "drafts":
        return contenders.drafting(split, sockets=None, share=share)
    of_formats = contenders.formats(split, share=share, engine=engine, prefetch_step=ahead)
    if options.case == "formats":
        return of_formats
    others = contenders.with_gpu(split, share=share, engine=engine, prefetch_step=ahead)
    return others if "num_experts" in SHAPES[split.shape] else [*others, *of_formats]


def budget_share(options: argparse.Namespace, gpu: dict[str, Any] | None) -> float | None:
    """Share of a GPU's memory that each contender may use; None without a budget, or a GPU."""
    budget = options.gpu_budget_gib or (24 if options.case == "budget" else None)
    if gpu is None or budget is None:
        return None
    return round(budget * GIB / gpu["memory_bytes"], 4)


def of_llama_cpp(
    options: argparse.Namespace,
    split: Split,
    gpu: dict[str, Any] | None,
    ranks: list[tuple[int, ...]],
) -> list[Contender]:
    """llama.cpp where its programs are given, in the cases that compare ways to serve."""
    if options.llama_bench is None or options.case not in ("half", "budget"):
        return []
    threads = options.llama_threads or sum(map(len, ranks))
    given = contenders.LlamaCpp(options.llama_bench, options.gguf, threads, options.n_cpu_moe)
    return [given.contender(split, has_gpu=gpu is not None)]


def chosen(
    there: list[Contender], names: str | None, unasked: Collection[str] = ()
) -> list[Contender]:
    """Those that were asked for, in the order asked; without names all but the unasked ones."""
    if names is None:
        return [contender for contender in there if contender.name not in unasked]
    by_name = {contender.name: contender for contender in there}
    if unknown := sorted(set(names.split(",")) - set(by_name)):
        raise SystemExit(f"no contender is called {unknown}; there are {sorted(by_name)}")
    return [by_name[name] for name in names.split(",")]


def with_points(wanted: list[Contender], texts: list[str]) -> list[Contender]:
    """The contenders, with other points for those that --points-of names."""
    points = dict(text.split("=", 1) for text in texts)
    if unknown := sorted(set(points) - {one.name for one in wanted}):
        raise SystemExit(f"--points-of names {unknown}; there are {[one.name for one in wanted]}")
    return [replace(one, points=points.get(one.name, one.points)) for one in wanted]


def points_of(options: argparse.Namespace) -> tuple[str, list[str]]:
    """Points to measure, smallest first, and those left out."""
    if options.points:
        return options.points, []
    if options.case == "budget":
        return "8x128", []
    if options.case in ("drafts", "formats"):
        return "1x128,8x128", []
    every = sorted(((b, p) for b in BATCHES for p in PROMPTS), key=lambda x: (x[0] * x[1], x))
    small = [f"{b}x{p}" for b, p in every if b * p <= options.most_prompt_tokens]
    return ",".join(small), [f"{b}x{p}" for b, p in every if b * p > options.most_prompt_tokens]


def about(options: argparse.Namespace, split: Split, gpu: dict[str, Any] | None) -> dict[str, Any]:
    """Description of a run, kept with its results."""
    shape = SHAPES[split.shape]
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": "python benchmarks/side_by_side.py " + " ".join(sys.argv[1:]),
        "case": options.case,
        "shape": split.shape,
        "layers": split.layers,
        "layers_outside": split.outside,
        "layer_bytes": layer_bytes(shape),
        "head_bytes": head_bytes(shape),
        "cores": os.cpu_count(),
        "gpu": gpu,
        "contenders": {},
    }


def opened(out: Path, new: dict[str, Any]) -> dict[str, Any]:
    """The results so far, if they are of the same case; else new ones.

    Raises:
        SystemExit: the file holds another case.

    """
    path = out.with_suffix(".json")
    if not path.exists():
        return new
    old: dict[str, Any] = json.loads(path.read_text())
    if differing := [k for k in ("case", "shape", "layers_outside") if old[k] != new[k]]:
        raise SystemExit(f"{path} has results of another run ({differing} differ): another --out?")
    return new | {"contenders": old["contenders"]}


def merged(earlier: dict[str, Any], outcome: dict[str, Any]) -> dict[str, Any]:
    """A contender's newest outcome, with the points that only an earlier one has."""

    def key(point: dict[str, Any]) -> tuple[int, ...]:
        names = ("batch", "prompt", "output", "drafts", "least")
        return tuple(point.get(name, 0) for name in names)

    measured = {key(point) for point in outcome["points"]}
    kept = [point for point in earlier["points"] if key(point) not in measured]
    return outcome | {
        "points": kept + outcome["points"],
        "bandwidths": earlier["bandwidths"] + outcome["bandwidths"],
        "memory": outcome["memory"] or earlier["memory"],
    }


def write(out: Path, found: dict[str, Any]) -> None:
    """Write what there is so far."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")


def measured(contender: Contender, run: Run) -> dict[str, Any]:
    """One contender in a process of its own, from its start to its end."""
    command, log = command_of(contender, run), log_of(contender, run)
    outcome = contender_process.run(command, contender.environment, log, run.options.timeout)
    return outcome_of(contender, run) | {
        "status": outcome.status,
        "seconds": outcome.seconds,
        "points": outcome.answers("RESULT "),
        "arrivals": outcome.answers("ARRIVAL "),
        "memory": next(iter(outcome.answers("MEMORY ")), None),
        "end_of_output": outcome.end_of_output,
    }


def outcome_of(contender: Contender, run: Run) -> dict[str, Any]:
    """Facts about a contender that are known before it has measured anything."""
    command = command_of(contender, run)
    return {
        "status": 0,
        "seconds": None,
        "reads": contender.reads,
        "command": [Path(command[1]).name, *command[2:]],
        "points": [],
        "arrivals": [],
        "bandwidths": [],
        "stolen_shares": [],
        "memory": None,
        "end_of_output": "",
    }


def log_of(contender: Contender, run: Run) -> Path:
    """The file for what a contender says."""
    return Path(f"{run.options.out}-logs") / f"{contender.name.replace(' ', '-')}.log"


def command_of(contender: Contender, run: Run) -> list[str]:
    """A contender's command with the shape and what is measured."""
    options = run.options
    command = [*contender.command, "--shape", run.split.shape]
    repeats = 1 if options.in_turns else options.repeats
    command += ["--points", contender.points or run.points, "--repeats", str(repeats)]
    command += ["--point-seconds", str(options.point_seconds)]
    tokens = options.output_tokens or OUTPUT_TOKENS.get(options.case, 32)
    command += ["--output-tokens", str(tokens)]
    if options.arrival and not (contender.points and options.arrival_points):
        command += ["--arrival", str(options.arrival)]
        if options.arrival_points:
            command += ["--arrival-points", options.arrival_points]
    command += ["--eager"] if options.eager and "--eager" not in command else []
    if options.heavy_tailed and "--stored" not in command:
        command += ["--heavy-tailed"]
    room = options.kv_room_gib or (2 if options.in_turns else None)
    # An engine that looks for its room would take the others' for its own use.
    command += ["--kv-room-gib", str(room)] if room else []
    return command


if __name__ == "__main__":
    main()

"""Cost of a step that computes nothing: driver to ranks and back, beside stock `mp`.

CPU ranks in tensor parallel, a model of two layers that are 64 wide, eager, with vLLM's kernels in
both.  The driver is the process that asks, so that nothing but it and the ranks takes part, and
there should be a core for each of them: on two cores, `--ranks 1`.  Both engines are there all the
time and measure in turns, because a host's cores are at times twice as slow as at others.  The
table has medians over all rounds and, what disturbs being only ever added, the least of them.

    python benchmarks/control_plane.py --out control-plane

With `--runners LAYOUT`, the engines are CPU ranks of a layout with vLLM's model runner V2
and with V1 (`cpu.model_runner`); `--kernel streaming` gives both this project's kernels.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import sys
import time
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import contender_process
import contenders
import floor
from rich.console import Console
from rich.table import Table

POINTS = "1x16,32x16"
MORE = ["--eager", "--output-tokens", "129"]


def main() -> None:
    """Run all rounds, write and print.

    Raises:
        SystemExit: an engine failed.

    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--ranks", type=int, choices=(1, 2), default=2)
    parser.add_argument("--timeout", type=float, default=200)
    parser.add_argument("--before", type=Path, help="another checkout of this project, beside both")
    parser.add_argument("--runners", type=json.loads, metavar="LAYOUT", help="V2 beside V1")
    parser.add_argument("--kernel", help="cpu.linear_kernel of --runners")
    parser.add_argument("--shape", default="none")
    parser.add_argument("--points", default=POINTS)
    parser.add_argument("--out", type=Path, required=True, help="without ending")
    options = parser.parse_args()
    pair = contenders.cpu_ranks(options.ranks, floor.sockets())
    if options.runners is not None:
        pair = contenders.model_runners(options.runners, floor.sockets(), options.kernel)
    elif options.before is not None:
        pair.insert(1, contenders.of_checkout(pair[0], options.before.resolve()))
    rounds: dict[str, list[dict[str, float]]] = {contender.name: [] for contender in pair}
    with ExitStack() as stack:
        turns = [stack.enter_context(started(contender, options)) for contender in pair]
        for _ in range(options.rounds):
            for contender, turn in zip(pair, turns, strict=True):
                # The other engine's ranks look for messages without a pause for a second.
                time.sleep(2)
                rounds[contender.name].append(figures(turn.next()))
                print(contender.name, rounds[contender.name][-1], flush=True)
    found = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": "python benchmarks/control_plane.py " + " ".join(sys.argv[1:]),
        "cores": os.cpu_count(),
        "ranks": options.ranks,
        "rounds": rounds,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    console = Console(record=True, width=100)
    console.print(table(rounds))
    options.out.with_suffix(".txt").write_text(console.export_text())


def started(
    contender: contenders.Contender, options: argparse.Namespace
) -> AbstractContextManager[contender_process.Turns]:
    """The contender's engine, ready to measure."""
    command = [
        *contender.command, *MORE, "--shape", options.shape, "--points", options.points,
        "--repeats", "3", "--calls", "20000", "--turns",
    ]  # fmt: skip
    log = Path(f"{options.out}-logs") / f"{contender.name.replace(' ', '-')}.log"
    environment = dict(contender.environment) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    return contender_process.in_turns(command, environment, log, options.timeout)


def figures(outcome: contender_process.Outcome) -> dict[str, float]:
    """Milliseconds of a step by batch, microseconds of a call."""
    (calls,) = outcome.answers("CALLS ")
    steps = {
        f"step at batch {point['batch']}, ms": point["decode_ms"]
        for point in outcome.answers("RESULT ")
    }
    return steps | {"call of all ranks, us": calls["call_us"]}


def table(rounds: dict[str, list[dict[str, Any]]]) -> Table:
    """Medians and least figures of all, and the ratios of the first to the others."""
    ours, *others = rounds
    shown = Table(title="Nothing to compute")
    for column in ("", "", *rounds, *(f"{ours} ÷ {other}" for other in others)):
        shown.add_column(column)
    for figure in rounds[ours][0]:
        for what, of in (("median", statistics.median), ("least", min)):
            values = [of([one[figure] for one in rounds[name]]) for name in rounds]
            ratios = (f"{values[0] / value:.2f}" for value in values[1:])
            shown.add_row(figure, what, *(f"{value:.3g}" for value in values), *ratios)
    return shown


if __name__ == "__main__":
    main()

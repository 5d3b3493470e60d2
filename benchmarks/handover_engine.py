"""The handover of tokens to expert ranks in a whole engine: microseconds a layer.

    python benchmarks/handover_engine.py --out handover-engine
    RAY_HETERO_PRETEND_GPU=1 python benchmarks/handover_engine.py --layers 4 --eager --out rehearsal

Two engines on the same GPU decode in turns, once each a round: one with all experts of its 48
layers on expert ranks, one with nothing outside the GPU.  A layer has one expert, of next to no
size, so that the difference of their steps, divided by the layers, is what handing tokens over
costs beside computing: the GPU's writing and waiting, the polling of the sockets, and the few
microseconds that an expert takes there less those that it takes on the GPU.
`expert_handover.py` measures the same without an engine.

With RAY_HETERO_PRETEND_GPU=1 a host without a GPU runs the script; what it says then is no figure
of a handover, since the stage waits in a thread.
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
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import contender_process
import floor
from contenders import Contender, hetero
from shapes import SHAPES

SHAPE = "handover"
ALONE = "gpu alone"


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="without ending")
    parser.add_argument("--ranks", default="1", help="numbers of expert ranks, with commas")
    parser.add_argument("--layers", type=int, help="of the model; 48")
    parser.add_argument("--points", default="1x16,8x16,32x16")
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--timeout", type=float, default=400, help="of a start, and of a turn")
    parser.add_argument("--eager", action="store_true", help="compile nothing")
    options = parser.parse_args()
    layers = options.layers or SHAPES[SHAPE]["num_hidden_layers"]
    engines = contenders([int(one) for one in options.ranks.split(",")])
    gpu = floor.gpu_figures()
    steps: dict[str, list[list[dict[str, Any]]]] = {one.name: [] for one in engines}
    with ExitStack() as stack:
        turns = {one.name: stack.enter_context(started(one, options)) for one in engines}
        for _ in range(options.rounds):
            for name, engine in turns.items():
                # Ranks of the engine before look for messages without a pause for a while.
                time.sleep(1.5)
                steps[name].append(engine.next().answers("RESULT "))
            found = {
                "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                "command": "python benchmarks/handover_engine.py " + " ".join(sys.argv[1:]),
                "device": gpu["name"] if gpu else "pretended",
                "cores": os.cpu_count(),
                "layers": layers,
                "points": [point for name in turns for point in compared(name, steps, layers)],
            }
            options.out.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    print(*found["points"], sep="\n", flush=True)


def contenders(ranks: list[int]) -> list[Contender]:
    """One engine without expert ranks, and one for each number of them."""
    engine = {"gpu_memory_utilization": 0.3, "max_num_batched_tokens": 1024}

    def one(name: str, config: dict[str, Any]) -> Contender:
        return hetero(name, ["gpu"], config=config, engine=engine, reads="gpu")

    return [
        one(ALONE, {"experts": {"ranks": 0}}),
        *(
            one(f"expert ranks: {number}", {
                "experts": {"ranks": number, "layers": "all", "prefill_on_gpu": False},
                "cpu": {"ranks_per_socket": -(-number // floor.sockets())},
            })
            for number in ranks
        ),
    ]  # fmt: skip


def started(contender: Contender, options: argparse.Namespace) -> Any:
    """A context in which the engine is there, to measure once for each turn."""
    command = [
        *contender.command, "--shape", SHAPE, "--points", options.points, "--repeats", "1",
        "--output-tokens", str(options.output_tokens), "--kv-room-gib", "1", "--turns",
        *(["--layers", str(options.layers)] if options.layers else []),
        *(["--eager"] if options.eager else []),
    ]  # fmt: skip
    name = contender.name.replace(" ", "-").replace(":", "")
    # Engines that take turns share their sockets; claims are there to prevent that.
    claims = Path(tempfile.gettempdir()) / f"ray_hetero-handover-{os.getpid()}-{name}"
    environment = {**contender.environment, "RAY_HETERO_CLAIM_DIR": str(claims)}
    log = Path(f"{options.out}-logs") / f"{name}.log"
    return contender_process.in_turns(command, environment, log, options.timeout)


def compared(
    name: str, steps: dict[str, list[list[dict[str, Any]]]], layers: int
) -> list[dict[str, Any]]:
    """Time of a step at each point of an engine, and time that a layer adds to the GPU alone.

    Args:
        name: of the engine.
        steps: by engine and round, the points.
        layers: of the model.

    """
    found = []
    for place, point in enumerate(steps[name][0] if steps[name] else ()):
        ours, alone = ([turn[place]["decode_ms"] for turn in steps[one]] for one in (name, ALONE))
        result = {
            "engine": name, "batch": point["batch"], "prompt": point["prompt"],
            "step_ms": round(statistics.median(ours), 4), "step_ms_all": ours,
        }  # fmt: skip
        if name != ALONE:
            # Of rounds, so that what disturbs the host for a while is in both.
            more = [1000 * (a - b) / layers for a, b in zip(ours, alone, strict=True)]
            result |= {
                "us_a_layer": round(statistics.median(more), 2),
                "us_a_layer_all": [round(one, 2) for one in more],
            }
        found.append(result)
    return found


if __name__ == "__main__":
    main()

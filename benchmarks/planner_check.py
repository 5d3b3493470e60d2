"""Predictions of the planner beside measurements: splits, the best of a sweep, KV capacity.

    python benchmarks/planner_check.py --shape 8b --splits 8,16,24 --out planner-8b
    python benchmarks/planner_check.py --shape 1b-16 --sweep 1 --out planner-1b

Starting an engine for every split would take minutes each, so one engine serves for all of them: a
model of twice the layers, cut in the middle, whose stages run only as many of their layers as the
split gives them.  A GPU captures its decode step in a CUDA graph anew for each split, or launches
its kernels one by one with `--eager`; nothing is compiled.  Kernels, messages and the stage
boundary are those of a real engine with that split; only the weights that nobody reads are too
many.

Steps are timed as in engine_run.py; the stages' own times are those of their step clocks.  The KV
capacity is that of the engine itself, with all layers.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine_run import Point, run_requests
from rich.console import Console
from rich.table import Table
from shapes import SHAPES, write_shape

from placement.cluster.assignment import Node, Seat
from placement.host.bandwidth_cache import cached_bandwidth
from placement.host.sockets import sockets_of
from placement.host.sysfs import read_host
from placement.model.reading import shape_of
from placement.plan.stage_plan import Split
from ray_hetero.config import HeteroConfig
from ray_hetero.planning.cluster_measurements import reading_together
from ray_hetero.planning.engine_facts import EngineFacts
from ray_hetero.planning.layer_plan import plan_layers
from ray_hetero.planning.machine import Machine, Threads
from ray_hetero.planning.plan_request import PlanRequest
from ray_hetero.planning.planned_layers import LayerPlan

ONE = Point(batch=1, prompt=1, output=4)
"""Point with a prompt of one token: every step decodes, so the clocks count nothing else."""
MAX_MODEL_LEN = 512
"""Also the context that the plans are priced at; its keys and values are 0.5 % of what is read."""
CLOSE = 1.05
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1]}
"""Only what is called anew in each step can be cut."""


@dataclass(frozen=True)
class Measured:
    """Medians of one split's decode steps."""

    step_ms: float
    stage_ms: tuple[float, ...]
    """Busy time of each stage in a step, by its own clock."""
    exchange_ms: tuple[float, ...]
    """Time of each stage in the stage boundary, beside waiting."""


def parse_options() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--splits", default="", help="layers of the first stage, with commas")
    parser.add_argument("--sweep", type=int, default=0, help="all splits, every so many layers")
    parser.add_argument("--layout", default='[["cpu"],["gpu"]]')
    parser.add_argument("--config", default="{}", help="more of the ray_hetero configuration")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--gpu-share", type=float, default=0.9)
    parser.add_argument("--max-num-seqs", type=int, default=8)
    parser.add_argument("--output-tokens", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True, help="without ending")
    return parser.parse_args()


def main() -> None:
    """Predict, then start the engine and measure; write and print."""
    options = parse_options()
    layers = SHAPES[options.shape]["num_hidden_layers"]
    firsts = sorted(
        {int(first) for first in filter(None, options.splits.split(","))}
        | (set(range(1, layers, options.sweep)) if options.sweep else set())
    )
    # Before the engine takes the memory that the plans count on.
    planner = Planner(options)
    picked = {objective: planner.split(layers, objective=objective) for objective in OBJECTIVES}
    firsts = sorted({*firsts, *(split.layers[0] for split in picked.values())})
    predicted = {first: planner.split(layers, [first, layers - first]) for first in firsts}
    whole = planner.plan(2 * layers, [layers, layers])
    llm = engine(options, layers)
    measured = {first: measure(llm, first, layers, options) for first in firsts}
    found = results(options, predicted, measured, picked) | {"kv": kv_capacity(llm, whole)}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    print(report(found), end="")


OBJECTIVES = ("latency", "throughput")


class Planner:
    """Asks the planner what the executor would ask it, of models of any number of layers."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._layout = json.loads(options.layout)
        self._more = json.loads(options.config)
        self._shape = options.shape
        host = read_host()
        cpu = HeteroConfig.model_validate(self._more).cpu
        sockets = sockets_of(host, cpu.unit, cpu.ranks_per_socket)
        gpus, cpus = len(host.gpus), float(os.cpu_count() or 1)
        self._node = Node("here", "", host, sockets, gpus, cpus, is_driver=True)
        self._facts = EngineFacts(
            shape=None,
            why_no_shape="",
            hidden_layers=0,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=2048,
            gpu_memory_utilization=options.gpu_share,
            is_eager=options.eager,
        )

    def plan(
        self, layers: int, given: Sequence[int] | None = None, objective: str = "latency"
    ) -> LayerPlan:
        """The plan of a model with so many layers."""
        config = self._more | {"layout": self._layout, "objective": objective}
        shape = shape_of(write_shape(self._shape, layers=layers), "bfloat16", "auto")
        return plan_layers(
            PlanRequest(
                HeteroConfig.model_validate(config | ({"layers": given} if given else {})),
                Machine((self._node,), self._bandwidth),
                replace(self._facts, shape=shape, hidden_layers=layers),
                len(self._layout),
                len(self._layout[0]),
            )
        )

    def split(
        self, layers: int, given: Sequence[int] | None = None, objective: str = "latency"
    ) -> Split:
        """Its split.

        Raises:
            SystemExit: there is no plan, as where a device is not known.

        """
        plan = self.plan(layers, given, objective)
        if plan.split is None:
            raise SystemExit(f"no plan: {plan.warning}")
        return plan.split

    def _bandwidth(self, seats: Sequence[Seat], threads: Threads) -> dict[int, float]:
        model = self._node.host.cpu_model
        return {
            rank: cached_bandwidth(group.cpus, model) * len(threads[rank]) / group.threads
            for rank, group in reading_together(seats, threads).items()
        }


def engine(options: argparse.Namespace, layers: int) -> Any:
    """Two stages of `layers` layers each, which nothing is compiled of."""
    from vllm import LLM

    # The ranks are sent functions.
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    layout = json.loads(options.layout)
    config = json.loads(options.config) | {"layout": layout, "layers": [layers, layers]}
    return LLM(
        model=str(write_shape(options.shape, layers=2 * layers)),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=2048,
        gpu_memory_utilization=options.gpu_share,
        enforce_eager=options.eager,
        compilation_config=GRAPHS,
        enable_prefix_caching=False,
        distributed_executor_backend="ray_hetero",
        pipeline_parallel_size=len(layout),
        tensor_parallel_size=len(layout[0]),
        additional_config={"ray_hetero": config},
    )


def run_layers(worker: Any, first: int, second: int) -> None:
    """On a rank: run only so many layers of the first and of the second stage."""
    from vllm.distributed.parallel_state import get_pp_group

    from ray_hetero.kernels.layers.decode_step import DecodeStep
    from ray_hetero.kernels.layers.decoder_layers import DecoderLayers
    from ray_hetero.kernels.layers.fused_modules import registered
    from ray_hetero.kernels.layers.post_attention import PostAttentionBlock

    model = worker.model_runner.model.model
    count = first if get_pp_group().is_first_rank else second
    model.end_layer = model.start_layer + count
    # On a CPU rank the first layer's module computes all of them in one call.
    for run in registered(DecoderLayers):
        attention, block = run._layers[count - 1]
        last = PostAttentionBlock(replace(block.parts, next=None), run._kernel)
        layers = [*run._layers[: count - 1], (attention, last)]
        run.decode_step = DecodeStep(run._input, layers, run._kernel, run._adapters)
    manager = getattr(worker.model_runner, "cudagraph_manager", None)
    if manager is not None and manager.needs_capture():
        manager.release_graphs()
        worker.model_runner.capture_model()


def measure(llm: Any, first: int, layers: int, options: argparse.Namespace) -> Measured:
    """Decode steps of one split, one sequence."""
    llm.collective_rpc(run_layers, args=(first, layers - first))
    run_requests(llm, ONE, 0)
    point = replace(ONE, output=options.output_tokens)
    steps, stages = [], []
    for repeat in range(1, options.repeats + 1):
        before = llm.collective_rpc("step_totals")
        timeline = run_requests(llm, point, 1000 * first + repeat)
        steps.append(timeline.decode_ms(1))
        after = llm.collective_rpc("step_totals")
        stages.append([per_step(*both) for both in zip(before, after, strict=True)])
    by_stage = list(zip(*stages, strict=True))

    def medians(name: str) -> tuple[float, ...]:
        return tuple(statistics.median(run[name] for run in stage) for stage in by_stage)

    return Measured(statistics.median(steps), medians("busy_s"), medians("exchange_s"))


def per_step(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """Milliseconds of a step, by what they went to."""
    steps = after["steps"] - before["steps"]
    return {name: 1000 * (after[name] - before[name]) / steps for name in ("busy_s", "exchange_s")}


def kv_capacity(llm: Any, plan: LayerPlan) -> dict[str, float]:
    """Tokens that the KV cache holds, and what the plan had said."""
    cache = llm.llm_engine.vllm_config.cache_config
    # One block is vLLM's own.
    got = (cache.num_gpu_blocks - 1) * cache.block_size
    return {"planned": plan.kv_tokens, "got": got, "ratio": round(got / plan.kv_tokens, 4)}


def results(
    options: argparse.Namespace,
    predicted: dict[int, Split],
    measured: dict[int, Measured],
    picked: dict[str, Split],
) -> dict[str, Any]:
    """Everything, as plain values."""
    return {
        "shape": options.shape,
        "layout": options.layout,
        "splits": [
            {
                "layers": list(split.layers),
                "predicted_ms": round(1000 * split.step_s, 3),
                "measured_ms": round(measured[first].step_ms, 3),
                "predicted_stage_ms": [round(1000 * s.decode.seconds, 3) for s in split.stages],
                "measured_stage_ms": [round(ms, 3) for ms in measured[first].stage_ms],
                "exchange_ms": [round(ms, 3) for ms in measured[first].exchange_ms],
            }
            for first, split in predicted.items()
        ],
        "picked": {objective: list(split.layers) for objective, split in picked.items()},
    }


def report(found: dict[str, Any]) -> str:
    """The results for people."""
    shown = Table(title=f"{found['shape']}, {found['layout']}: decode step, predicted and measured")
    for column in ("layers", "predicted, ms", "measured, ms", "ratio", "stages: predicted, ms",
                   "measured, ms", "exchange, ms"):  # fmt: skip
        shown.add_column(column, justify="right")
    for row in found["splits"]:
        shown.add_row(
            "+".join(map(str, row["layers"])),
            f"{row['predicted_ms']:.2f}",
            f"{row['measured_ms']:.2f}",
            f"{row['measured_ms'] / row['predicted_ms']:.2f}",
            *(
                " + ".join(f"{ms:.2f}" for ms in row[key])
                for key in ("predicted_stage_ms", "measured_stage_ms", "exchange_ms")
            ),
        )
    console = Console(width=120, file=io.StringIO(), record=True)
    console.print(shown)
    for objective, layers in found["picked"].items():
        console.print(verdict(found["splits"], objective, layers), highlight=False)
    for line in fits(found["splits"]):
        console.print(line, highlight=False)
    kv = found["kv"]
    console.print(
        f"KV cache: planned {kv['planned']} tokens, got {kv['got']}, ratio {kv['ratio']}",
        highlight=False,
    )
    return console.export_text()


def fits(splits: Sequence[dict[str, Any]]) -> list[str]:
    """Each stage's time as a line over its layers: what a layer costs, and what a step beside."""
    lines = []
    for stage in range(len(splits[0]["layers"])) if len(splits) > 1 else ():
        layers = [row["layers"][stage] for row in splits]
        lines.append(
            f"stage {stage}: "
            + ", ".join(
                f"{name} {fit.intercept:.2f} ms + {fit.slope:.3f} ms a layer"
                for name in ("predicted", "measured")
                for fit in [
                    statistics.linear_regression(
                        layers, [row[f"{name}_stage_ms"][stage] for row in splits]
                    )
                ]
            )
        )
    return lines


def verdict(splits: Sequence[dict[str, Any]], objective: str, layers: list[int]) -> str:
    """Where the planner's pick lies among the measured splits."""

    def value(row: dict[str, Any]) -> float:
        return float(
            row["measured_ms"] if objective == "latency" else max(row["measured_stage_ms"])
        )

    best = min(splits, key=value)
    mine = next(row for row in splits if row["layers"] == layers)
    ratio = value(mine) / value(best)
    return (
        f"{objective}: the planner picks {layers}, {value(mine):.2f} ms; best of {len(splits)} "
        f"measured is {best['layers']}, {value(best):.2f} ms; ratio {ratio:.3f} "
        f"({'within' if ratio <= CLOSE else 'NOT within'} 5 %)"
    )


if __name__ == "__main__":
    main()

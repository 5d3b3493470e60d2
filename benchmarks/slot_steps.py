"""Decode steps beside an expert rank: slots off, on and automatic, or whole layers instead.

    python benchmarks/slot_steps.py --out slot-steps.json
    python benchmarks/slot_steps.py --trace /tmp/routes --out slot-steps.json
    python benchmarks/slot_steps.py --device cpu --shape 16x64x64x4 --layers 4 --steps 60 \\
        --warm-up 700 --out rehearsal.json

The first two on a GPU host, with vLLM and the native modules; the last one rehearses it without a
GPU, and says nothing about speed.  A process beside this one holds the experts of all layers, as an
expert rank does.  A step is what an engine's graph does with them (`stage_experts`): tokens handed
over, products of what is in slots, the wait for the sums; instead of attention the GPU is busy for
`--others-us` a layer.  It is captured once, and replayed with other experts in every step: those of
a trace (`experts.trace`), or the made-up routing of expert_slots.py, of which the default is sticky
so that slots for an eighth of the experts hold two thirds for one request.

- off: the sockets compute all experts.
- always: slots for `--percent` of each layer's experts, filled while steps go on.
- auto: the same, which the switch turns on and off.
- layers: as many whole layers as take the same memory, in 16 bits, with no slots.

The host orders a step once the one before the last has ended, as with scheduling ahead.
"""

from __future__ import annotations

import argparse
import collections
import functools
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import expert_slots
import numpy as np
import split_experts
import torch
from expert_weights import Shape

from placement.plan.devices import DeviceFigures
from placement.plan.expert_slots import SlotRates
from placement.units import GIB
from ray_hetero.distributed import stage_experts
from ray_hetero.distributed.expert_channel import ExpertChannel
from ray_hetero.observability.route_trace import RouteTrace
from ray_hetero.offload.experts.expert_expansion import sizes_of
from ray_hetero.offload.experts.expert_slots import ExpertSlots, expert_bytes
from ray_hetero.offload.experts.linked_experts import LinkedSlice
from ray_hetero.offload.experts.slot_switch import Phase, SlotSwitch

MODES = ("off", "always", "auto", "layers", "off again")
AHEAD = 2
"""Steps that are ordered before the first of them has ended."""
CYCLES = 50_000_000
"""Cycles that are slept to measure how long they take."""
Slices = list[tuple[LinkedSlice, ...]]


def main() -> None:
    """Measure, print a line for each number of requests, routing and mode, and write."""
    options = parsed()
    device = torch.device(options.device)
    cores = options.cores or max(1, len(os.sched_getaffinity(0)) - 1)
    shape, found = options.shape, []
    most = max(options.requests)
    way = split_experts.connected(shape, options.kind, options.layers, cores, most, device)
    with torch.inference_mode(), way as (channel, asked, offer):
        slices: Slices = [(offer.slices[layer.name],) for layer in asked]
        for routing in options.routing:
            for requests in options.requests:
                routes = routes_of(options, routing, requests)
                for mode in MODES:
                    bench = Bench(options, channel, slices, mode, requests, device)
                    row = {"routing": routing, "requests": requests, **bench.run(routes)}
                    found.append(row)
                    print("RESULT " + json.dumps(row), flush=True)
                    if channel.problem is not None:
                        raise channel.problem
    summary = summed_up(found)
    print(*("SUMMARY " + json.dumps(one) for one in summary), sep="\n", flush=True)
    about = {key: str(value) for key, value in vars(options).items()} | {"threads": cores}
    result = {"options": about, "device": name_of(device), "points": found, "summary": summary}
    options.out.write_text(json.dumps(result, indent=1) + "\n")


def parsed() -> argparse.Namespace:
    """The command's options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", type=Shape.parse, default=Shape(128, 2048, 768, 8))
    parser.add_argument("--kind", default="compact", choices=["compact", "packed"])
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--percent", type=float, default=12.5, help="of each layer's experts")
    parser.add_argument("--requests", default="1,4,8,32")
    parser.add_argument("--routing", default="even,sticky", help="or trace, with --trace")
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--steps", type=int, default=600, help="that are measured")
    parser.add_argument("--warm-up", type=int, default=1200, help="steps before, which fill slots")
    parser.add_argument("--others-us", type=float, default=60, help="of the GPU, a layer")
    parser.add_argument("--cores", type=int, default=0, help="of the expert rank; all but one")
    parser.add_argument("--gpu-gb-s", type=float, default=3000, help="for the prediction of auto")
    parser.add_argument("--link-gb-s", type=float, default=50, help="the same")
    parser.add_argument("--stay", type=float, default=0.85, help="probability of sticky")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.requests = [int(one) for one in options.requests.split(",")]
    options.routing = ["trace"] if options.trace else options.routing.split(",")
    options.experts, options.chosen = options.shape.experts, options.shape.chosen
    options.exponent, options.memory = 0.8, 4
    return options


def name_of(device: torch.device) -> str:
    """Name of a device, for people."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "pretended"


def routes_of(options: argparse.Namespace, routing: str, requests: int) -> np.ndarray:
    """Experts [steps, layers, requests, chosen] of the warm-up's and the measured steps.

    A trace's single tokens are divided among requests; it begins anew where it ends.
    """
    steps = options.warm_up + options.steps
    if routing == "trace":
        return of_trace(options.trace, options.layers, steps, requests)
    how = argparse.Namespace(**{**vars(options), "steps": steps})
    made = [chosen for _, chosen in expert_slots.ROUTINGS[routing](how, requests)]
    return np.stack(made).reshape(steps, options.layers, requests, -1).astype(np.int32)


def of_trace(path: Path, layers: int, steps: int, requests: int) -> np.ndarray:
    """Experts that a trace's first layers have chosen: [steps, layers, requests, chosen]."""
    of_layer: dict[int, list[np.ndarray]] = {}
    for layer, chosen in RouteTrace.read(path).records:
        if layer < layers:
            of_layer.setdefault(layer, []).append(chosen)
    tokens = [np.concatenate(of_layer[layer]) for layer in range(layers)]
    length = min(map(len, tokens))
    # Each request begins at another place.
    at = np.arange(steps)[:, None] + np.arange(requests) * (length // requests)
    return np.stack([one[at % length] for one in tokens], axis=1).astype(np.int32)


@functools.cache
def cycles_a_second() -> float:
    """Cycles that the GPU sleeps in a second."""
    torch.cuda._sleep(1)
    torch.cuda.synchronize()
    start = time.perf_counter()
    torch.cuda._sleep(CYCLES)
    torch.cuda.synchronize()
    return CYCLES / (time.perf_counter() - start)


def whole_layers(layers: int, percent: float) -> int:
    """Layers whose experts take as much memory as slots for some of each layer's."""
    return round(layers * percent / 100)


@dataclass
class Bench:
    """One mode for one number of requests."""

    options: argparse.Namespace
    channel: ExpertChannel
    slices: Slices
    mode: str
    requests: int
    device: torch.device

    def __post_init__(self) -> None:
        shape, layers = self.options.shape, self.options.layers
        self._module: Any = torch.cuda if self.device.type == "cuda" else torch.cpu
        torch.manual_seed(0)
        self._x = torch.randn(self.requests, shape.hidden).bfloat16().to(self.device)
        self._weights = torch.full((self.requests, shape.chosen), 1 / shape.chosen).to(self.device)
        self._ids = torch.zeros(
            (layers, self.requests, shape.chosen), dtype=torch.int32, device=self.device
        )
        self._slots = self._made_slots()
        self._on_gpu = whole_layers(layers, self.options.percent) if self.mode == "layers" else 0
        self._resident = self._made_layers()
        # Private names, as a stage sets them.
        stage_experts._channels[:] = [self.channel]
        stage_experts._slots[:] = [] if self._slots is None else [self._slots]
        self._sums = self._x

    def _made_slots(self) -> ExpertSlots | None:
        # What a mode before may have left.
        self.channel.slot_orders.follow(False)
        if self.mode not in ("always", "auto"):
            return None
        slots = max(1, round(self.options.shape.experts * self.options.percent / 100))
        switch = SlotSwitch(self._rates()) if self.mode == "auto" else None
        return ExpertSlots(
            self.device,
            self.slices,
            budget_of(self.slices, slots),
            self.channel.slot_orders,
            switch,
        )

    def _made_layers(self) -> ExpertSlots | None:
        """The first layers with all of their experts on the GPU."""
        if not self._on_gpu:
            return None
        slices = self.slices[: self._on_gpu]
        return ExpertSlots(
            self.device, slices, budget_of(slices, self.options.shape.experts),
            self.channel.slot_orders, is_fixed=True,
        )  # fmt: skip

    def _rates(self) -> SlotRates | None:
        options = self.options
        gpu = DeviceFigures(
            "GPU", "gpu", 1e9 * options.gpu_gb_s, 1.0, GIB, host_link=1e9 * options.link_gb_s
        )
        stored = sum(one.nbytes for one in self.slices[0]) / options.shape.experts
        return SlotRates.of(stored, options.shape.weights, gpu, is_16_bit=True)

    def step(self) -> None:
        """Order the layers of a step."""
        for layer in range(self.options.layers):
            self._others()
            given = self._x, self._weights, self._ids[layer]
            if layer < self._on_gpu:
                assert self._resident is not None, "its layers are there"
                self._sums = self._resident.sums(*given, layer)
                continue
            handed = torch.ops.ray_hetero.hand_experts_over(*given, layer)
            self._sums = torch.ops.ray_hetero.take_expert_sums(*given, handed, layer)

    def _others(self) -> None:
        """Keep the GPU busy as long as a layer's attention may."""
        if self.device.type == "cuda":
            torch.cuda._sleep(int(1e-6 * self.options.others_us * cycles_a_second()))

    def _captured(self) -> Callable[[], None]:
        """Function that orders a step: the replay of a graph."""
        if self.device.type != "cuda":
            return self.step
        for _ in range(2):
            self.step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        return graph.replay

    def run(self, routes: np.ndarray) -> dict[str, Any]:
        """Seconds of steps, and what slots have held."""
        self.channel.begin_step(self.requests, 1)
        order, given = self._captured(), torch.from_numpy(routes)
        if self.device.type == "cuda":
            given = given.pin_memory()
        ends: collections.deque[tuple[Any, float]] = collections.deque()
        taken: list[float] = []
        phases: collections.Counter[Phase] = collections.Counter()
        before, last = self._counts(), time.perf_counter()
        for number in range(len(routes)):
            if number == self.options.warm_up:
                before, taken = self._counts(), []
                phases.clear()
            self.channel.begin_step(self.requests, 1)
            if self._slots is not None:
                self._slots.begin_step(self.requests)
                phases[self._slots._phase] += 1
            self._ids.copy_(given[number], non_blocking=True)
            order()
            event = self._module.Event()
            event.record(self._module.current_stream())
            ends.append((event, last))
            if len(ends) == AHEAD:
                ends.popleft()[0].synchronize()
                now = time.perf_counter()
                taken.append(now - last)
                last = now
        ends.pop()[0].synchronize()
        return {
            "mode": self.mode,
            "step_ms": round(1000 * statistics.fmean(taken), 4),
            "median_ms": round(1000 * statistics.median(taken), 4),
            **self._said(before, phases, len(taken)),
        }

    def _counts(self) -> np.ndarray:
        """Experts read and held as the book has them, and those that were copied."""
        sums = self.channel.slot_orders.slot_sums
        copied = 0 if self._slots is None else self._slots.copied
        return np.array([sums[4], sums[5], copied])

    def _said(
        self, before: np.ndarray, phases: collections.Counter[Phase], steps: int
    ) -> dict[str, Any]:
        if self._slots is None:
            return {"layers_on_gpu": self._on_gpu} if self._on_gpu else {}
        read, hits, copied = (self._counts() - before).tolist()
        return {
            "slots": self._slots.slots,
            "slots_gib": round(self._slots.gpu_bytes / GIB, 3),
            "held": round(hits / max(1, read), 3),
            "copies_a_step": round(copied / max(1, steps), 2),
            "on": round(phases[Phase.ON] / max(1, phases.total()), 3),
        }


def budget_of(slices: Slices, slots: int) -> int:
    """Bytes for so many slots of each layer."""
    return sizes_of(slices).slot_bytes(slots, sum(map(expert_bytes, slices)))


def summed_up(points: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """How automatic compares with the better of off and on, and slots with whole layers."""
    found = []
    of_case: dict[tuple[str, int], dict[str, float]] = {}
    for point in points:
        case = of_case.setdefault((point["routing"], point["requests"]), {})
        case[point["mode"]] = point["step_ms"]
    for (routing, requests), ms in of_case.items():
        off = min(ms["off"], ms["off again"])
        found.append(
            {
                "routing": routing,
                "requests": requests,
                "always_over_off": round(ms["always"] / off, 3),
                "auto_over_better": round(ms["auto"] / min(off, ms["always"]), 3),
                "layers_over_always": round(ms["layers"] / ms["always"], 3),
                "off_again_over_off": round(ms["off again"] / ms["off"], 3),
            }
        )
    return found


if __name__ == "__main__":
    main()

"""Share of experts that slots in a GPU's memory would hold, by the routing of tokens.

    python benchmarks/expert_slots.py --trace routes.bin              # written with experts.trace
    python benchmarks/expert_slots.py --npz mixture/routing.npz       # of train_mixture.py
    python benchmarks/expert_slots.py --routing even zipf sticky --out expert-slots.json

Traces and made-up routing are replayed through the slots that expert ranks count (csrc/handover/
shadow.h), for several numbers of requests that decode together.  Of a trace with its own batches
they are taken as they are; of `--npz` each request begins at another place of the text.

- even: each token chooses all experts with the same probability.
- zipf: expert number n of a layer, in an order of its own, with one in proportion to n^-s.
- sticky: as even, but with a probability a choice is one of the request's last `--memory` tokens'.

Needs this repository with its native module, not vLLM.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ray_hetero.distributed.expert_memory import native
from ray_hetero.observability.route_trace import RouteTrace

Step = tuple[int, np.ndarray]
"""Number of a layer, and experts [tokens, chosen]."""


def main() -> None:
    """Replay, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--npz", type=Path)
    parser.add_argument("--routing", nargs="*", default=[], choices=[*ROUTINGS])
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--chosen", type=int, default=8)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--requests", default="1,4,8,32")
    parser.add_argument("--exponent", type=float, default=0.8, help="s of zipf")
    parser.add_argument("--stay", type=float, default=0.85, help="probability of sticky")
    parser.add_argument("--memory", type=int, default=4, help="tokens that sticky looks back")
    parser.add_argument("--out", type=Path, help="where the figures go, as JSON")
    options = parser.parse_args()
    found = []
    for name, requests, experts, steps in runs(options):
        row = {"routing": name, "requests": requests, **replayed(steps, experts)}
        found.append(row)
        print(json.dumps(row), flush=True)
    if options.out is not None:
        about = {key: str(value) for key, value in vars(options).items()}
        options.out.write_text(json.dumps({"options": about, "points": found}, indent=1) + "\n")


def runs(options: argparse.Namespace) -> Iterator[tuple[str, int, Sequence[int], Iterator[Step]]]:
    """Name, number of requests (0 for those of a trace), experts of each layer, and steps."""
    if options.trace is not None:
        trace = RouteTrace.read(options.trace)
        yield "trace", 0, [layer.experts for layer in trace.layers], iter(trace.records)
    for requests in map(int, options.requests.split(",")):
        if options.npz is not None:
            routing = np.load(options.npz)["experts"]
            experts = [int(routing.max()) + 1] * len(routing)
            yield "trained", requests, experts, of_text(routing, requests)
        for name in options.routing:
            experts = [options.experts] * options.layers
            yield name, requests, experts, ROUTINGS[name](options, requests)


def of_text(routing: np.ndarray, requests: int) -> Iterator[Step]:
    """Steps of requests that each continue another part of one text.

    Args:
        routing: [layers, tokens, chosen].
        requests: how many decode together.

    """
    _, tokens, _ = routing.shape
    apart = tokens // requests
    for step in range(apart):
        for layer, chosen in enumerate(routing):
            yield layer, chosen[step : step + requests * apart : apart]


def even(options: argparse.Namespace, requests: int) -> Iterator[Step]:
    """Steps of tokens that choose evenly."""
    return _drawn(options, requests, np.ones(options.experts))


def zipf(options: argparse.Namespace, requests: int) -> Iterator[Step]:
    """Steps of tokens that prefer the same experts of a layer."""
    return _drawn(options, requests, np.arange(1, options.experts + 1) ** -float(options.exponent))


def _drawn(options: argparse.Namespace, requests: int, weights: np.ndarray) -> Iterator[Step]:
    rng = np.random.default_rng(0)
    of_layer = [rng.permutation(np.log(weights)) for _ in range(options.layers)]
    for _ in range(options.steps):
        for layer, logs in enumerate(of_layer):
            yield layer, _best(logs + rng.gumbel(size=(requests, len(logs))), options.chosen)


def sticky(options: argparse.Namespace, requests: int) -> Iterator[Step]:
    """Steps of tokens that choose again what tokens before them have chosen, mostly."""
    rng = np.random.default_rng(0)
    size = (options.layers, options.memory, requests, options.chosen)
    last = rng.integers(options.experts, size=size)
    for step in range(options.steps):
        for layer in range(options.layers):
            scores = rng.random((requests, options.experts))
            stays = rng.random((requests, options.chosen)) < options.stay
            back = rng.integers(options.memory, size=(requests, options.chosen))
            for request in range(requests):
                # An expert of an earlier token, ahead of all that are drawn evenly.
                earlier = last[layer, back[request], request, np.arange(options.chosen)]
                scores[request, earlier[stays[request]]] += 1
            chosen = _best(scores, options.chosen)
            last[layer, step % options.memory] = rng.permuted(chosen, axis=1)
            yield layer, chosen


def _best(scores: np.ndarray, chosen: int) -> np.ndarray:
    return np.argpartition(scores, -chosen, axis=1)[:, -chosen:]


ROUTINGS: dict[str, Callable[[argparse.Namespace, int], Iterator[Step]]] = {
    "even": even,
    "zipf": zipf,
    "sticky": sticky,
}


def replayed(steps: Iterator[Step], experts: Sequence[int]) -> dict[str, Any]:
    """Experts read in a step of a layer; for each size of slots the share held, and the copies."""
    module = native()
    slots = [module.LayerSlots(count) for count in experts]
    sizes = len(module.SLOT_PERCENTS)
    read, layers, hits, copies = 0, 0, np.zeros(sizes), np.zeros(sizes)
    for layer, chosen in steps:
        used = np.unique(chosen[chosen >= 0])
        held, copied = slots[layer].step(used.tolist())
        read, layers = read + len(used), layers + 1
        hits, copies = hits + held, copies + copied
    found: dict[str, Any] = {"steps_of_layers": layers, "read": round(read / max(1, layers), 2)}
    for at, percent in enumerate(module.SLOT_PERCENTS):
        found[f"held_{percent}"] = round(float(hits[at]) / max(1, read), 4)
        found[f"copies_{percent}"] = round(float(copies[at]) / max(1, layers), 3)
    return found


if __name__ == "__main__":
    main()

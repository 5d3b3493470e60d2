"""Figures of the raw files in benchmarks/results/, by file, contender and load."""

from __future__ import annotations

import json
import statistics
from functools import cache
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"

OURS = "ray_hetero cpu-gpu"
PREFETCH = "vllm prefetch"
UVA = "vllm uva"
EXPERT_RANKS = "ray_hetero experts"
TWO_RANKS = "ray_hetero 2cpu-gpu"
GIGA = 1e9


@cache
def raw(name: str) -> Any:
    """Content of a JSON file, by its path below benchmarks/results/ without the ending."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


@cache
def lines(name: str) -> tuple[dict[str, Any], ...]:
    """The results that a text file has in lines that begin with RESULT."""
    text = (RESULTS / f"{name}.txt").read_text(encoding="utf-8")
    return tuple(
        json.loads(line.removeprefix("RESULT "))
        for line in text.splitlines()
        if line.startswith("RESULT ")
    )


def point(name: str, contender: str, batch: int, prompt: int, output: int = 32) -> dict[str, Any]:
    """Figures of one contender under one load; empty where it was not run."""
    found = [
        one
        for one in raw(name)["contenders"][contender]["points"]
        if (one["batch"], one["prompt"], one["output"]) == (batch, prompt, output)
    ]
    return found[0] if found else {}


def step_ms(
    name: str, contender: str, batch: int, prompt: int = 128, output: int = 32
) -> float | None:
    """Milliseconds of a decode step, the median of all runs; None where it was not run."""
    one = point(name, contender, batch, prompt, output)
    return one.get("step_ms", one.get("decode_ms"))


def first_token_ms(
    name: str, contender: str, batch: int, prompt: int, output: int = 32
) -> float | None:
    """Milliseconds until all requests have their first token; None where it was not run."""
    one = point(name, contender, batch, prompt, output)
    return None if not one else 1e3 * one["prefill_s"]


def prompt_ms(name: str, contender: str, batch: int, prompt: int) -> float | None:
    """Milliseconds as of `first_token_ms`, of answers of 1, 32, 4 or 64 tokens, the first run."""
    runs = (first_token_ms(name, contender, batch, prompt, output) for output in (1, 32, 4, 64))
    return next((found for found in runs if found is not None), None)


def socket_gb_s(name: str, contender: str = OURS) -> float:
    """Gigabytes per second that the compute cores read, the mean of before and after."""
    probes = raw(name)["contenders"][contender]["bandwidths"]
    return statistics.mean(probe["socket"] for probe in probes) / GIGA


def floor_ms(name: str, bits: int) -> float:
    """Least milliseconds of a decode step: what each device reads ÷ how fast it reads.

    Args:
        name: a file of `side_by_side.py`.
        bits: of a weight on the socket.

    """
    about = raw(name)
    outside = about["layers_outside"] * about["layer_bytes"] * bits / 16
    inside = (about["layers"] - about["layers_outside"]) * about["layer_bytes"]
    on_gpu = (inside + about["head_bytes"]) / about["gpu"]["copy_bytes_per_s"]
    return 1e3 * (outside / (socket_gb_s(name) * GIGA) + on_gpu)


def median(name: str, backend: str, figure: str) -> float:
    """Median over the rounds of `control_plane.py`."""
    return statistics.median(one[figure] for one in raw(name)["rounds"][backend])


def beside_llama(name: str, family: str, figure: str, batch: int) -> float:
    """A figure of a family over Llama's of the same round of `family_steps.py`, the median."""
    results = raw(name)["results"]
    own, llama = (
        [row[figure] for row in results[shape] if row["batch"] == batch]
        for shape in (f"1b-4-{family}", "1b-4")
    )
    return statistics.median(x / y for x, y in zip(own, llama, strict=True))


def handover_us(name: str, mode: str, ranks: int, tokens: int) -> float:
    """Microseconds of a layer's handover, from a file of `expert_handover.py`."""
    (found,) = (
        one["us_a_layer"]
        for one in raw(name)["points"]
        if (one["mode"], one["ranks"], one.get("tokens")) == (mode, ranks, tokens)
    )
    return float(found)


def decode_step_ms(name: str, program: str, weights: str, requests: int) -> float:
    """Milliseconds of a decode step by itself, in what benchmarks/decode_step.cpp has printed.

    Args:
        name: of the raw file, without ".txt".
        program: that was run, as its heading names it.
        weights: as WEIGHTS names them.
        requests: at a context of 512 tokens.

    """
    text = (RESULTS / f"{name}.txt").read_text(encoding="utf-8")
    section = text.split(f"== {program} {weights}\n")[1].split("\n==")[0]
    (line,) = [line for line in section.splitlines() if line.startswith(f"{requests}x512 ")]
    return float(line.split()[2])


def kernel_ms(name: str, kernel: str, tokens: int) -> float:
    """Milliseconds of a layer of experts."""
    (found,) = (
        one["ms"] for one in lines(name) if (one["kernel"], one["tokens"]) == (kernel, tokens)
    )
    return float(found)

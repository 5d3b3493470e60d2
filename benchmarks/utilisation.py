"""How busy each stage of a running server is over time, while clients ask it.

    vllm serve MODEL --distributed-executor-backend ray_hetero --pipeline-parallel-size 2
    python benchmarks/utilisation.py --clients 16 --seconds 60 --out utilisation

Clients ask one request after the other, of random lengths.  Meanwhile the ranks' counters are read
from the server's `/metrics`, where they are renewed every two seconds; a stage is as busy as its
busiest rank.  What was busy between two renewals is written as JSON, printed as a table, and drawn
where matplotlib is installed and `--plot` says where to.
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import requests
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table

POLL_S = 0.1
IDLE_S = 5.0
"""Seconds without a change of the counters after which nothing was to do."""
TOGETHER_S = 0.4
"""Seconds within which all ranks renew their counters."""
SHARES = ("busy", "waiting", "exchange")
BAR = 25
"""Characters of a stage that is busy all the time."""

Counters = dict[tuple[str, str], dict[str, float]]
"""Seconds by what they were spent on, by stage and rank."""


def main() -> None:
    """Ask, watch, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--clients", type=int, default=16, help="0 only watches")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--prompt-tokens", type=int, default=128, help="at most")
    parser.add_argument("--output-tokens", type=int, default=128, help="at most")
    parser.add_argument("--out", type=Path, required=True, help="without ending")
    parser.add_argument("--plot", type=Path, help="a file to draw into, .svg or .png")
    options = parser.parse_args()
    is_over = threading.Event()
    with ThreadPoolExecutor(max(1, options.clients)) as pool:
        answers = [pool.submit(ask, options, client, is_over) for client in range(options.clients)]
        samples = watch(options)
        is_over.set()
        tokens = sum(answer.result() for answer in answers)
    found = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "clients": options.clients,
        "prompt_tokens": options.prompt_tokens,
        "output_tokens": options.output_tokens,
        "answered_tokens": tokens,
        "samples": samples,
    }
    options.out.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    Console().print(table(samples))
    if options.plot:
        draw(samples, options.plot)


def ask(options: argparse.Namespace, client: int, is_over: threading.Event) -> int:
    """Ask one request after the other; tokens of the answers.

    Raises:
        requests.HTTPError: the server refused.

    """
    chance, tokens = random.Random(client), 0
    while not is_over.is_set():
        length = 1 + chance.randrange(options.prompt_tokens)
        request = {
            "prompt": [chance.randrange(3, 500) for _ in range(length)],
            "max_tokens": 1 + chance.randrange(options.output_tokens),
            "ignore_eos": True,
            "temperature": 0,
        }
        answer = requests.post(f"{options.url}/v1/completions", json=request, timeout=600)
        answer.raise_for_status()
        tokens += answer.json()["usage"]["completion_tokens"]
    return tokens


def watch(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Shares of time of each stage, from one renewal of the counters to the next."""
    samples: list[dict[str, Any]] = []
    start = last = time.monotonic()
    before = counters(options.url)
    while last - start < options.seconds:
        time.sleep(POLL_S)
        now = time.monotonic()
        if counters(options.url) == before and now - last < IDLE_S:
            continue
        time.sleep(TOGETHER_S)
        after = counters(options.url)
        shares = shares_between(before, after, now - last)
        samples.append({"at_s": round(now - start, 1), "stages": shares})
        last, before = now, after
    return samples


def counters(url: str) -> Counters:
    """Read the counters of all ranks.

    Raises:
        SystemExit: the server has none.

    """
    text = requests.get(f"{url}/metrics", timeout=30).text
    found: Counters = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            for share in SHARES:
                if sample.name == f"ray_hetero_rank_{share}_seconds_total":
                    at = sample.labels["stage"], sample.labels["rank"]
                    found.setdefault(at, {})[share] = sample.value
    if not found:
        raise SystemExit(f"{url}/metrics has no ray_hetero_rank_…: is it a server of ray_hetero?")
    return found


def shares_between(
    before: Counters, after: Counters, seconds: float
) -> dict[str, dict[str, float]]:
    """By stage, what its busiest rank did; shares of the time that has passed."""
    stages: dict[str, dict[str, float]] = {}
    for (stage, rank), now in sorted(after.items()):
        then: Mapping[str, float] = before.get((stage, rank), {})
        shares = {share: round((now[share] - then.get(share, 0)) / seconds, 3) for share in SHARES}
        if stage not in stages or shares["busy"] > stages[stage]["busy"]:
            stages[stage] = shares
    return stages


def table(samples: list[dict[str, Any]]) -> Table:
    """Busy shares as bars, a line a sample."""
    shown = Table(title="Busy")
    stages = sorted({stage for sample in samples for stage in sample["stages"]})
    for column in ("s", *(f"stage {stage}" for stage in stages)):
        shown.add_column(column)
    for sample in samples:
        busy = [sample["stages"].get(stage, {}).get("busy", 0.0) for stage in stages]
        bars = (f"{'█' * round(BAR * min(share, 1)):{BAR}} {share:4.0%}" for share in busy)
        shown.add_row(f"{sample['at_s']:.0f}", *bars)
    return shown


def draw(samples: list[dict[str, Any]], path: Path) -> None:
    """Busy shares over time, a line a stage."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 3.5))
    for stage in sorted({stage for sample in samples for stage in sample["stages"]}):
        seen = [sample for sample in samples if stage in sample["stages"]]
        axes.step([sample["at_s"] for sample in seen],
                  [sample["stages"][stage]["busy"] for sample in seen],
                  where="pre", label=f"stage {stage}")  # fmt: skip
    axes.set(xlabel="seconds", ylabel="share of time busy", ylim=(0, 1.05))
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    main()

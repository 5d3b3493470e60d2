"""A load of real text on servers: `vllm bench serve` against stock vLLM and CPU ranks, in turns.

    pip install pandas            # of `vllm bench serve`
    ray-hetero demo-model --trained smollm2
    python benchmarks/real_text_load.py --model smollm2 --out load.json

Prompts are pages of Python's language reference, each with three questions about it, so that two of
three find the page in the prefix cache.  Every round starts each server once, sends some requests
to warm it up and then all of them, so many at a time.  Figures are those of `vllm bench serve`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray_hetero.cli.serving.server_process import ServerProcess, free_port
from ray_hetero.errors import StartupError

START_S, STOP_S, BENCH_S = 600, 90, 1200
QUESTIONS = (
    "Summarise the text above in two sentences.",
    "Which words of the text above are the most important ones?",
    "Write an example for what the text above describes.",
)
FROM, LENGTH = 0, 1800
"""Characters of a page that are asked about."""
NGRAM = {
    "method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2, "prompt_lookup_max": 4
}  # fmt: skip
SUFFIX = {"method": "suffix", "num_speculative_tokens": 4}
FIGURES = (
    "output_throughput", "median_ttft_ms", "p99_ttft_ms", "median_itl_ms", "p99_itl_ms",
    "median_tpot_ms", "p99_tpot_ms",
)  # fmt: skip
"""Keys of the results of `vllm bench serve`."""


def backend(ranks: int) -> tuple[str, ...]:
    """Options of CPU ranks that divide one socket, as a pipeline."""
    config = {"ray_hetero": {"cpu": {"ranks_per_socket": ranks, "kv_cache_gib": 1}}}
    return (
        "--distributed-executor-backend", "ray_hetero", "--pipeline-parallel-size", str(ranks),
        "--additional-config", json.dumps(config),
    )  # fmt: skip


def drafts(config: dict[str, Any]) -> tuple[str, ...]:
    """Options of a drafter."""
    return ("--speculative-config", json.dumps(config))


SERVERS = {
    "stock": (),
    "stock, n-grams": drafts(NGRAM),
    "one rank": backend(1),
    "two ranks": backend(2),
    "one rank, n-grams": (*backend(1), *drafts(NGRAM)),
    "two ranks, n-grams": (*backend(2), *drafts(NGRAM)),
    "one rank, suffixes": (*backend(1), *drafts(SUFFIX)),
}
"""Options of `vllm serve` by name; `suffixes` needs arctic-inference."""
USUAL = ("stock", "one rank", "two ranks", "one rank, n-grams", "two ranks, n-grams")


@dataclass(frozen=True)
class Load:
    """Requests of a load: file of prompts, their number, how many at once, tokens of an answer."""

    prompts: Path
    count: int
    at_once: int
    tokens: int


def main() -> None:
    """Measure all servers in turns; written down after each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="of `demo-model --trained`")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--servers", default=";".join(USUAL), help=f"of {'; '.join(SERVERS)}")
    parser.add_argument("--eager", action="store_true", help="compile nothing")
    options = parser.parse_args()
    # Of stock vLLM, in GiB; it would take most of the memory.
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="ray_hetero-load-") as name:
        folder = Path(name)
        file = folder / "prompts.jsonl"
        file.write_text("".join(json.dumps({"prompt": one}) + "\n" for one in prompts()))
        load = Load(file, options.requests, options.at_once, options.tokens)
        for turn in range(options.rounds):
            for server in options.servers.split(";"):
                average = os.getloadavg()[0]
                found = measure(options.model, server, load, folder, eager=options.eager)
                runs.append({"turn": turn, "server": server, "load": average, **found})
                about = {
                    "requests": load.count, "at_once": load.at_once, "tokens": load.tokens,
                    "eager": options.eager, "summary": summary(runs), "runs": runs,
                }  # fmt: skip
                options.out.write_text(json.dumps(about, indent=1) + "\n")
                shown = " ".join(f"{key} {found[key]:.1f}" for key in FIGURES)
                print(f"{server}: {shown}", flush=True)


def prompts() -> list[str]:
    """Pages of the language reference with questions, those about one page one after the other."""
    from pydoc_data import topics

    pages = [text[FROM : FROM + LENGTH] for text in topics.topics.values() if len(text) > LENGTH]
    return [f"{page}\n\n{question}" for page in pages for question in QUESTIONS]


def measure(model: Path, name: str, load: Load, folder: Path, *, eager: bool) -> dict[str, Any]:
    """Figures of one server."""
    options = (*SERVERS[name], *(("--enforce-eager",) if eager else ()))
    with serving(model, options, folder / "server.log") as address:
        bench(model, address, load, folder, count=load.at_once, seed=1)
        return bench(model, address, load, folder, count=load.count, seed=0)


@contextlib.contextmanager
def serving(model: Path, options: Sequence[str], log: Path) -> Iterator[str]:
    """Address of a server that answers; it is stopped as by Ctrl-C."""
    command = [
        str(Path(sys.executable).with_name("vllm")), "serve", str(model), "--max-model-len", "1024",
        "--served-model-name", "model", "--max-num-seqs", "16", "--host", "127.0.0.1",
        "--port", str(free_port()), *options,
    ]  # fmt: skip
    server = ServerProcess(command, log)
    try:
        try:
            server.wait_until_healthy(START_S)
            yield server.address
        finally:
            server.stop(STOP_S)
    except StartupError as error:
        raise SystemExit(str(error)) from None


def bench(
    model: Path, address: str, load: Load, folder: Path, *, count: int, seed: int
) -> dict[str, Any]:
    """Results of `vllm bench serve`; another seed takes the prompts in another order."""
    command = [
        str(Path(sys.executable).with_name("vllm")), "bench", "serve", "--backend", "openai-chat",
        "--endpoint", "/v1/chat/completions", "--base-url", address,
        "--model", "model", "--tokenizer", str(model), "--dataset-name", "custom",
        "--dataset-path", str(load.prompts), "--skip-chat-template",
        "--custom-output-len", str(load.tokens), "--num-prompts", str(count),
        "--max-concurrency", str(load.at_once), "--temperature", "0", "--seed", str(seed),
        "--percentile-metrics", "ttft,tpot,itl", "--metric-percentiles", "50,99",
        "--save-result", "--result-dir", str(folder), "--result-filename", "result.json",
        "--disable-tqdm",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=BENCH_S)
    if done.returncode:
        raise SystemExit(f"vllm bench serve ended with {done.returncode}:\n{done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    kept = ("completed", "failed", "duration", "total_input_tokens", "total_output_tokens")
    return {key: result[key] for key in (*kept, *FIGURES) if key in result}


def summary(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Medians over rounds, and of ratios to the first server of the same round."""
    rows = []
    first = runs[0]["server"]
    of_first = {one["turn"]: one for one in runs if one["server"] == first}
    for name in dict.fromkeys(one["server"] for one in runs):
        mine = [one for one in runs if one["server"] == name]
        rows.append({
            "server": name,
            **{key: statistics.median(one[key] for one in mine) for key in FIGURES},
            "ratios": {
                key: statistics.median(one[key] / of_first[one["turn"]][key] for one in mine)
                for key in FIGURES
            },
        })  # fmt: skip
    return rows


if __name__ == "__main__":
    main()

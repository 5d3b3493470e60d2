"""Engines over two, four or eight GPUs beside expert ranks: start, steps, prompts, and tokens.

    python benchmarks/many_gpus.py --out FOLDER            on a host with two GPUs or more
    python benchmarks/many_gpus.py --out FOLDER --tiny     a rehearsal on any host, GPUs pretended
    python benchmarks/many_gpus.py --out FOLDER --before ../before     beside code of before

DeepSeek V3's shape in FP8, cut to some layers, whose experts are all on expert ranks, one a socket;
dummy weights with spread routers, as in one_flag.py.  An engine over one GPU, over two where there
are more, and over all of them with prompts' experts on the cores, and over all links.  Each is a
process with a time limit.  A line each has the seconds of the start, the steps of 1, 8 and 32
requests in ms, and first tokens of prompts in seconds; all of it is in FOLDER/many_gpus.json, logs
beside it.
`python tests/gpu/run_all.py --report FOLDER four_gpus` compares tokens on such a host, and kills
are in tests/cluster/test_many_gpus.py.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

from one_flag import CASES, run_engine, say, spread_weights, timed

from placement.host.gpus import read_gpus
from ray_hetero.cli.demo.model import DemoShape, write_demo_model

LAYERS = 8
LONGEST = 16384
STEP_TOKENS = 8192
POINTS = {"1": (1, 128), "8": (8, 128), "32": (32, 128)}
"""Requests and tokens of their prompts whose decode steps are timed."""
PROMPTS = {"128": (1, 128), "8x1024": (8, 1024), "8192": (1, 8192)}
"""Requests and tokens of their prompts whose first tokens are timed."""
OUTPUT = 32
"""Tokens of an answer."""
BEFORE = ", before"
"""End of the name of an engine with the code of `--before`."""
PRETENDED = 4
"""GPUs of a rehearsal."""


def main() -> None:
    """Measure the engines one after the other; written down after each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit-s", type=float, default=400, help="of each engine")
    parser.add_argument("--expert-ranks", type=int, default=2, help="one a socket")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument(
        "--before", type=Path, help="another built checkout, whose engine over all GPUs is added"
    )
    parser.add_argument("--only", default="", metavar="WORDS", help="engines so named, with commas")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine:
        measure(json.loads(options.engine))
        return
    gpus = PRETENDED if options.tiny else len(read_gpus())
    if gpus < 2:
        raise SystemExit(f"{gpus} GPUs: expected 2 at least; --tiny rehearses on any host")
    # An engine with other code is started in its folder.
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    folder = model_of(options)
    found: dict[str, Any] = {}
    for name, given in engines(folder, gpus, options).items():
        if not any(word in name for word in options.only.split(",")):
            continue
        log = options.out / f"{name.replace(' ', '-')}.log"
        code = options.before if name.endswith(BEFORE) else None
        found[name] = run_engine(
            given, options, log, options.limit_s, script=__file__, checkout=code
        )
        print(said(name, found[name]), flush=True)
        (options.out / "many_gpus.json").write_text(json.dumps(found, indent=1) + "\n")


def model_of(options: argparse.Namespace) -> Path:
    """The folder of the model: a config.json, or for a rehearsal a small mixture."""
    folder: Path = options.out / "model"
    if options.tiny:
        if not folder.exists():
            write_demo_model(folder, "qwen3_moe", dtype="bf16", shape=DemoShape(heads=8))
        return folder
    folder.mkdir(exist_ok=True)
    config = CASES["deepseek-v3-fp8"].config(tiny=False)
    config |= {"num_hidden_layers": options.layers, "max_position_embeddings": LONGEST}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def engines(folder: Path, gpus: int, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Arguments of engines by name."""
    ranks = options.expert_ranks

    def engine(size: int, **experts: Any) -> dict[str, Any]:
        keys = {
            "layout": [["gpu"] * size],
            "experts": {"ranks": ranks, "layers": "all", **experts},
            # On a host with fewer sockets they share one.
            **({"cpu": {"ranks_per_socket": ranks}} if options.tiny else {}),
        }  # fmt: skip
        small = {"max_model_len": 512, "max_num_batched_tokens": 256} if options.tiny else {}
        return {
            "model": str(folder), "tensor_parallel_size": size, "max_model_len": LONGEST,
            "max_num_batched_tokens": STEP_TOKENS, "additional_config": {"ray_hetero": keys},
            "tiny": options.tiny, **small,
        }  # fmt: skip

    linked = {"prefill_on_gpu": True}
    found = {f"{size} GPUs": engine(size, **linked) for size in (1, 2) if size < gpus}
    found[f"{gpus} GPUs, all links"] = engine(gpus, **linked)
    if options.before:
        found[f"{gpus} GPUs, all links{BEFORE}"] = engine(gpus, **linked)
    return found | {f"{gpus} GPUs, prompts on the cores": engine(gpus, prefill_on_gpu=False)}


def measure(given: dict[str, Any]) -> None:
    """In the engine's process: start it, and time steps and prompts."""
    # The engine takes functions for its ranks.
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    is_tiny = given.pop("tiny")
    if is_tiny:
        os.environ |= {
            "RAY_HETERO_PRETEND_GPU": "1",
            "RAY_OVERRIDE_RESOURCES": json.dumps({"GPU": PRETENDED}),
        }
    from engine_run import Point
    from vllm import LLM

    began = time.monotonic()
    llm = LLM(
        distributed_executor_backend="ray_hetero", skip_tokenizer_init=True, max_num_seqs=32,
        load_format="auto" if is_tiny else "dummy", enable_prefix_caching=False,
        enforce_eager=is_tiny, **given,
    )  # fmt: skip
    say(start_s=round(time.monotonic() - began, 1))
    if not is_tiny:
        say(spread=llm.collective_rpc(spread_weights))
    longest = given["max_num_batched_tokens"]
    steps, first = {}, {}
    for name, (requests, prompt) in POINTS.items():
        steps[name] = round(timed(llm, Point(requests, prompt, OUTPUT))[0], 2)
        say(steps=steps)
    for name, (requests, prompt) in PROMPTS.items():
        first[name] = round(timed(llm, Point(requests, min(prompt, longest), OUTPUT))[1], 3)
        say(first_tokens_s=first)


def said(name: str, found: dict[str, Any]) -> str:
    """One line of an engine."""
    if "start_s" not in found:
        return f"{name}: {found.get('error')}"
    steps = ", ".join(f"{users}: {ms} ms" for users, ms in found.get("steps", {}).items())
    first = ", ".join(f"{one}: {s} s" for one, s in found.get("first_tokens_s", {}).items())
    line = f"{name}: start {found['start_s']} s; steps {steps}; first tokens {first}"
    return line + (f"; {found['error']}" if "error" in found else "")


if __name__ == "__main__":
    main()

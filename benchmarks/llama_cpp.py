"""llama.cpp, measured by its own programs, given by path.

    python benchmarks/llama_cpp.py --llama-bench BUILD/bin/llama-bench --shape 30b-a3b-16 \\
        --n-cpu-moe 8 --threads 14 --points 1x128,8x128

Takes the same points and prints the same lines as engine_run.py, and a line `RAW {…}` for each
result of llama.cpp's programs.  `llama-bench` measures one request: its prompt, then its tokens at
the depth of that prompt.  It knows no batches, so that several requests are measured by
`llama-batched-bench`, which is built with it and expected beside it.  Neither samples, and neither
has a server or a scheduler.

Without `--gguf` the model is the heavy-tailed checkpoint of the shape (gguf_file.py), of mixtures
with `--experts mxfp4` too: routed experts rounded to MXFP4, all else in bf16.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from engine_run import Point, Timeline, figures
from heavy_tailed import heavy_tailed_folder
from shapes import SHAPES

BATCHED = "llama-batched-bench"
ALL_LAYERS = 999
"""Layers on the GPU, where this is more than there are."""
Row = dict[str, Any]
"""Line that one of the programs prints of one test."""


def parse_options() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--llama-bench", type=Path, required=True, metavar="PATH")
    parser.add_argument("--gguf", type=Path, metavar="FILE", help="the model; else the shape's")
    parser.add_argument("--shape", choices=SHAPES, default="30b-a3b-16")
    parser.add_argument("--experts", choices=("bf16", "mxfp4"), default="bf16",
                        help="format of routed experts; of --shape")  # fmt: skip
    parser.add_argument("--n-gpu-layers", type=int, default=ALL_LAYERS)
    parser.add_argument("--n-cpu-moe", type=int, default=0, help="layers with experts on the CPU")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--batch-size", type=int, default=2048, help="tokens of a call")
    parser.add_argument("--ubatch-size", type=int, default=512, help="tokens computed at once")
    parser.add_argument("--points", default="1x128,8x128")
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--turns", action="store_true", help="measure for each line of input")
    others = "of other contenders; means nothing here"
    for name in ("--point-seconds", "--kv-room-gib"):
        parser.add_argument(name, type=float, help=others)
    for name in ("--heavy-tailed", "--eager"):
        parser.add_argument(name, action="store_true", help=others)
    return parser.parse_args()


def main() -> None:
    """Measure and print."""
    options = parse_options()
    if options.gguf is None:
        from gguf_file import write_gguf

        ending = ".gguf" if options.experts == "bf16" else f".{options.experts}.gguf"
        path = heavy_tailed_folder(options.shape).with_suffix(ending)
        options.gguf = write_gguf(options.shape, path, options.experts)
    points = [Point.parse(text, options.output_tokens) for text in options.points.split(",")]
    if options.turns:
        print("DONE {}", flush=True)
    for _ in sys.stdin if options.turns else ["once"]:
        for point in points:
            measure = one_request if point.batch == 1 else several_requests
            print("RESULT " + json.dumps(measure(point, options)), flush=True)
        if options.turns:
            print("DONE {}", flush=True)


def one_request(point: Point, options: argparse.Namespace) -> dict[str, Any]:
    """Figures of a point of one request, from `llama-bench`."""
    command = [
        str(options.llama_bench), "-m", str(options.gguf), "-o", "json",
        "-r", str(options.repeats), "-ngl", str(options.n_gpu_layers),
        "-ncmoe", str(options.n_cpu_moe), "-t", str(options.threads),
        "-b", str(options.batch_size), "-ub", str(options.ubatch_size),
    ]  # fmt: skip
    prompts = said([*command, "-p", str(point.prompt), "-n", "0"])
    # The first token of an answer is that of the prompt's step.
    steps = said([*command, "-p", "0", "-n", str(point.output - 1), "-d", str(point.prompt)])
    prompt = only(prompts, n_prompt=point.prompt, n_gen=0)
    answer = only(steps, n_prompt=0, n_gen=point.output - 1, n_depth=point.prompt)
    rounds = zip(prompt["samples_ns"], answer["samples_ns"], strict=True)
    found = figures(point, [timeline(point, 1e-9 * a, 1e-9 * b) for a, b in rounds])
    kept = ("build_commit", "backends", "model_type", "n_threads", "n_gpu_layers", "n_cpu_moe")
    return found | {"llama_cpp": {name: answer[name] for name in kept}}


def several_requests(point: Point, options: argparse.Namespace) -> dict[str, Any]:
    """Figures of a point of several requests, from `llama-batched-bench`.

    Raises:
        SystemExit: it is not beside `llama-bench`, or says too little.

    """
    program = options.llama_bench.with_name(BATCHED)
    if not program.exists():
        raise SystemExit(
            f"{point.batch} requests at once are measured by {BATCHED}, expected beside "
            f"llama-bench: {program} is not there. Build it (cmake --build BUILD --target "
            f"{BATCHED}), or leave out {point}."
        )
    # A first round warms up.  What it writes last it may lose at its end: one more is asked for.
    batches = ",".join([str(point.batch)] * (1 + options.repeats + 1))
    # Each request has cells for its own tokens.
    cells = point.batch * -(-point.tokens // 256) * 256
    rows = said([
        str(program), "-m", str(options.gguf), "--output-format", "jsonl",
        "-npp", str(point.prompt), "-ntg", str(point.output - 1), "-npl", batches,
        "-c", str(cells), "-ngl", str(options.n_gpu_layers), "-ncmoe", str(options.n_cpu_moe),
        "-t", str(options.threads), "-b", str(options.batch_size),
        "-ub", str(options.ubatch_size),
    ])  # fmt: skip
    measured = [row for row in rows if row["pl"] == point.batch][1 : 1 + options.repeats]
    if not measured:
        raise SystemExit(f"expected a result of {point} after the one that warms up, got {rows}")
    found = figures(point, [timeline(point, row["t_pp"], row["t_tg"]) for row in measured])
    kept = ("n_batch", "n_ubatch", "n_threads", "n_gpu_layers")
    return found | {"llama_cpp": {name: rows[-1][name] for name in kept}}


def timeline(point: Point, prompt_s: float, steps_s: float) -> Timeline:
    """One round: a step that reads all prompts, and one for each further token."""
    ended, steps = prompt_s + steps_s, point.output - 1
    return Timeline(prompt_s, ended, point.batch * steps, ended, steps)


def said(command: Sequence[str]) -> list[Row]:
    """Run one of the programs; its results, which are printed too.

    Raises:
        SystemExit: it fails, or says no results.

    """
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}: {done.stdout[-500:]}")
    rows = list(results(done.stdout))
    if not rows:
        raise SystemExit(f"{' '.join(command)} printed no results: {done.stdout[-500:]}")
    for row in rows:
        print("RAW " + json.dumps(row), flush=True)
    return rows


def results(text: str) -> Iterator[Row]:
    """Results in a program's output: one list of them, or one a line among other lines."""
    if text.lstrip().startswith("["):
        yield from json.loads(text)
        return
    for line in text.splitlines():
        if line.startswith("{"):
            yield json.loads(line)


def only(rows: Sequence[Row], **wanted: int) -> Row:
    """The one result of a test.

    Raises:
        SystemExit: there is another number of them.

    """
    found = [row for row in rows if all(row.get(name) == value for name, value in wanted.items())]
    if len(found) != 1:
        there = [{name: row.get(name) for name in wanted} for row in rows]
        raise SystemExit(f"expected one result with {wanted}, llama-bench printed {there}")
    return found[0]


if __name__ == "__main__":
    main()

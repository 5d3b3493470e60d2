"""One engine, one placement, several batches and prompts: prefill, decode, tokens per second.

Every contender of `side_by_side.py` is a run of this script in a process of its own.  It drives
the engine step by step and takes the time at every step that brings tokens:

    prefill   from the first request to the moment when all requests have a token
    decode    from then until the first request ends: the batch is full all that time, and
              `median_step_ms` is of all of its steps, whatever a few of them took
    whole     from the first request to the last token

With `--drafts 1,3` every request verifies 1 draft in every step, then 3, of which each is accepted
with the chance of `--accepted` if those before it are: what a step of 1 + 3 tokens costs, whatever
drafts them.  Drafters of vLLM's own are asked for by `--engine '{"speculative_config": {…}}'`, in
which `model` may be one of the shapes; greedy text repeats itself with `--heavy-tailed`.

With a point such as `32x128x24-96`, answers have 24 to 96 tokens, so that ever fewer requests
decode; `steps_ms_all` has the milliseconds of each step from the last first token to the end.

Prints a line `RESULT {…}` for each point (batch × prompt), and `MEMORY {…}` at the end.  With
`--turns` it measures once for each line that it reads, and prints `DONE {}` after each.

With `--arrival 8192` a prompt of so many tokens comes while each point's requests decode, and it
prints a line `ARRIVAL {…}`: the usual time between two of their tokens, and the longest one.  With
`--arrival-points` it comes at these points, and the others are measured as without it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from heavy_tailed import heavy_tailed_folder, write_checkpoint
from memory import memory_since, used_bytes
from shapes import QUANTISED, SHAPES, write_shape

BLOCKS = {"uni": 16}
"""Tokens of a KV block by backend: vLLM's own choice on a GPU, and on CPU ranks for the others."""
CPU_BLOCK = 128
REST_S = 0.2
"""Pause before each round of a point, in seconds.  All kernels of an H100 become a tenth slower
once it has multiplied for some 60 ms: a prompt right behind another would be charged for that, the
more the less the one before has waited for its link."""


@dataclass(frozen=True)
class Point:
    """So many requests at once, each with a prompt of so many tokens."""

    batch: int
    prompt: int
    output: int
    """Tokens that each request is answered with."""
    least: int = 0
    """Tokens of the shortest answer, the others evenly between; 0 for answers of one length."""

    @classmethod
    def parse(cls, text: str, output: int) -> Point:
        """Read `8x128`, `8x128x256` with an output of its own, or `8x128x64-256` with several."""
        batch, prompt, *own = text.split("x")
        *least, most = map(int, own[0].split("-")) if own else [output]
        return cls(int(batch), int(prompt), most, *least)

    def __str__(self) -> str:
        least = f"{self.least}-" if self.least else ""
        return f"{self.batch}x{self.prompt}x{least}{self.output}"

    @property
    def outputs(self) -> list[int]:
        """Tokens that each request is answered with."""
        more = self.output - (self.least or self.output)
        return [self.output - more * row // max(1, self.batch - 1) for row in range(self.batch)]

    @property
    def tokens(self) -> int:
        """Of a request at its end."""
        return self.prompt + self.output


@dataclass(frozen=True)
class Timeline:
    """Seconds since the first request was handed in."""

    all_started: float
    """Time at which every request had its first token."""
    first_ended: float
    full_tokens: int
    """Tokens between these two, all requests together."""
    ended: float
    full_steps: int = 0
    """Steps of the engine between these two."""
    between_steps: tuple[float, ...] = ()
    """Seconds of each of them, from the one before."""
    later_steps: tuple[float, ...] = ()
    """The same of those of fewer and fewer requests, until the last one ends."""

    def step_ms(self) -> float | None:
        """Milliseconds of a step of a full batch, however many tokens it brings."""
        if not self.full_steps:
            return None
        return 1000 * (self.first_ended - self.all_started) / self.full_steps

    def decode_ms(self, batch: int) -> float | None:
        """Milliseconds in which each request of a full batch gets one token."""
        if not self.full_tokens:
            return None
        return 1000 * (self.first_ended - self.all_started) * batch / self.full_tokens


def arguments() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--layers", type=int, help="other than the shape's, with dummy weights")
    parser.add_argument("--backend", default="ray_hetero", help="ray_hetero, mp, uni")
    parser.add_argument("--layout", default='[["cpu"],["gpu"]]')
    parser.add_argument("--config", default="{}", help="more of the ray_hetero configuration")
    parser.add_argument("--engine", default="{}", help="more arguments of LLM(), as JSON")
    parser.add_argument("--points", default="1x128,8x128",
                        help="batch x prompt, or x output, or x least-most output")  # fmt: skip
    parser.add_argument("--output-tokens", type=int, default=32, help="where a point has none")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--point-seconds", type=float, default=60, help="then no more repeats")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--calls", type=int, default=0, help="empty calls of all ranks to time")
    parser.add_argument("--arrival", type=int, default=0,
                        help="tokens of a prompt that comes while others decode")  # fmt: skip
    parser.add_argument("--arrival-points", help="points at which it comes; else all")
    parser.add_argument("--drafts", default="0", help="draft tokens of every request, with commas")
    parser.add_argument("--accepted", type=float, default=0.0, help="chance of each draft token")
    parser.add_argument("--stored", choices=QUANTISED, help="how linear layers are; else bf16")
    parser.add_argument("--heavy-tailed", action="store_true",
                        help="a checkpoint with such weights, not vLLM's dummy ones")  # fmt: skip
    parser.add_argument("--kv-room-gib", type=float,
                        help="KV cache of a GPU, which is then not looked for")  # fmt: skip
    parser.add_argument("--turns", action="store_true", help="measure for each line of input")
    return parser.parse_args()


def points_of(options: argparse.Namespace) -> list[tuple[Point, bool]]:
    """The points that were asked for, and whether a prompt arrives while one is measured."""

    def read(points: str | None) -> list[Point]:
        return [
            Point.parse(text, options.output_tokens) for text in (points or "").split(",") if text
        ]

    plain, arriving = read(options.points), read(options.arrival_points)
    if options.arrival and not arriving:
        return [(point, True) for point in plain]
    return [*((point, False) for point in plain), *((point, True) for point in arriving)]


def drafts_asked(options: argparse.Namespace) -> list[int]:
    """Numbers of drafts of a request that are measured one after the other."""
    return [int(text) for text in options.drafts.split(",")]


def engine(options: argparse.Namespace) -> Any:
    """Start the engine that the options describe, with just enough KV cache for all points."""
    from vllm import LLM

    points = [point for point, _ in points_of(options)]
    drafts, given = max(drafts_asked(options)), json.loads(options.engine)
    if drafts:
        given["speculative_config"] = forced_drafts(drafts, options.accepted)
    elif "speculative_config" in given:
        drafts = given["speculative_config"]["num_speculative_tokens"]
        if (drafter := given["speculative_config"].get("model")) in SHAPES:
            given["speculative_config"]["model"] = str(model_of(options, drafter))
    longest = max([options.arrival, *(point.tokens for point in points)]) + 8 + drafts
    block = BLOCKS.get(options.backend, CPU_BLOCK)
    blocks = max(point.batch * -(-(point.tokens + drafts) // block) for point in points)
    # A prompt that arrives, and the few tokens that it is answered with.
    blocks += -(-(options.arrival + 8) // block) if options.arrival else 0
    settings: dict[str, Any] = {
        "model": str(model_of(options, options.shape, stored=options.stored)),
        "load_format": "auto" if options.heavy_tailed else "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": longest,
        "max_num_seqs": max(point.batch for point in points) + bool(options.arrival),
        "max_num_batched_tokens": 8192,
        "block_size": block,
        # One block is vLLM's own, and one more a window that begins inside a block; one request of
        # the longest context must fit in any case.
        "num_gpu_blocks_override": max(blocks, -(-longest // block)) + 2,
        "enforce_eager": options.eager,
        "enable_prefix_caching": False,
        "dtype": "bfloat16",
    }
    if not options.eager and has_gpu(options):
        # Graphs of just these batches: capturing all sizes takes half a minute of every start.
        rows = {1, 1 + drafts, *(1 + count for count in drafts_asked(options))}
        sizes = sorted({point.batch * of_each for point in points for of_each in rows})
        settings["compilation_config"] = {"cudagraph_capture_sizes": sizes}
    if options.backend == "ray_hetero":
        layout = json.loads(options.layout)
        settings |= {
            "distributed_executor_backend": "ray_hetero",
            "pipeline_parallel_size": len(layout),
            "tensor_parallel_size": max(map(len, layout)),
            "additional_config": {"ray_hetero": {"layout": layout} | json.loads(options.config)},
        }
    if drafts:
        settings["disable_log_stats"] = False
    if options.kv_room_gib is not None:
        settings["kv_cache_memory_bytes"] = int(options.kv_room_gib * (1 << 30))
    return LLM(**(settings | given))


def model_of(options: argparse.Namespace, shape: str, *, stored: str | None = None) -> Path:
    """The folder of a model, which is written if it is not there yet."""
    if options.heavy_tailed:
        return write_checkpoint(shape, heavy_tailed_folder(shape))
    layers = options.layers if shape == options.shape else None
    return write_shape(shape, layers=layers, stored=stored)


def forced_drafts(drafts: int, chance: float) -> dict[str, Any]:
    """A speculative configuration with so many drafts of a request in every step."""
    return {
        "method": "custom_class",
        "model": "forced_drafter.ForcedDrafter",
        "num_speculative_tokens": drafts,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": [chance**place for place in range(1, drafts + 1)],
    }


def has_gpu(options: argparse.Namespace) -> bool:
    """Whether a GPU takes part."""
    return options.backend == "uni" or "gpu" in options.layout


def run_requests(llm: Any, point: Point, salt: int, drafts: int = 0) -> Timeline:
    """Hand in a batch of requests and take the time of every token.

    Args:
        llm: the engine.
        point: what is handed in.
        salt: of the prompts, which are others for each.
        drafts: of each request in every step, which the first token of its prompt says.

    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    start = time.perf_counter()
    for row, output in enumerate(point.outputs):
        params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True,
                                detokenize=False, output_kind=RequestOutputKind.DELTA)  # fmt: skip
        tokens = [(salt + 31 * row + 7 * i) % 500 + 3 for i in range(point.prompt)]
        if drafts:
            tokens[0] = drafts
        llm.llm_engine.add_request(f"{salt}-{row}", {"prompt_token_ids": tokens}, params)
    started: set[str] = set()
    all_started = first_ended = passed = 0.0
    full_tokens, last = 0, 0.0
    between: list[float] = []
    later: list[float] = []
    while llm.llm_engine.has_unfinished_requests():
        outputs = llm.llm_engine.step()
        passed = time.perf_counter() - start
        if all_started and outputs:
            (later if first_ended else between).append(passed - last)
        if all_started and not first_ended:
            full_tokens += sum(len(output.outputs[0].token_ids) for output in outputs)
        started |= {output.request_id for output in outputs}
        if not all_started and len(started) == point.batch:
            all_started = passed
        if not first_ended and any(output.finished for output in outputs):
            first_ended = passed
        if outputs:
            last = passed
    return Timeline(
        all_started, first_ended, full_tokens, passed, len(between), tuple(between), tuple(later)
    )


def run_arrival(llm: Any, point: Point, prompt: int, salt: int) -> dict[str, Any]:
    """Let a prompt come when the requests of a point have a quarter of their tokens.

    Returns:
        Milliseconds between two steps that bring tokens to the decoding requests: the median of
        those before the prompt came, and all from then to its first token and one more.

    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    def add(name: str, tokens: int, output: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True,
                                detokenize=False, output_kind=RequestOutputKind.DELTA)  # fmt: skip
        ids = [(salt + 31 * len(name) + 7 * i + sum(map(ord, name))) % 500 + 3
               for i in range(tokens)]  # fmt: skip
        llm.llm_engine.add_request(name, {"prompt_token_ids": ids}, params)

    for row in range(point.batch):
        add(f"decoding-{salt}-{row}", point.prompt, point.output)
    arrived = first = None
    steps: list[tuple[float, float]] = []
    last = got = 0.0
    while llm.llm_engine.has_unfinished_requests():
        outputs = llm.llm_engine.step()
        now = time.perf_counter()
        decoded = [output for output in outputs if output.request_id.startswith("decoding")]
        if decoded:
            if last:
                steps.append((now, 1000 * (now - last)))
            last = now
            got += 1
        if first is None and len(outputs) > len(decoded):
            first = now
        if arrived is None and got >= point.output // 4:
            arrived = time.perf_counter()
            add(f"prompt-{salt}", prompt, 8)
    assert arrived is not None
    assert first is not None
    usual = statistics.median(ms for at, ms in steps if at < arrived)
    after = [(at, ms) for at, ms in steps if at > arrived]
    until = [ms for at, ms in after if at <= first] + [ms for at, ms in after if at > first][:1]
    return {
        "usual_ms": round(usual, 2),
        "longest_ms": round(max(until), 2),
        "first_token_s": round(first - arrived, 4),
        "gaps_ms": [round(ms, 2) for ms in until],
    }


def measure_arrival(
    llm: Any, point: Point, options: argparse.Namespace, *, is_first: bool
) -> dict[str, Any]:
    """Medians over the repeats of one point, and all of them; arguments as of `measure`."""
    rounds = [run_arrival(llm, point, options.arrival, 1000 * repeat)
              for repeat in range(options.repeats + is_first)][is_first:]  # fmt: skip
    medians = {
        name: statistics.median(found[name] for found in rounds)
        for name in ("usual_ms", "longest_ms", "first_token_s")
    }
    asked = {"batch": point.batch, "prompt": point.prompt, "arrival": options.arrival}
    return asked | medians | {"rounds": rounds}


def measure(
    llm: Any, point: Point, options: argparse.Namespace, drafts: int, *, is_first: bool
) -> dict[str, Any]:
    """Medians over the repeats of one point with so many drafts a request, and all of them.

    Args:
        llm: the engine.
        point: what is measured.
        options: of the command line.
        drafts: of a request, in each step.
        is_first: whether the engine has not measured this point before.

    """
    if is_first:
        # A short round: what a size needs once is not part of a step.
        run_requests(llm, replace(point, output=2 + drafts, least=0), 0, drafts)
    is_ours = options.backend == "ray_hetero"
    before = llm.collective_rpc("step_totals") if is_ours else []
    before_drafts = drafts_of(llm)
    seconds, rounds = 0.0, []
    for repeat in range(1, options.repeats + 1):
        time.sleep(REST_S)
        begin = time.monotonic()
        rounds.append(run_requests(llm, point, 1000 * repeat, drafts))
        seconds += time.monotonic() - begin
        if seconds > options.point_seconds:
            break
    after = llm.collective_rpc("step_totals") if is_ours else []
    ranks = [rank_shares(*both, seconds) for both in zip(before, after, strict=True)]
    found = figures(point, rounds) | ({"ranks": ranks} if ranks else {})
    after_drafts = drafts_of(llm)
    if any(new := [now - then for now, then in zip(after_drafts, before_drafts, strict=True)]):
        found["accepted_share"] = round(new[1] / new[0], 3)
    return found | ({"drafts": drafts} if drafts else {})


def drafts_of(llm: Any) -> tuple[int, int]:
    """Draft tokens so far, and how many of them were accepted."""
    if llm.llm_engine.vllm_config.speculative_config is None:
        return 0, 0
    values = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    names = ("num_draft_tokens", "num_accepted_tokens")
    drafted, accepted = (int(values.get(f"vllm:spec_decode_{name}", 0)) for name in names)
    return drafted, accepted


def rank_shares(
    before: dict[str, float], after: dict[str, float], seconds: float
) -> dict[str, float]:
    """Shares of a rank's time by activity, prompts and decode steps together."""
    new = {name: after[name] - before[name] for name in after}
    verifying = new.get("verifying_steps")
    of_verifying = (
        {"verifying_ms_a_step": round(1000 * new["verifying_s"] / verifying, 3)}
        if verifying
        else {}
    )
    return of_verifying | {
        "steps": new["steps"],
        "busy_share": round(new["busy_s"] / seconds, 3),
        "waiting_share": round(new["waiting_s"] / seconds, 3),
        "exchange_ms_a_step": round(1000 * new["exchange_s"] / new["steps"], 3),
        "columns_waited_ms_a_step": round(1000 * new["columns_waited_s"] / new["steps"], 3),
    }


def figures(point: Point, rounds: list[Timeline]) -> dict[str, Any]:
    """One point's results from its rounds."""
    steps = [ms for r in rounds if (ms := r.decode_ms(point.batch)) is not None]
    whole = [ms for r in rounds if (ms := r.step_ms()) is not None]
    brought = [r.full_tokens / r.full_steps / point.batch for r in rounds if r.full_steps]
    between = [step for r in rounds for step in r.between_steps]
    rates = [sum(point.outputs) / r.ended for r in rounds]
    return {
        "batch": point.batch,
        "prompt": point.prompt,
        "output": point.output,
        "prefill_s": round(statistics.median(r.all_started for r in rounds), 4),
        "decode_ms": round(statistics.median(steps), 3) if steps else None,
        "step_ms": round(statistics.median(whole), 3) if whole else None,
        "median_step_ms": round(1000 * statistics.median(between), 3) if between else None,
        "tokens_a_step": round(statistics.median(brought), 3) if brought else None,
        "tokens_per_s": round(statistics.median(rates), 2),
        "prefill_s_all": [round(r.all_started, 4) for r in rounds],
        "decode_ms_all": [round(ms, 3) for ms in steps],
        "tokens_per_s_all": [round(rate, 2) for rate in rates],
        "steps_ms_all": [
            [round(1000 * step, 1) for step in (*r.between_steps, *r.later_steps)] for r in rounds
        ],
    } | ({"least": point.least} if point.least else {})


def call_us(llm: Any, calls: int) -> float:
    """Median microseconds of a call from here to all ranks and back that does nothing there."""
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        llm.collective_rpc("check_health")
        times.append(time.perf_counter() - start)
    return round(1e6 * statistics.median(times), 1)


def main() -> None:
    """Run and print."""
    options = arguments()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO")
    before = used_bytes()
    start = time.perf_counter()
    llm = engine(options)
    startup = {"startup_s": round(time.perf_counter() - start, 1)}
    if options.turns:
        print("DONE {}", flush=True)
    for turn, _ in enumerate(sys.stdin if options.turns else ["once"]):
        is_first = turn == 0
        for point, is_arriving in points_of(options):
            if is_arriving:
                found = measure_arrival(llm, point, options, is_first=is_first)
                print("ARRIVAL " + json.dumps(startup | found), flush=True)
                continue
            for drafts in drafts_asked(options):
                found = measure(llm, point, options, drafts, is_first=is_first)
                print("RESULT " + json.dumps(startup | found), flush=True)
        if options.calls:
            print("CALLS " + json.dumps({"call_us": call_us(llm, options.calls)}), flush=True)
        if options.turns:
            print("DONE {}", flush=True)
    print("MEMORY " + json.dumps(memory_since(before)), flush=True)


if __name__ == "__main__":
    main()

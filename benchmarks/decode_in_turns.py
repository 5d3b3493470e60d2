"""Decode steps of one engine with what the GPU computes of them and without it, in turns.

    VLLM_ALLOW_INSECURE_SERIALIZATION=1 python benchmarks/decode_in_turns.py --heavy-tailed \\
        --points 1x128,8x128,32x128,128x96

The command line is that of engine_run.py.  The CPU rank of a GPU host measures at its start what
the GPU is to compute of decode steps (`cpu.decode_gpu_share`).  Here every second round of a point
leaves that away, so that both see the same engine and the same minutes of the host.  Prints
milliseconds of a step in all rounds and the ratio of their medians.  At the end the same prompts
are answered both ways: `parted` counts the answers that become others, and `largest_gap` is the
largest distance of the two likeliest tokens' logarithms where that happens.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from typing import Any

import engine_run
from engine_run import Point


def share(worker: Any, is_shared: bool) -> list[str]:
    """In a rank: use what was chosen for decode steps, or leave it away; what was chosen."""
    from ray_hetero.kernels.layers.decoder_layers import DecoderLayers
    from ray_hetero.kernels.layers.fused_modules import registered

    said = []
    for run in registered(DecoderLayers):
        chosen = run.__dict__.setdefault("chosen_share", run.shared)
        if chosen is not None:
            run.shared = chosen if is_shared else None
            said.append(str(chosen.shares))
    return said


def answers(llm: Any, point: Point) -> list[tuple[list[int], list[float]]]:
    """Tokens of each request, and how far the two likeliest of each step are apart."""
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0, max_tokens=point.output, ignore_eos=True, detokenize=False, logprobs=2
    )
    prompts = [
        {"prompt_token_ids": [(31 * row + 7 * i) % 500 + 3 for i in range(point.prompt)]}
        for row in range(point.batch)
    ]
    found = []
    for output in llm.generate(prompts, params, use_tqdm=False):
        (one,) = output.outputs
        gaps = []
        for step in one.logprobs:
            best, second = sorted((each.logprob for each in step.values()), reverse=True)[:2]
            gaps.append(best - second)
        found.append((list(one.token_ids), gaps))
    return found


def compared(llm: Any, point: Point) -> dict[str, Any]:
    """Answers with the GPU's help beside those of the cores alone."""
    both = []
    for is_shared in (True, False):
        llm.collective_rpc(share, args=(is_shared,))
        both.append(answers(llm, point))
    parted = []
    for (shared, _), (alone, gaps) in zip(*both, strict=True):
        differing = [at for at, (one, other) in enumerate(zip(shared, alone, strict=True))
                     if one != other]  # fmt: skip
        parted += [gaps[at] for at in differing[:1]]
    gap = round(max(parted), 3) if parted else None
    return {"answers": point.batch, "parted": len(parted), "largest_gap": gap}


def main() -> None:
    """Run and print."""
    options = engine_run.arguments()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO")
    start = time.perf_counter()
    llm = engine_run.engine(options)
    chosen = [said for said in llm.collective_rpc(share, args=(True,)) if said]
    about = {"startup_s": round(time.perf_counter() - start, 1), "chosen": chosen}
    print("ABOUT " + json.dumps(about), flush=True)
    for point, _ in engine_run.points_of(options):
        taken: dict[bool, list[float]] = {True: [], False: []}
        for repeat in range(options.repeats + 1):
            for is_shared in taken:
                llm.collective_rpc(share, args=(is_shared,))
                timeline = engine_run.run_requests(llm, point, 1000 * repeat + is_shared)
                # What a size needs once is not part of a step.
                if repeat and (step := timeline.decode_ms(point.batch)) is not None:
                    taken[is_shared].append(step)
        medians = {is_shared: statistics.median(steps) for is_shared, steps in taken.items()}
        result = {
            "batch": point.batch, "prompt": point.prompt, "output": point.output,
            "shared_ms": [round(step, 2) for step in taken[True]],
            "alone_ms": [round(step, 2) for step in taken[False]],
            "ratio": round(medians[True] / medians[False], 3),
        }  # fmt: skip
        print("RESULT " + json.dumps(result | compared(llm, point)), flush=True)


if __name__ == "__main__":
    main()

"""Hugging Face transformers + accelerate with some layers in host memory.

Takes the same points and prints the same lines as engine_run.py.  Accelerate copies a layer's
weights to the GPU each time it computes them.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace

import torch
from accelerate import dispatch_model
from engine_run import Point, Timeline, figures
from memory import memory_since, used_bytes
from shapes import SHAPES, write_shape
from transformers import AutoConfig, AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList


class TokenTimes(LogitsProcessor):
    """Notes when the logits of each token are there; changes nothing."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Note the time; the scores go on as they are."""
        torch.cuda.synchronize()
        self.seconds.append(time.perf_counter())
        return scores


def main() -> None:
    """Build, dispatch, measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--outside", type=int, required=True, help="layers in host memory")
    parser.add_argument("--points", default="1x128,8x128")
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--point-seconds", type=float, default=60)
    options = parser.parse_args()
    before, begin = used_bytes(), time.perf_counter()
    model = dispatched(options.shape, options.outside)
    startup = {"startup_s": round(time.perf_counter() - begin, 1)}
    for text in options.points.split(","):
        point = Point.parse(text, options.output_tokens)
        generate(model, replace(point, output=2))
        started, rounds = time.monotonic(), []
        for _ in range(options.repeats):
            rounds.append(generate(model, point))
            if time.monotonic() - started > options.point_seconds:
                break
        result = startup | figures(point, rounds)
        print("RESULT " + json.dumps(result), flush=True)
    print("MEMORY " + json.dumps(memory_since(before)), flush=True)


def dispatched(shape: str, outside: int) -> torch.nn.Module:
    """A random model, its first layers in host memory and all else on the GPU."""
    config = AutoConfig.from_pretrained(write_shape(shape))
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    places: dict[str, str | int] = {
        f"model.layers.{i}": "cpu" if i < outside else 0 for i in range(config.num_hidden_layers)
    }
    others = ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head")
    return dispatch_model(model, places | dict.fromkeys(others, 0), main_device=0)


def generate(model: torch.nn.Module, point: Point) -> Timeline:
    """One batch from start to end."""
    ids = torch.randint(3, 500, (point.batch, point.prompt), device="cuda")
    times = TokenTimes()
    torch.cuda.synchronize()
    start = time.perf_counter()
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=point.output,
        min_new_tokens=point.output,
        do_sample=False,
        logits_processor=LogitsProcessorList([times]),
    )
    torch.cuda.synchronize()
    first, last = times.seconds[0] - start, times.seconds[-1] - start
    tokens = point.batch * (point.output - 1)
    return Timeline(first, last, tokens, time.perf_counter() - start)


if __name__ == "__main__":
    main()

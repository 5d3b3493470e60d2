"""Hugging Face transformers + accelerate with half the layers held in host memory, one line."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from accelerate import dispatch_model
from engine_run import write_shape
from transformers import AutoConfig, AutoModelForCausalLM


def main() -> None:
    """Build, dispatch, measure; the same prompts and figures as engine_run.py."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="8b")
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--decode-tokens", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    config = AutoConfig.from_pretrained(write_shape(options.shape, Path("/tmp/ray_hetero_shapes")))  # noqa: S108
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    layers = config.num_hidden_layers
    where = {f"model.layers.{i}": "cpu" if i < layers // 2 else 0 for i in range(layers)}
    others = ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head")
    model = dispatch_model(model, where | dict.fromkeys(others, 0), main_device=0)
    for batch in map(int, options.batches.split(",")):
        ids = torch.randint(3, 500, (batch, options.prompt), device="cuda")

        def seconds(tokens: int, ids: torch.Tensor = ids) -> float:
            torch.cuda.synchronize()
            start = time.perf_counter()
            model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
            torch.cuda.synchronize()
            return time.perf_counter() - start

        seconds(2)
        prefills, steps = [], []
        for _ in range(options.repeats):
            short, both = seconds(1), seconds(1 + options.decode_tokens)
            prefills.append(short)
            steps.append((both - short) / options.decode_tokens * 1000)
        result = {
            "batch": batch,
            "prompt": options.prompt,
            "prefill_s": round(statistics.median(prefills), 4),
            "decode_ms": round(statistics.median(steps), 2),
            "decode_ms_all": [round(step, 2) for step in steps],
        }
        print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()

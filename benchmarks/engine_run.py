"""One engine, one shape, one placement: prefill and decode times, as one line of JSON.

Every measurement of the side-by-side benchmark is a run of this script in a process of its own.
Times come from whole `generate` calls: prefill is a call for one token, a decode step is the
difference between a long and a short call over the difference in tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import time
from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4,
             "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 512},
    "1b": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22,
           "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 32000},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
           "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256},
    "8b-half": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 16,
                "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 512},
    "20b": {"hidden_size": 6144, "intermediate_size": 16384, "num_hidden_layers": 48,
            "num_attention_heads": 48, "num_key_value_heads": 8, "vocab_size": 128256},
}  # fmt: skip


def write_shape(name: str, directory: Path) -> Path:
    """Write a config.json of a known shape; weights are vLLM's dummies."""
    directory = directory / name
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "max_position_embeddings": 16384, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
        "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config | SHAPES[name]))
    return directory


def arguments() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--label", default="")
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--shape-dir", type=Path, default=Path("/tmp/ray_hetero_shapes"))  # noqa: S108
    parser.add_argument("--backend", default="ray_hetero", help="ray_hetero, mp, uni")
    parser.add_argument("--layout", default='[["cpu"],["gpu"]]')
    parser.add_argument("--config", default="{}", help="more of the ray_hetero configuration")
    parser.add_argument("--engine", default="{}", help="more arguments of LLM(), as JSON")
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--prompts", default="128")
    parser.add_argument("--decode-tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--compile", action="store_true")
    return parser.parse_args()


def engine(options: argparse.Namespace) -> Any:
    """Start the engine that the options describe."""
    from vllm import LLM

    batches = [int(b) for b in options.batches.split(",")]
    longest = max(int(p) for p in options.prompts.split(","))
    settings: dict[str, Any] = {
        "model": str(write_shape(options.shape, options.shape_dir)),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": longest + options.decode_tokens + 64,
        "max_num_seqs": max(batches),
        "enforce_eager": not options.compile,
        "enable_prefix_caching": False,
        "dtype": "bfloat16",
    }
    if options.backend == "ray_hetero":
        layout = json.loads(options.layout)
        settings |= {
            "distributed_executor_backend": "ray_hetero",
            "pipeline_parallel_size": len(layout),
            "tensor_parallel_size": len(layout[0]),
            "additional_config": {"ray_hetero": {"layout": layout} | json.loads(options.config)},
        }
    return LLM(**(settings | json.loads(options.engine)))


def measure(llm: Any, batch: int, prompt: int, options: argparse.Namespace) -> dict[str, float]:
    """Prefill seconds and decode milliseconds a step, medians over the repeats."""
    from vllm import SamplingParams

    def seconds(tokens: int, salt: int) -> float:
        sampling = SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False
        )
        prompts = [
            {"prompt_token_ids": [(salt + 31 * row + 7 * i) % 500 + 3 for i in range(prompt)]}
            for row in range(batch)
        ]
        start = time.perf_counter()
        llm.generate(prompts, sampling, use_tqdm=False)
        return time.perf_counter() - start

    seconds(2, 0)
    prefills, steps = [], []
    for repeat in range(1, options.repeats + 1):
        short = seconds(1, 1000 * repeat)
        both = seconds(1 + options.decode_tokens, 1000 * repeat + 1)
        prefills.append(short)
        steps.append((both - short) / options.decode_tokens * 1000)
    return {
        "batch": batch,
        "prompt": prompt,
        "prefill_s": round(statistics.median(prefills), 4),
        "decode_ms": round(statistics.median(steps), 3),
        "decode_ms_all": [round(step, 2) for step in steps],  # type: ignore[dict-item]
    }


def main() -> None:
    """Run and print."""
    options = arguments()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO")
    start = time.perf_counter()
    llm = engine(options)
    startup = time.perf_counter() - start
    for prompt in map(int, options.prompts.split(",")):
        for batch in map(int, options.batches.split(",")):
            result = {"label": options.label, "startup_s": round(startup, 1)}
            result |= measure(llm, batch, prompt, options)
            result["peak_rss_gib"] = round(
                resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20), 2
            )
            print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()

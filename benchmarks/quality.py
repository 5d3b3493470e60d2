"""Likelihood of text and greedy answers of a trained model, in every format and way of computing.

    ray-hetero demo-model --trained smollm2
    python benchmarks/quality.py --model smollm2 --out results                  # all formats
    python benchmarks/quality.py --model smollm2 --out results --formats bf16 --ways stock,tensor
    python benchmarks/quality.py --model smollm2 --out results --ways gpu,gpu-cores,gpu-shares

The model's linear layers are stored in each format (`demo-model --stored` does the same).  An
engine answers with the mean negative log-likelihood of a fixed text, in nats a token; it goes on
with every window of the text, whose beginning it then finds in its prefix cache; and it answers a
dozen questions, all greedily.  Beside it stands the likelihood of the same stored weights in
Transformers, expanded and computed in float32; the difference is what rounding adds.  Differences
of stock vLLM in bf16, from window to window, tell how far apart a right engine may be (`bound`).
The text is Python's own language reference (`pydoc_data.topics`).  A run with the same `--out` adds
to its results.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests" / "cluster"))

WINDOW, WINDOWS = 256, 14
"""Tokens of a prompt whose likelihood is asked for, and how many there are."""
ANSWER = 32
"""Tokens of an answer."""
QUESTIONS = (
    "What is the capital of France?", "What is the opposite of hot?", "What does a baker do?",
    "Which language is spoken in Brazil?", "How many legs does a spider have?",
    "Write one sentence about the sea.", "What is water made of?", "Name three animals.",
    "Why do leaves fall in autumn?", "Count from one to ten.", "What is the sun?",
    "Say hello in Spanish.",
)  # fmt: skip
DEVIATIONS, CHOSEN_DEVIATIONS = 4, 6
"""Standard errors that a mean difference may be away from zero: of given tokens, and of those that
an engine has chosen, which are the ones that its own rounding favours."""


@dataclass(frozen=True)
class Format:
    """How weights are stored and held."""

    stored: str | None = None
    """Format of `demo-model --stored`; None leaves the checkpoint in bf16."""
    dtype: str = "bfloat16"
    compact: bool = False
    """Whether CPU ranks hold bf16 weights in 12 bits."""


@dataclass(frozen=True)
class Way:
    """How an engine computes."""

    layout: tuple[tuple[str, ...], ...] = (("cpu",), ("cpu",))
    """Kinds of ranks by stage; none is stock vLLM."""
    engine: dict[str, Any] = field(default_factory=dict)
    cpu: dict[str, Any] = field(default_factory=dict)
    """Keys of the configuration's section `cpu`."""

    def arguments(self, form: Format) -> dict[str, Any]:
        """Arguments of LLM() for weights in a format."""
        if not self.layout:
            return dict(self.engine)
        size = len(self.layout[0])
        cpu = {
            "kv_cache_gib": 0.5, "linear_kernel": "streaming", "compact_weights": form.compact,
            "ranks_per_socket": sum(stage.count("cpu") for stage in self.layout), **self.cpu,
        }  # fmt: skip
        return {
            "distributed_executor_backend": "ray_hetero",
            "pipeline_parallel_size": len(self.layout),
            "tensor_parallel_size": size,
            "additional_config": {
                "ray_hetero": {
                    "cpu": cpu,
                    "layout": [list(stage) for stage in self.layout],
                    # Else the plan leaves a socket one layer of so small a model.
                    "layers": [LAYERS // 2] * 2 if self.layout == ON_GPU else "auto",
                }
            },
            **self.engine,
        }


def formats() -> dict[str, Format]:
    """Formats by name; larger groups stand for formats whose groups have a size of their own."""
    from ray_hetero.cli.demo.stored import FORMATS

    plain = {
        "bf16": Format(), "12 bits": Format(compact=True), "fp16": Format(dtype="float16")
    }  # fmt: skip
    stored = (name for name, form in FORMATS.items() if form.group is None)
    return {**plain, **{name: Format(stored=name) for name in stored}}


NGRAM = {
    "method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 4
}  # fmt: skip
ON_GPU, LAYERS = (("cpu",), ("gpu",)), 30
PROMPTS = {"prefill_on_gpu": True, "prefill_on_gpu_tokens": 96}
"""Steps of so many tokens are on the GPU, whatever is faster; without one the engine ends."""
OF_GPU = {"gpu_memory_utilization": 0.2, "kv_cache_memory_bytes": 1 << 30}
"""A part of the GPU, which leaves room for other work on it."""
WAYS = {
    "stock": Way(()),
    "stock-gpu": Way((), OF_GPU),
    "one": Way((("cpu",),)),
    # Beside another engine.
    "half": Way((("cpu",),), cpu={"ranks_per_socket": 2}),
    "pipeline": Way(),
    # The model has three heads of keys and values.
    "tensor": Way((("cpu",) * 3,)),
    "chunks": Way(engine={"max_num_batched_tokens": 96}),
    "drafts": Way(engine={"speculative_config": NGRAM, "disable_log_stats": False}),
    "gpu": Way(ON_GPU, OF_GPU),
    "gpu-cores": Way(ON_GPU, OF_GPU, cpu={"prefill_on_gpu": False}),
    "gpu-shares": Way(ON_GPU, OF_GPU, cpu={**PROMPTS, "decode_gpu_share": 0.5}),
    "gpu-no-shares": Way(ON_GPU, OF_GPU, cpu={**PROMPTS, "decode_gpu_share": 0}),
}
"""Ways by name.  Those of a GPU have half of the layers on a socket: prompts of them on the GPU and
on the cores, and decode steps with and without columns on the GPU.  `stock-gpu` is all on it."""
STOCK = ("bf16", "stock")
"""Format and way whose spread is the measure."""


@dataclass(frozen=True)
class Scored:
    """Logprobs of an engine for the tokens of one window."""

    prompt: list[float]
    """Logprobs of the window, without its first token."""
    tokens: list[int]
    """Tokens that the engine goes on with."""
    answer: list[float]
    """Logprobs of these tokens."""
    cached: int
    """Tokens of the window that were in the prefix cache when it went on."""


def main() -> None:
    """Measure formats and ways, one after the other; written down after each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="of `demo-model --trained`")
    parser.add_argument("--out", type=Path, required=True, help="folder")
    parser.add_argument("--formats", default=",".join(formats()))
    parser.add_argument("--ways", default="pipeline", help=", ".join(WAYS))
    parser.add_argument("--rows", help="FORMAT/WAY,…: these instead of all formats in all ways")
    parser.add_argument("--windows", type=int, default=WINDOWS)
    parser.add_argument("--one-ray", action="store_true", help="for all engines; starts faster")
    options = parser.parse_args()
    # Engines one after the other in one process, which imports vLLM once.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    # Of stock vLLM, in GiB; it would take most of the memory.
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    if options.one_ray:
        from ray_hetero.runtime import local_ray

        # It is stopped at exit.
        local_ray.start()
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "quality.json"
    about = {"window": WINDOW, "windows": options.windows, "answer": ANSWER, "text": text_digest()}
    rows = json.loads(file.read_text())["rows"] if file.exists() else []
    for name, way in pairs(options):
        row = {"format": name, "way": way}
        row |= measure(options.model, options.out, name, way, options.windows)
        rows = [one for one in rows if not is_of(one, name, way)] + [row]
        file.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")
        print(line(row, rows), flush=True)


def pairs(options: argparse.Namespace) -> list[tuple[str, str]]:
    """Formats and ways that are asked for."""
    if options.rows:
        return [
            (name, way) for name, _, way in (row.partition("/") for row in options.rows.split(","))
        ]
    return [(name, way) for way in options.ways.split(",") for name in options.formats.split(",")]


def measure(model: Path, out: Path, name: str, way: str, windows: int) -> dict[str, Any]:
    """Figures of a format in a way."""
    form = formats()[name]
    stored = stored_model(model, form.stored, out)
    began = time.monotonic()
    asked = windows_of(stored, windows)
    engine = {"dtype": form.dtype, **WAYS[way].arguments(form)}
    scored, answers, counted = ask(stored, engine, asked)
    took = time.monotonic() - began
    whole = [[*ids, *one.tokens] for ids, one in zip(asked, scored, strict=True)]
    known = reference(stored, out / f"{stored.name}-plain", whole)
    prompts = [(one.prompt, row[: WINDOW - 1]) for one, row in zip(scored, known, strict=True)]
    later = [(one.answer, row[WINDOW - 1 :]) for one, row in zip(scored, known, strict=True)]
    return {
        **figures(prompts),
        "continued": figures(later),
        "cached": min(one.cached for one in scored),
        **counted,
        "bytes": (stored / "model.safetensors").stat().st_size,
        "seconds": round(took, 1),
        "answers": answers,
    }


def text() -> str:
    """A fixed English text: pages of Python's language reference."""
    from pydoc_data import topics

    return "\n".join(topics.topics[name] for name in ("objects", "naming", "exprlists", "with"))


def text_digest() -> str:
    """Digest of the text, which differs between versions of Python."""
    return hashlib.sha256(text().encode()).hexdigest()[:16]


def windows_of(folder: Path, count: int) -> list[list[int]]:
    """Token ids of the prompts, each `WINDOW` long."""
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(folder)(text()).input_ids
    assert len(ids) >= WINDOW * count, f"the text has {len(ids)} tokens"
    return [ids[at * WINDOW : (at + 1) * WINDOW] for at in range(count)]


def stored_model(model: Path, stored: str | None, out: Path) -> Path:
    """The checkpoint in a format; the model's own in bf16."""
    if stored is None:
        return model
    folder = out / stored
    if not (folder / "config.json").exists():
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from ray_hetero.cli.demo.stored import quantise

        plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
        plain.config.quantization_config, state = quantise(plain, stored)
        plain.save_pretrained(folder, state_dict=state, save_original_format=False)
        AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return folder


def reference(stored: Path, plain: Path, sequences: Sequence[list[int]]) -> list[list[float]]:
    """Logprobs of tokens behind the first, by the stored weights in Transformers, in float32."""
    import torch
    from dequantised import dequantised
    from transformers import AutoModelForCausalLM

    config = json.loads((stored / "config.json").read_text())
    if "quantization_config" in config and not plain.exists():
        dequantised(stored, plain, torch.float32)
    folder = plain if plain.exists() else stored
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = []
    with torch.no_grad():
        for ids in sequences:
            rows = torch.tensor([ids])
            logprobs = model(rows).logits[0, :-1].log_softmax(-1)
            found.append(logprobs.gather(1, rows[0, 1:, None])[:, 0].tolist())
    return found


def ask(
    stored: Path, engine: dict[str, Any], asked: Sequence[list[int]]
) -> tuple[list[Scored], list[str], dict[str, Any]]:
    """Scores of windows, answers to questions, and what the engine has counted."""
    from vllm import LLM, SamplingParams

    engine = {"max_num_batched_tokens": 1024, **rounding(), **engine}
    llm = LLM(
        model=str(stored), max_model_len=1024, max_num_seqs=16, enforce_eager=True, seed=0, **engine
    )
    try:
        prompts = [{"prompt_token_ids": ids} for ids in asked]
        score = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
        scored = llm.generate(prompts, score, use_tqdm=False)
        greedy = SamplingParams(max_tokens=ANSWER, temperature=0, logprobs=0, ignore_eos=True)
        later = llm.generate(prompts, greedy, use_tqdm=False)
        found = [_scored(*each) for each in zip(asked, scored, later, strict=True)]
        chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
        short = SamplingParams(max_tokens=ANSWER, temperature=0)
        answers = [one.outputs[0].text for one in llm.chat(chats, short, use_tqdm=False)]
        return found, answers, counts(llm, engine)
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


def rounding() -> dict[str, Any]:
    """Arguments with which an engine rounds to bfloat16.

    Without AVX512-BF16, vLLM's own operators, which engines that compile nothing take, cut it off:
    each norm and each activation is smaller by 0.28 % in the mean.
    """
    import torch

    has_instruction = torch.cpu._is_avx512_bf16_supported()
    return {} if has_instruction else {"compilation_config": {"custom_ops": ["none"]}}


def _scored(ids: list[int], prompt: Any, later: Any) -> Scored:
    (answer,) = later.outputs
    tokens = list(answer.token_ids)
    return Scored(
        [at[token].logprob for at, token in zip(prompt.prompt_logprobs[1:], ids[1:], strict=True)],
        tokens,
        [at[token].logprob for at, token in zip(answer.logprobs, tokens, strict=True)],
        later.num_cached_tokens or 0,
    )


def counts(llm: Any, engine: dict[str, Any]) -> dict[str, Any]:
    """Share of accepted drafts, and tokens times layers by where the first rank computed them.

    Those of decode steps that a GPU shares are native ones; the rank then waits for its columns.
    """
    found: dict[str, Any] = {"accepted": None}
    if "speculative_config" in engine:
        found["accepted"] = accepted_share(llm)
    if "distributed_executor_backend" in engine:
        totals = llm.collective_rpc("step_totals")[0]
        found["computed"] = {
            name: totals[f"{name}_layer_tokens"] for name in ("native", "gpu", "operator")
        } | {"columns_waited_s": round(totals["columns_waited_s"], 3)}
    return found


def accepted_share(llm: Any) -> float:
    """Share of the draft tokens of an engine that were accepted."""
    counts = draft_counts(llm)
    drafted = counts["draft_tokens"]
    return counts["accepted_tokens"] / drafted if drafted else 0.0


def draft_counts(llm: Any) -> dict[str, float]:
    """vLLM's counters of drafts, by the ends of their names, such as `accepted_tokens`."""
    prefix = "vllm:spec_decode_num_"
    return {
        metric.name.removeprefix(prefix): metric.value
        for metric in llm.get_metrics()
        if metric.name.startswith(prefix) and hasattr(metric, "value")
    }


def figures(pairs: Sequence[tuple[list[float], list[float]]]) -> dict[str, float]:
    """Likelihoods of an engine's logprobs and the reference's, by window, and their differences.

    Returns:
        Mean negative log-likelihoods, their difference, and the standard deviation of differences
        between tokens and between the means of windows, all in nats a token.

    """
    means = [statistics.mean(theirs) - statistics.mean(ours) for ours, theirs in pairs]
    each = [y - x for ours, theirs in pairs for x, y in zip(ours, theirs, strict=True)]
    engine = -statistics.mean(x for ours, _ in pairs for x in ours)
    return {
        "engine": engine,
        "reference": engine - statistics.mean(each),
        "difference": statistics.mean(each),
        "between_tokens": statistics.stdev(each),
        "between_windows": statistics.stdev(means) if len(means) > 1 else 0.0,
    }


def bound(stock: dict[str, float], windows: int, deviations: int = DEVIATIONS) -> float:
    """Nats that the mean difference of some windows may be away from zero.

    Rounding errors are of either sign.  Those of stock vLLM in bf16 make a window's mean differ
    from float32 with a standard deviation, and the mean of all windows with one that is smaller by
    the root of their number.

    Args:
        stock: figures of stock vLLM in bf16.
        windows: how many the mean is of.
        deviations: standard errors that it may be away.

    """
    return deviations * stock["between_windows"] / float(windows**0.5)


def is_of(row: dict[str, Any], name: str, way: str) -> bool:
    """Whether a row is that of a format in a way."""
    return bool((row["format"], row["way"]) == (name, way))


def same_answers(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    """How many answers are those of bf16 in the same way."""
    plain = [one for one in rows if is_of(one, "bf16", row["way"])]
    if not plain:
        return "–"
    pairs = zip(row["answers"], plain[0]["answers"], strict=True)
    return f"{sum(one == other for one, other in pairs)} of {len(row['answers'])}"


def line(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    """One row of the table."""
    cells = (
        row["format"], row["way"], f"{row['bytes'] / 1e6:.0f} MB", f"{row['engine']:.4f}",
        f"{row['reference']:.4f}", f"{row['difference']:+.4f}",
        f"{row['continued']['difference']:+.4f}", same_answers(row, rows),
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()

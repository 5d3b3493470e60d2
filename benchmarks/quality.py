"""Likelihood of text and greedy answers of a trained model, in every format that CPU ranks compute.

    ray-hetero demo-model --trained smollm2
    python benchmarks/quality.py --model smollm2 --out results              # all formats
    python benchmarks/quality.py --model smollm2 --out results --formats bf16,fp8,w4a16

The model's linear layers are stored in each format (`demo-model --stored` does the same).  An
engine of CPU ranks answers with the mean negative log-likelihood of a fixed text, in nats a token,
and with greedy answers to a dozen questions.  Beside it stands the likelihood of the same stored
weights in Transformers, expanded and computed in float32; the difference is what the kernels'
rounding adds.  The text is Python's own language reference (`pydoc_data.topics`).
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests" / "cluster"))

WINDOW, WINDOWS = 256, 14
"""Tokens of a prompt whose likelihood is asked for, and how many there are."""
ANSWER = 32
QUESTIONS = (
    "What is the capital of France?", "What is the opposite of hot?", "What does a baker do?",
    "Which language is spoken in Brazil?", "How many legs does a spider have?",
    "Write one sentence about the sea.", "What is water made of?", "Name three animals.",
    "Why do leaves fall in autumn?", "Count from one to ten.", "What is the sun?",
    "Say hello in Spanish.",
)  # fmt: skip
PLAIN = "bf16"


@dataclass(frozen=True)
class Layout:
    """CPU ranks of an engine."""

    pipeline: int = 1
    tensor: int = 1

    @property
    def engine(self) -> dict[str, Any]:
        """Arguments of LLM()."""
        ranks = self.pipeline * self.tensor
        cpu = {"kv_cache_gib": 0.5, "ranks_per_socket": ranks, "linear_kernel": "streaming"}
        return {
            "distributed_executor_backend": "ray_hetero",
            "pipeline_parallel_size": self.pipeline,
            "tensor_parallel_size": self.tensor,
            "additional_config": {"ray_hetero": {"cpu": cpu}},
        }


LAYOUTS = {"one": Layout(), "pipeline": Layout(pipeline=2), "tensor": Layout(tensor=3)}
"""The model has three heads of keys and values."""


def main() -> None:
    """Measure the formats, one after the other; written down after each."""
    from ray_hetero.cli.demo.stored import FORMATS

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="of `demo-model --trained`")
    parser.add_argument("--out", type=Path, required=True, help="folder")
    parser.add_argument("--formats", default=",".join((PLAIN, *FORMATS)))
    parser.add_argument("--layout", choices=LAYOUTS, default="pipeline")
    options = parser.parse_args()
    # Engines one after the other in one process, which imports vLLM once.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    options.out.mkdir(parents=True, exist_ok=True)
    rows: dict[str, Any] = {}
    about = {"layout": options.layout, "window": WINDOW, "windows": WINDOWS, "text": text_digest()}
    for name in options.formats.split(","):
        stored = stored_model(options.model, name, options.out / name)
        began = time.monotonic()
        rows[name] = {"reference": reference(stored, options.out / f"{name}-plain")}
        rows[name] |= measured(stored, LAYOUTS[options.layout])
        rows[name]["bytes"] = (stored / "model.safetensors").stat().st_size
        rows[name]["seconds"] = round(time.monotonic() - began, 1)
        found = json.dumps(about | {"formats": rows}, indent=1)
        (options.out / f"quality-{options.layout}.json").write_text(found + "\n")
        print(line(name, rows), flush=True)


def text() -> str:
    """A fixed English text: pages of Python's language reference."""
    from pydoc_data import topics

    return "\n".join(topics.topics[name] for name in ("objects", "naming", "exprlists", "with"))


def text_digest() -> str:
    """What tells texts of different versions of Python apart."""
    return hashlib.sha256(text().encode()).hexdigest()[:16]


def windows(folder: Path) -> list[list[int]]:
    """Token ids of the prompts, each `WINDOW` long."""
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(folder)(text()).input_ids
    assert len(ids) >= WINDOW * WINDOWS, f"the text has {len(ids)} tokens"
    return [ids[at * WINDOW : (at + 1) * WINDOW] for at in range(WINDOWS)]


def stored_model(model: Path, name: str, folder: Path) -> Path:
    """The checkpoint in a format; the model's own in bf16."""
    if name == PLAIN:
        return model
    if not (folder / "config.json").exists():
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from ray_hetero.cli.demo.stored import quantise

        plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
        plain.config.quantization_config, state = quantise(plain, name)
        plain.save_pretrained(folder, state_dict=state, save_original_format=False)
        AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return folder


def reference(stored: Path, plain: Path) -> float:
    """Mean negative log-likelihood of the stored weights in Transformers, in float32."""
    import torch
    from dequantised import dequantised
    from transformers import AutoModelForCausalLM

    config = json.loads((stored / "config.json").read_text())
    if "quantization_config" in config and not plain.exists():
        dequantised(stored, plain, torch.float32)
    folder = plain if plain.exists() else stored
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    lost = []
    with torch.no_grad():
        for ids in windows(stored):
            rows = torch.tensor([ids])
            logprobs = model(rows).logits[0, :-1].log_softmax(-1)
            lost.append(-logprobs.gather(1, rows[0, 1:, None]).mean().item())
    return sum(lost) / len(lost)


def measured(stored: Path, layout: Layout) -> dict[str, Any]:
    """The same likelihood from an engine, and its answers."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(stored), dtype="bfloat16", max_model_len=1024, max_num_seqs=16,
        max_num_batched_tokens=1024, enforce_eager=True, seed=0, **layout.engine,
    )  # fmt: skip
    try:
        prompts = [{"prompt_token_ids": ids} for ids in windows(stored)]
        params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
        lost = []
        for asked, output in zip(
            prompts, llm.generate(prompts, params, use_tqdm=False), strict=True
        ):
            found = output.prompt_logprobs[1:]
            ids = asked["prompt_token_ids"][1:]
            each = [-one[token].logprob for one, token in zip(found, ids, strict=True)]
            lost.append(sum(each) / len(each))
        chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
        greedy = SamplingParams(max_tokens=ANSWER, temperature=0)
        answers = [one.outputs[0].text for one in llm.chat(chats, greedy, use_tqdm=False)]
        return {"engine": sum(lost) / len(lost), "answers": answers}
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


def line(name: str, rows: dict[str, Any]) -> str:
    """One row of the table."""
    row, plain = rows[name], rows.get(PLAIN)
    same = "–"
    if plain:
        pairs = zip(row["answers"], plain["answers"], strict=True)
        same = f"{sum(one == other for one, other in pairs)} of {len(QUESTIONS)}"
    return (
        f"| {name} | {row['bytes'] / 1e6:.0f} MB | {row['engine']:.4f} | {row['reference']:.4f} | "
        f"{row['engine'] - row['reference']:+.4f} | {same} |"
    )


if __name__ == "__main__":
    main()

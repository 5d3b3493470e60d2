"""Drafts on real text: what a trained model accepts of them, and what that gains.

    ray-hetero demo-model --trained smollm2
    ray-hetero demo-model --trained --stored w4a16 smollm2-4bit
    python benchmarks/drafts_on_text.py --model smollm2 --draft-model smollm2-4bit --out drafts.json

An engine without drafts, and one for each drafter, in turns: chats, code that is to be continued,
and documents that are to be repeated with small changes (of Python's own library).  Four prompts of
each kind are answered one at a time, and eight others at once.  Each text is given to an engine
once, as suffixes remember answers.  Beside the tokens per second stands what `ray-hetero plan` says
of drafts that are accepted as often.  `suffix` needs arctic-inference.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quality import NGRAM, QUESTIONS, draft_counts

from placement.plan.drafts import tokens_of_step

ANSWER = 96
"""Tokens of an answer."""
DRAFTS = {"n-grams": 4, "suffixes": 4, "draft model": 3, "head": 3}
NONE = "none"
CONTEXT = 256
"""Tokens of a sequence for the plan, about those of the prompts here."""
SINGLE, AT_ONCE = 4, 8
MODULES = ("heapq", "statistics", "textwrap", "fractions", "bisect", "shlex")
SECTIONS = (
    "assignment", "attribute-access", "comparisons", "customization", "debugger", "execmodel",
    "formatstrings", "import", "numeric-types", "string-methods", "types", "typesseq",
)  # fmt: skip
MORE = (
    "Why is the sky blue?", "Explain what a computer is.", "Write a short poem about rain.",
    "How do I boil an egg?", "What is a prime number?", "Give me three tips to sleep well.",
    "What is the difference between a cat and a dog?", "Tell me about the moon.",
)  # fmt: skip


def main() -> None:
    """Measure all drafters in turns; written down after each engine."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="of `demo-model --trained`")
    parser.add_argument("--draft-model", type=Path, help="the same in fewer bits")
    parser.add_argument("--head", type=Path, help="of train_draft_head.py")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--drafters", default=f"{NONE},{','.join(DRAFTS)}")
    options = parser.parse_args()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    names = options.drafters.split(",")
    if names[0] != NONE:
        parser.error(f"--drafters starts with {names[0]}: expected {NONE}")
    of_drafter = {"draft model": options.draft_model, "head": options.head}
    for name in names:
        if name in of_drafter and of_drafter[name] is None:
            parser.error(f"the drafter {name} needs --{name.replace(' ', '-')}")
    runs: list[dict[str, Any]] = []
    for turn in range(options.rounds):
        for name in names:
            load = os.getloadavg()[0]
            found = run(options.model, speculation(name, of_drafter.get(name)))
            runs.append({"turn": turn, "drafter": name, "load": load, "found": found})
            about = {"tokens": ANSWER, "drafts": DRAFTS, "runs": runs}
            about["summary"] = summary(runs, options.model, of_drafter)
            options.out.write_text(json.dumps(about, indent=1) + "\n")
            print(name, {one["text"] + "/" + str(one["requests"]): round(one["tokens_per_s"], 1)
                         for one in found}, flush=True)  # fmt: skip


def speculation(name: str, checkpoint: Path | None) -> dict[str, Any] | None:
    """vLLM's configuration of a drafter."""
    if name == NONE:
        return None
    count = {"num_speculative_tokens": DRAFTS[name]}
    if name == "n-grams":
        return NGRAM | count
    if name == "suffixes":
        return {"method": "suffix", **count}
    method = "eagle" if name == "head" else "draft_model"
    return {"method": method, "model": str(checkpoint), **count}


def texts() -> dict[str, list[list[dict[str, str]]]]:
    """Conversations by kind: those that are answered one at a time, then the others."""
    import importlib
    import inspect
    from pydoc_data import topics

    functions = [
        inspect.getsource(value)
        for name in MODULES
        for _, value in inspect.getmembers(importlib.import_module(name), inspect.isfunction)
        if value.__module__ == name
    ]
    long = [source for source in functions if 900 < len(source) < 2500][: SINGLE + AT_ONCE]
    code = [f"Write this Python function again with type annotations:\n\n{one}" for one in long]
    pages = [topics.topics[name][300:1300] for name in SECTIONS]
    documents = [f"Repeat the following text and correct its errors:\n\n{page}" for page in pages]
    kinds = {"chat": [*QUESTIONS[:SINGLE], *MORE], "code": code, "document": documents}
    return {
        kind: [[{"role": "user", "content": one}] for one in given] for kind, given in kinds.items()
    }


def run(model: Path, speculative: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Figures of all texts from one engine, over one CPU rank."""
    import gc

    from vllm import LLM, SamplingParams

    given = {} if speculative is None else {"speculative_config": speculative}
    llm = LLM(
        model=str(model), dtype="bfloat16", max_model_len=1024, max_num_seqs=AT_ONCE,
        enforce_eager=True, seed=0, disable_log_stats=False,
        distributed_executor_backend="ray_hetero",
        additional_config={"ray_hetero": {"cpu": {"kv_cache_gib": 0.5}, "layout": [["cpu"]]}},
        **given,
    )  # fmt: skip
    greedy = SamplingParams(max_tokens=ANSWER, temperature=0)
    try:
        llm.chat([[{"role": "user", "content": "Hello, who are you?"}]], greedy, use_tqdm=False)
        found = []
        for kind, chats in texts().items():
            assert len(chats) == SINGLE + AT_ONCE, f"{len(chats)} texts of {kind}"
            single = [[one] for one in chats[:SINGLE]]
            found.append({"text": kind, "requests": 1, **timed(llm, single, greedy)})
            several = [chats[SINGLE:]]
            found.append({"text": kind, "requests": AT_ONCE, **timed(llm, several, greedy)})
        return found
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


def timed(llm: Any, batches: Sequence[Any], greedy: Any) -> dict[str, Any]:
    """Tokens per second of batches one after the other, and the drafts in them."""
    before, began = draft_counts(llm), time.monotonic()
    outputs = [one for chats in batches for one in llm.chat(chats, greedy, use_tqdm=False)]
    seconds = time.monotonic() - began
    after = draft_counts(llm)
    tokens = sum(len(one.outputs[0].token_ids) for one in outputs)
    return {
        "tokens": tokens,
        "prompt_tokens": sum(len(one.prompt_token_ids) for one in outputs),
        "seconds": seconds,
        "tokens_per_s": tokens / seconds,
        **{name: after[name] - before.get(name, 0) for name in after},
        "answers": [digest(one.outputs[0].token_ids) for one in outputs],
    }


def digest(tokens: Sequence[int]) -> str:
    """Tells answers apart."""
    return hashlib.sha256(json.dumps(list(tokens)).encode()).hexdigest()[:8]


@dataclass(frozen=True)
class Gain:
    """Gain of drafts on one kind of text."""

    tokens_per_s: float
    """Tokens per second of the fastest round: other work on the host makes rounds slower only."""
    speed_up: float
    """Against the fastest round without drafts."""
    accepted: float
    """Share of drafted tokens."""
    tokens_a_step: float
    """Tokens of a request for each of its steps."""
    drafting: float
    """Share of a request's steps that have drafts."""
    chance: float
    """Chance of each draft with which these steps bring the tokens that they brought."""


def gain(runs: Sequence[dict[str, Any]], name: str, kind: str, requests: int) -> Gain:
    """Fastest round, and counts of drafts over all rounds that a drafter has behind it."""
    mine, plain = (_of(runs, each, kind, requests) for each in (name, NONE))
    drafted = sum(one.get("draft_tokens", 0) for one in mine.values())
    accepted = sum(one.get("accepted_tokens", 0) for one in mine.values())
    steps = sum(one["tokens"] for one in mine.values()) - accepted
    verified = sum(one.get("drafts", 0) for one in mine.values())
    fastest, without = (max(one["tokens_per_s"] for one in of.values()) for of in (mine, plain))
    return Gain(
        fastest,
        fastest / without,
        accepted / drafted if drafted else 0.0,
        1 + accepted / steps,
        verified / steps,
        chance(DRAFTS[name], 1 + accepted / verified) if verified else 0.0,
    )


def _of(
    runs: Sequence[dict[str, Any]], name: str, kind: str, requests: int
) -> dict[int, dict[str, Any]]:
    """Figures of a drafter's text by round."""
    return {
        run["turn"]: one
        for run in runs
        if run["drafter"] == name
        for one in run["found"]
        if (one["text"], one["requests"]) == (kind, requests)
    }


def chance(drafts: int, tokens: float) -> float:
    """Chance of each draft with which a step of so many drafts brings so many tokens."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        if tokens_of_step(drafts, middle) < tokens:
            low = middle
        else:
            high = middle
    return low


def summary(
    runs: Sequence[dict[str, Any]], model: Path, of_drafter: Mapping[str, Path | None]
) -> list[dict[str, Any]]:
    """A row for each drafter, text and number of requests."""
    rows = []
    seen = list(dict.fromkeys(run["drafter"] for run in runs))
    for kind in texts():
        for requests in (1, AT_ONCE):
            for name in seen:
                found = gain(runs, name, kind, requests)
                row = {"text": kind, "requests": requests, "drafter": name, **vars(found)}
                if name != NONE:
                    mine = of_drafter.get(name)
                    row["same_answers"] = same(runs, name, kind, requests)
                    row["plan"] = planned(model, DRAFTS[name], found, requests, mine)
                rows.append(row)
    return rows


def same(runs: Sequence[dict[str, Any]], name: str, kind: str, requests: int) -> float:
    """Share of answers that are those without drafts."""
    pairs = [
        (one, other)
        for turn, mine in _of(runs, name, kind, requests).items()
        for one, other in zip(
            mine["answers"], _of(runs, NONE, kind, requests)[turn]["answers"], strict=True
        )
    ]
    return sum(one == other for one, other in pairs) / len(pairs)


def planned(
    model: Path, drafts: int, found: Gain, requests: int, draft_model: Path | None
) -> dict[str, Any]:
    """Prediction of `ray-hetero plan` for drafts on this host."""
    speculative = f"{drafts},{found.chance:.3f},{min(found.drafting, 1):.3f}"
    command = [
        str(Path(sys.executable).with_name("ray-hetero")), "plan", str(model), "--json",
        "--speculative", speculative, "--batch", str(requests),
        "--context", str(CONTEXT), *(["--draft-model", str(draft_model)] if draft_model else []),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    said: dict[str, Any] = json.loads(done.stdout)["speculation"]
    return said


if __name__ == "__main__":
    main()

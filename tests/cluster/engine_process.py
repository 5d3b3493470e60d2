"""Run engines one after the other and write down what they answered: REQUEST.json ANSWER.json."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams


def _answers(engine: Any, batch: dict[str, Any]) -> list[dict[str, Any]]:
    given = [{"prompt_token_ids": prompt} for prompt in batch["prompts"]]
    outputs = engine.generate(given, SamplingParams(**batch["sampling"]), use_tqdm=False)
    return [
        {
            "tokens": [list(sample.token_ids) for sample in output.outputs],
            "logprobs": [
                [{token: entry.logprob for token, entry in at.items()} for at in sample.logprobs]
                for sample in output.outputs
                if sample.logprobs
            ],
        }
        for output in outputs
    ]


def _run(run: dict[str, Any]) -> list[list[dict[str, Any]]]:
    # Imported above: the frame in which vLLM is first imported is never freed, nor an engine in it.
    engine = LLM(**run["engine"])
    return [_answers(engine, batch) for batch in run["batches"]]


def main() -> None:
    request = json.loads(Path(sys.argv[1]).read_text())
    if request["ray"] is not None:
        import ray

        ray.init(**request["ray"])
    answers = []
    for run in request["runs"]:
        answers.append(_run(run))
        # What a notebook's user does before the next engine: drop the last one.
        gc.collect()
    Path(sys.argv[2]).write_text(json.dumps(answers))


if __name__ == "__main__":
    main()

"""Greedy tokens of Transformers, where stock vLLM and an engine of this project differ."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def greedy(directory: Path, prompts: Sequence[Sequence[int]], tokens: int) -> dict[str, Any]:
    """Answers to token prompts, each step computed from the whole sequence.

    Args:
        directory: a checkpoint in float32.
        prompts: token ids.
        tokens: of each answer.

    Returns:
        {"tokens", "logprobs"} with an entry for each prompt, as of an engine.

    Raises:
        ValueError: Transformers has no class of that architecture.

    """
    import torch
    import transformers

    name = json.loads((directory / "config.json").read_text())["architectures"][0]
    made_by = getattr(transformers, name, None)
    if made_by is None:
        raise ValueError(f"Transformers has no {name}")
    model = made_by.from_pretrained(directory, dtype=torch.float32).eval()
    answers, likely = [], []
    for prompt in prompts:
        ids, found = list(prompt), []
        for _ in range(tokens):
            with torch.no_grad():
                last = model(torch.tensor([ids]), use_cache=False).logits[0, -1]
            best = last.log_softmax(-1).topk(2)
            found.append({str(int(at)): float(p) for at, p in zip(best[1], best[0], strict=True)})
            ids.append(int(best[1][0]))
        answers.append(ids[len(prompt) :])
        likely.append(found)
    return {"tokens": answers, "logprobs": likely}

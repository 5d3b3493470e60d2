"""Requests by their properties: any legal combination of sampling parameters, drawn from a seed."""

from __future__ import annotations

import os
import random
from typing import Any

Json = dict[str, Any]
VOCABULARY = range(8, 600)
LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 200, 300)
"""Prompts about the sizes of blocks, of chunks and of steps that are computed in another way."""


def any_prompt(draw: random.Random) -> list[int]:
    """Token ids of a prompt; some prompts begin alike."""
    length = draw.choice(LENGTHS)
    start = [VOCABULARY[(31 * at) % len(VOCABULARY)] for at in range(length // 2)]
    head = start if draw.random() < 0.3 else []
    return head + [draw.choice(VOCABULARY) for _ in range(length - len(head))]


def any_sampling(draw: random.Random) -> Json:
    """Arguments of vLLM's SamplingParams that agree with each other."""
    found: Json = {"max_tokens": draw.choice([1, 2, 7, 24, 40]), "temperature": 0.0}
    if draw.random() < 0.5:
        found |= {"temperature": draw.choice([0.4, 0.8, 1.3]), "seed": draw.randrange(2**31)}
        found |= _some(draw, {
            "top_p": [0.3, 0.9], "top_k": [1, 5, 100], "min_p": [0.01, 0.2],
        })  # fmt: skip
    found |= _some(draw, {
        "presence_penalty": [-0.7, 0.9], "frequency_penalty": [-0.4, 0.6],
        "repetition_penalty": [0.8, 1.3], "ignore_eos": [True],
        "stop_token_ids": [[draw.choice(VOCABULARY) for _ in range(60)]],
        "logit_bias": [{draw.choice(VOCABULARY): draw.choice([-20.0, 5.0]) for _ in range(5)}],
        "allowed_token_ids": [sorted(draw.sample(VOCABULARY, 50))],
        "logprobs": [0, 3],
    })  # fmt: skip
    if draw.random() < 0.2:
        found["min_tokens"] = draw.randrange(found["max_tokens"] + 1)
    return found


def any_request(draw: random.Random) -> Json:
    """A prompt and its sampling parameters."""
    return {"prompt": any_prompt(draw), "sampling": any_sampling(draw)}


def seeds(default: int) -> range:
    """Seeds of a test: as many as RAY_HETERO_SEEDS says, or, as 17:18, these."""
    first, _, end = os.environ.get("RAY_HETERO_SEEDS", str(default)).rpartition(":")
    return range(int(first or 0), int(end))


def _some(draw: random.Random, choices: dict[str, list[Any]]) -> Json:
    """Some of these parameters, each with one of its values."""
    return {name: draw.choice(values) for name, values in choices.items() if draw.random() < 0.25}

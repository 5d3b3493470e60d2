"""A drafter that knows what a model is going to say, and says some of it wrongly."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FILE = "answers.json"
"""In the folder of the checkpoint: prompts with their answers."""
CLASS = "known_drafts.KnownDrafts"


def write_answers(model: Path, sequences: Sequence[Sequence[int]]) -> None:
    """Tell the drafters of a checkpoint's engines what is going to be said."""
    (model / FILE).write_text(json.dumps([list(one) for one in sequences]))


class KnownDrafts:
    """Drafts of none to all tokens that are asked for; of these none to all are right.

    How many depends on the place of the token only.
    """

    def __init__(self, vllm_config: Any) -> None:
        file = Path(vllm_config.model_config.model) / FILE
        self._sequences: list[list[int]] = json.loads(file.read_text())
        self._most: int = vllm_config.speculative_config.num_speculative_tokens

    def load_model(self, *_given: Any) -> None:
        """Nothing is loaded."""

    def propose(
        self, sampled_token_ids: list[list[int]], num_tokens_no_spec: Any, token_ids_cpu: Any,
        **_given: Any,
    ) -> list[list[int]]:  # fmt: skip
        """Drafts of each request; none of a prompt that is not at its end."""
        return [
            self._following(token_ids_cpu[row, : num_tokens_no_spec[row]].tolist())
            if sampled
            else []
            for row, sampled in enumerate(sampled_token_ids)
        ]

    def _following(self, tokens: list[int]) -> list[int]:
        count = len(tokens)
        known = next((one for one in self._sequences if one[:count] == tokens), tokens)
        right = 7 * count % 5
        drafts = known[count : count + 3 * count % (self._most + 1)]
        return [
            token if at < right else token ^ 1 for at, token in enumerate(drafts)
        ]  # fmt: skip

"""A drafter whose drafts are worth nothing and cost nothing, to measure what verifying them costs.

For vLLM's method `custom_class`: every request has as many draft tokens in every step as the first
token of its prompt says, so that one engine measures several numbers.  Which of them count as
accepted, vLLM's synthetic rejection sampling decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class ForcedDrafter:
    """Drafts the last token again and again."""

    def __init__(self, vllm_config: Any) -> None:
        """Need nothing of the configuration."""

    def load_model(self, target: Any) -> None:
        """There is none."""

    def propose(
        self, sampled: Sequence[Sequence[int]], lengths: Any, token_ids: Any, **more: Any
    ) -> list[list[int]]:
        """Drafts of each request; none for one whose prompt is still read.

        Args:
            sampled: new tokens of each request.
            lengths: of each request, with these.
            token_ids: [requests, most tokens], of prompts and answers.
            more: what other drafters need.

        """
        return [
            [tokens[-1]] * int(token_ids[row][0]) if tokens else []
            for row, tokens in enumerate(sampled)
        ]

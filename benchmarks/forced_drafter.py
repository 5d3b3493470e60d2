"""A drafter whose drafts are worth nothing and cost nothing, to measure what verifying them costs.

For vLLM's method `custom_class`: every request has as many draft tokens in every step as a step may
have.  Which of them count as accepted, vLLM's synthetic rejection sampling decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class ForcedDrafter:
    """Drafts the last token again and again."""

    def __init__(self, vllm_config: Any) -> None:
        self._drafts: int = vllm_config.speculative_config.num_speculative_tokens

    def load_model(self, target: Any) -> None:
        """There is none."""

    def propose(
        self, sampled: Sequence[Sequence[int]], *known: Any, **more: Any
    ) -> list[list[int]]:
        """Drafts of each request; none for one whose prompt is still read."""
        return [[tokens[-1]] * self._drafts if tokens else [] for tokens in sampled]

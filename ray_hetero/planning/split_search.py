"""What is asked of `choose_split`: the step to price, and what the KV cache must hold."""

from __future__ import annotations

from dataclasses import dataclass, replace

from placement.errors import DoesNotFitError
from placement.model.shape import ModelShape
from placement.plan.devices import Links, StageDevices
from placement.plan.split import Split, choose_split
from ray_hetero.config import HeteroConfig
from ray_hetero.planning.engine_facts import EngineFacts
from ray_hetero.planning.expert_ranks import fewest_layers

PRICED_CONTEXT = 4096
"""Tokens of each sequence in the decode step that is made short, where the model takes as many."""
PRICED_BATCH = 8
"""Sequences in that step for the objective `throughput`, where they fit; one for `latency`."""
WANTED_KV_TOKENS = 32768
"""Tokens that the KV cache has room for where they fit, in whole sequences; one sequence always."""


@dataclass(frozen=True)
class Asked:
    """A step to price and what the KV cache must hold, where somebody asks for other than usual."""

    batch: int
    """Sequences in the decode step."""
    context: int
    """Tokens of each of them."""
    max_sequences: int
    """Sequences of the longest length that must have room."""


@dataclass(frozen=True)
class SplitSearch:
    """What is asked of the planner."""

    config: HeteroConfig
    facts: EngineFacts
    shape: ModelShape
    stages: tuple[StageDevices, ...]
    asked: Asked | None = None
    links: Links | None = None
    explained: bool = True

    def best(self) -> Split:
        """The best split with room for what is wanted, else for one sequence.

        Raises:
            DoesNotFitError: not even one sequence fits.

        """
        if self.asked is not None:
            return self._choose(self.asked.batch, self.asked.max_sequences)
        many = self.config.objective == "throughput"
        batch = min(PRICED_BATCH, self.facts.max_num_seqs) if many else 1
        try:
            return replace(self, explained=False)._choose(batch, self._wanted_sequences)
        except DoesNotFitError:
            return self._choose(1, 1)

    @property
    def _wanted_sequences(self) -> int:
        """Sequences of the longest length that the KV cache has room for where they fit."""
        facts = self.facts
        return max(1, min(facts.max_num_seqs, WANTED_KV_TOKENS // facts.max_model_len))

    def with_fewest_remote_experts(self, layers: tuple[int, ...]) -> SplitSearch | None:
        """The search with the experts of as few layers as possible on expert ranks.

        They are as few as leave room for what is wanted, else for one sequence; none where the
        model fits as it is.

        Args:
            layers: of each stage.

        Returns:
            None where the rest of the model does not fit either.

        """

        def with_experts_of(count: int) -> SplitSearch:
            return replace(self, shape=self.shape.with_remote_experts(count), explained=False)

        def fits(count: int, sequences: int) -> bool:
            try:
                with_experts_of(count)._choose(1, sequences, layers)
            except DoesNotFitError:
                return False
            return True

        wanted = self._wanted_sequences if self.asked is None else self.asked.max_sequences
        for sequences in (wanted, 1):
            count = fewest_layers(len(self.shape.layers), lambda n, s=sequences: fits(n, s))  # type: ignore[misc]
            if count is not None:
                return replace(with_experts_of(count), explained=self.explained)
        return None

    def priced(self, layers: tuple[int, ...]) -> Split:
        """The split with these layers."""
        asked = self.asked or Asked(1, PRICED_CONTEXT, 1)
        return self._choose(asked.batch, asked.max_sequences, layers)

    def _choose(self, batch: int, sequences: int, layers: tuple[int, ...] | None = None) -> Split:
        context = PRICED_CONTEXT if self.asked is None else self.asked.context
        return choose_split(
            self.shape,
            self.stages,
            batch=batch,
            context=min(context, self.facts.max_model_len),
            max_sequences=sequences,
            objective=self.config.objective,
            layers=layers,
            # A user who wrote the layout wants its order.
            order="auto" if self.config.layout == "auto" else "fixed",
            max_model_len=self.facts.max_model_len,
            max_batched_tokens=self.facts.max_num_batched_tokens,
            max_num_seqs=self.facts.max_num_seqs,
            links=self.links,
            explained=self.explained,
            drafter=self.facts.drafter,
        )

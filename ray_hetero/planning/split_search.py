"""Arguments of `choose_split`: the step to price, and the tokens that the KV cache must hold.

Both follow from the configuration's `workload` and from the engine's limits, so that a command and
an engine with the same settings plan alike.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from placement.errors import DoesNotFitError
from placement.model.shape import ModelShape
from placement.plan.devices import StageDevices
from placement.plan.split import Order, Split, SplitOptions, choose_split
from placement.plan.workload import Workload
from ray_hetero.config import HeteroConfig
from ray_hetero.errors import ConfigError
from ray_hetero.planning.engine_facts import EngineFacts
from ray_hetero.planning.expert_ranks import fewest_layers
from ray_hetero.planning.plan_request import PlanRequest

PRICED_CONTEXT = 4096
"""Tokens of each sequence in the decode step that is made short, where the model takes as many."""
PRICED_BATCH = 8
"""Sequences in that step for the objective `throughput`, where they fit; one for `latency`."""
WANTED_KV_TOKENS = 32768
"""Tokens that the KV cache has room for where they fit and nobody says how many, in whole
sequences; one sequence always."""


@dataclass(frozen=True)
class Asked:
    """A decode step to price, and what the KV cache must hold."""

    batch: int
    """Sequences in the decode step."""
    context: int
    """Tokens of each of them."""
    sequences: int
    """Sequences of the longest length that must have room; those of the step have it too."""


def asked_in_turn(config: HeteroConfig, facts: EngineFacts) -> tuple[Asked, ...]:
    """Demands of a configuration on an engine, then those that suffice where they do not fit.

    Args:
        config: its `workload` and `objective`.
        facts: of the world; the limits of sequences and tokens count.

    Returns:
        The first is to be taken if it fits; where numbers are given there is no other.

    Raises:
        ConfigError: more users than a step has sequences.

    """
    workload, longest = config.workload, facts.max_model_len
    context = min(PRICED_CONTEXT if workload.context == "auto" else workload.context, longest)
    if (workload.users, workload.context, workload.sequences) == ("auto",) * 3:
        many = min(PRICED_BATCH, facts.max_num_seqs) if config.objective == "throughput" else 1
        wanted = max(1, min(facts.max_num_seqs, WANTED_KV_TOKENS // longest))
        return tuple(dict.fromkeys((Asked(many, context, wanted), Asked(1, context, 1))))
    users = 1 if workload.users == "auto" else workload.users
    if users > facts.max_num_seqs:
        raise ConfigError(
            f"workload.users: {users} sequences are to be decoded together, but a step has at most "
            f"{facts.max_num_seqs}. Give --max-num-seqs {users}, or fewer users."
        )
    return (Asked(users, context, 1 if workload.sequences == "auto" else workload.sequences),)


@dataclass(frozen=True)
class SplitSearch:
    """Search for an engine's split, with a smaller KV cache where the wanted one does not fit."""

    request: PlanRequest
    shape: ModelShape
    """Model as the stages hold it."""
    stages: tuple[StageDevices, ...]

    def best(self) -> Split:
        """The best split with room for what is wanted, else for one sequence.

        Raises:
            DoesNotFitError: not even one sequence fits, or not what was asked for.

        """
        return self._first_that_fits()

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
            return replace(self, shape=self.shape.with_remote_experts(count))

        def fits(count: int, asked: Asked) -> bool:
            try:
                with_experts_of(count)._choose(asked, layers, explained=False)
            except DoesNotFitError:
                return False
            return True

        for asked in asked_in_turn(self.request.config, self.request.facts):
            count = fewest_layers(len(self.shape.layers), lambda n, a=asked: fits(n, a))  # type: ignore[misc]
            if count is not None:
                return with_experts_of(count)
        return None

    def priced(self, layers: tuple[int, ...]) -> Split:
        """The split with these layers.

        Raises:
            DoesNotFitError: not even one sequence fits, or not what was asked for.

        """
        return self._first_that_fits(layers)

    def _first_that_fits(self, layers: tuple[int, ...] | None = None) -> Split:
        *others, last = asked_in_turn(self.request.config, self.request.facts)
        for asked in others:
            try:
                return self._choose(asked, layers, explained=False)
            except DoesNotFitError:
                continue
        return self._choose(last, layers, explained=self.request.explained)

    def _choose(self, asked: Asked, layers: tuple[int, ...] | None, *, explained: bool) -> Split:
        config, facts = self.request.config, self.request.facts
        work = Workload(
            asked.batch,
            asked.context,
            asked.sequences,
            facts.max_model_len,
            facts.max_num_batched_tokens,
            max_num_seqs=facts.max_num_seqs,
        )
        # A user who wrote the layout wants its order.
        order: Order = "auto" if config.layout == "auto" else "fixed"
        return choose_split(
            self.shape,
            self.stages,
            work,
            SplitOptions(config.objective, order, layers),
            links=self.request.machine.links,
            explained=explained,
            drafter=facts.drafter,
        )

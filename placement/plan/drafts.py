"""Speculative decoding as the planner sees it: what drafts, what a step costs, what it brings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

from placement.host.row_costs import RowCosts
from placement.model.reading import UnknownModelError, shape_of
from placement.model.shape import ModelShape
from placement.model.tensors import Layer, Tensor
from placement.plan import cost
from placement.plan.devices import Links, StageDevices
from placement.plan.memory import Memory, around_weights, kv_bytes, layer_weights
from placement.plan.passes import decode_pass
from placement.plan.step_time import Step, total_step
from placement.plan.workload import Workload, asked_sequences, asked_tokens
from placement.words import duration

MOST_DRAFTS = 8
"""Drafts of a request in a step up to which the best number is looked for."""


DRAFT_LIKE_THE_FIRST = frozenset({"ernie4_5_moe", "exaone_moe"})
"""Types of mixtures whose layers that draft are dense, like the first one; others' are like the
last one."""


class Source(Enum):
    """Where drafts come from, which tells the memory and the time that they take."""

    TOKENS = "the tokens so far"
    """A drafter that holds nothing and takes next to no time, or of which nobody knows it."""
    MODEL = "a model"
    """A drafter with a checkpoint of its own, embedding and output matrix included."""
    HEAD = "a head"
    """A drafter with a checkpoint of its own, but the target's embedding and output matrix."""
    TARGET = "the target"
    """A drafter of layers in the target's own checkpoint, behind those that count."""

    @property
    def has_own_vocabulary(self) -> bool:
        """Whether it has an embedding and an output matrix of its own."""
        return self in (Source.TOKENS, Source.MODEL)


@dataclass(frozen=True)
class Drafter:
    """A drafter, which guesses a request's next tokens: whole, on all ranks of the last stage."""

    drafts: int
    """Tokens that it guesses for a request in a step."""
    shape: ModelShape | None = None
    """Sizes of its model; None for n-grams, which hold and cost next to nothing."""
    has_own_vocabulary: bool = True
    """Whether it has an embedding and an output matrix of its own, as draft models do.  EAGLE and
    MTP heads use those of the model that they draft for."""

    @classmethod
    def of(cls, source: Source, drafts: int, model: object, target: ModelShape | None) -> Drafter:
        """The drafter of a source, with sizes as far as they are known.

        Args:
            source: where drafts come from.
            drafts: of a request in a step.
            model: its checkpoint or config, as `shape_of` takes it; None where it has none.
            target: the model that it drafts for.

        """
        has_model = model is not None or not source.has_own_vocabulary
        if target is None or source is Source.TOKENS or not has_model:
            return cls(drafts)
        shape = _shape(source, model, target)
        return cls(drafts, shape, has_own_vocabulary=source.has_own_vocabulary)

    def weights(self, size: int, *, is_first: bool) -> int:
        """Weight bytes of a rank.

        Args:
            size: of the last stage.
            is_first: whether that is the first one too, which has the model's embedding.

        """
        if self.shape is None:
            return 0
        layers = sum(layer_weights(layer, size) for layer in self.shape.layers)
        if self.has_own_vocabulary:
            return layers + around_weights(self.shape, size, first=True, last=True)
        # An output matrix of its own is one for fewer tokens.
        held = self.shape.output_head + (() if is_first else self.shape.embedding)
        return layers + sum(tensor.rank_bytes(size) for tensor in held)

    def kv_bytes(self, size: int, work: Workload) -> int:
        """KV bytes of a rank, for the sequences that must have room."""
        if self.shape is None:
            return 0
        tokens, sequences = asked_tokens(work), asked_sequences(work)
        return sum(
            kv_bytes(layer, size, tokens, sequences, work.max_batched_tokens, self.drafts)
            for layer in self.shape.layers
        )

    def added(self, memory: Memory, size: int, work: Workload, *, is_first: bool) -> Memory:
        """Memory of a rank of the last stage with the drafter."""
        return replace(
            memory,
            weights=memory.weights + self.weights(size, is_first=is_first),
            kv=memory.kv + self.kv_bytes(size, work),
        )

    def step(self, target: ModelShape, stage: StageDevices, work: Workload, links: Links) -> Step:
        """Time of drafting for a step: one small step after the other."""
        if self.shape is None:
            return Step()
        run = decode_pass(work.batch, work.context)
        layers = (cost.layer_step(self.shape, one, stage, run, links) for one in self.shape.layers)
        vocabulary = self.shape if self.has_own_vocabulary else target
        once = total_step((*layers, cost.output_step(vocabulary, stage, run)))
        return Step(draft=self.drafts * once.total)


def _combining(layer: Layer, target: ModelShape) -> Layer:
    """A layer that drafts: it combines an embedding with the target's hidden states before."""
    hidden, width = target.hidden_size, target.dtype_bytes
    norms = Tensor("norms", hidden, width, count=3, role="norm", shards=1, values=0)
    matrix = Tensor("eh_proj", 2 * hidden * hidden, width, shards=1)
    return replace(layer, tensors=(*layer.tensors, norms, matrix))


def _shape(source: Source, model: object, target: ModelShape) -> ModelShape | None:
    like_target = replace(target, layers=target.layers[-1:], output_head=())
    if source is Source.TARGET:
        like = target.layers[0 if target.model_type in DRAFT_LIKE_THE_FIRST else -1]
        return replace(like_target, layers=(_combining(like, target),))
    try:
        shape = shape_of(model if isinstance(model, Mapping) else Path(str(model)))
    except UnknownModelError:
        return like_target if source is Source.HEAD else None
    if source is Source.MODEL or not shape.layers:
        return shape
    # What combines the target's hidden states, and EAGLE-3's only layer, have names of their own.
    first = replace(shape.layers[0], tensors=(*shape.layers[0].tensors, *shape.extra))
    is_exact = shape.source == "safetensors"
    return replace(
        shape,
        layers=(first, *shape.layers[1:]),
        embedding=(shape.embedding if is_exact else ()) or target.embedding,
        output_head=shape.output_head if is_exact else (),
        extra=(),
    )


def tokens_of_step(drafts: int, acceptance: float) -> float:
    """Tokens that a step brings a request on the average, each draft being accepted by chance.

    Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2023, equation 1.

    Args:
        drafts: of the request in the step.
        acceptance: chance of a draft, from 0 to 1, where those before it were accepted.

    """
    return sum(acceptance**place for place in range(drafts + 1))


@dataclass(frozen=True)
class Acceptance:
    """How often a drafter drafts, and how often it is right."""

    chance: float
    """Chance of a draft, from 0 to 1, where those before it were accepted."""
    share: float = 1.0
    """Share of a request's steps that have drafts, from 0 to 1: n-grams and suffixes draft only
    where the text repeats itself, draft models in every step."""

    def mean(self, plain: float, drafted: float) -> float:
        """The mean over steps of a figure of those without drafts and of those with them."""
        return (1 - self.share) * plain + self.share * drafted

    def __str__(self) -> str:
        """Part of a sentence, for people."""
        steps = "" if self.share == 1 else f" in {self.share:.0%} of its steps"
        return f"{steps}, each accepted with {self.chance:g}"


@dataclass(frozen=True)
class Drafting:
    """A number of drafts, and what comes of it."""

    drafts: int
    step_s: float
    """Seconds of a step, the mean over those with and without drafts."""
    tokens: float
    """Tokens that a request gets from a step on the average."""

    @property
    def token_s(self) -> float:
        """Seconds for a token of each request."""
        return self.step_s / self.tokens


@dataclass(frozen=True)
class SocketRows:
    """Costs of steps of several rows on a socket."""

    node: str
    name: str
    """Name of the processor."""
    costs: RowCosts | None
    """Cost of steps of several rows; None where it is predicted."""

    def __str__(self) -> str:
        """Sentence about the costs, for people."""
        if self.costs is None:
            return f"steps of several rows on {self.name} of {self.node}: predicted, not measured"
        source = "measured" if self.costs.is_measured else "as described"
        return f"steps of several rows on {self.name} of {self.node}, {source}: {self.costs}"


@dataclass(frozen=True)
class Speculation:
    """Gain of speculative decoding on a plan's ranks."""

    acceptance: Acceptance
    asked: Drafting
    plain: Drafting
    """Decoding without drafts."""
    best: Drafting
    """The number of drafts with the shortest time for a token."""
    rows: tuple[SocketRows, ...] = ()
    """Sockets' costs of several rows that these prices rest on, where sockets compute a step."""

    def lines(self) -> Iterator[str]:
        """Lines that describe it."""
        asked, best = self.asked, self.best
        yield (
            f"speculative decoding: {asked.drafts} drafts a request{self.acceptance}: "
            f"{asked.tokens:.2f} tokens a step of {duration(asked.step_s)} "
            f"are {self.speed(asked):.2f} times as fast as without "
            f"({duration(self.plain.step_s)} a token)"
        )
        if best.drafts == 0:
            yield "best here at this acceptance: no drafts"
        elif best.drafts == asked.drafts:
            yield f"best here at this acceptance: {best.drafts} drafts, as asked"
        else:
            yield (
                f"best here at this acceptance: {best.drafts} drafts, {self.speed(best):.2f} times "
                "as fast"
            )
        yield from map(str, self.rows)

    def speed(self, drafting: Drafting) -> float:
        """How many times as fast as without drafts."""
        return self.plain.token_s / drafting.token_s

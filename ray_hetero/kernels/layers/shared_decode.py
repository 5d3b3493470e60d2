"""Decode steps whose layers the cores share with the GPU that computes prompts.

A decode step reads all weights of a stage from the socket's memory, and from some number of tokens
on the cores multiply for longer than they read.  Meanwhile the link to the GPU is idle.  Here the
GPU computes for some of the layers what lies behind the attention: the output projection and the
MLP, eight ninths of the weights of an 8B model's layer.  These weights cross the link, and
are expanded, while the cores compute the layers before.  The attention of every layer stays on the
cores, where keys and values are, so that a layer costs the same on the link however long the
requests are.

How many layers are given away depends on the host and on the number of tokens, so that it is
measured at the start: whole steps of some layers, with the cores alone and with more and more of
the layers on the GPU.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch

from ray_hetero.kernels.layers.decode_step import (
    CacheAddress,
    NativeLayers,
    StepRequests,
    address_of,
)
from ray_hetero.kernels.layers.kv_layouts import ROWS, TILES
from ray_hetero.kernels.layers.post_attention import PostAttentionBlock
from ray_hetero.kernels.linear.rank_sums import meeting
from ray_hetero.kernels.linear.streaming_linear import StreamingLinear
from ray_hetero.kernels.prompts.behind_attention import BehindAttention
from ray_hetero.log import logger

if TYPE_CHECKING:
    from ray_hetero.kernels.layers.decoder_layers import Layer

MEASURED_LAYERS = 8
"""Number of the first layers of a run that are measured.  Of an 8B model they have many times the
bytes of a third-level cache."""
MEASURED_TOKENS = (1, 8, 32, 64, 128)
"""Tokens of steps that are measured; a step of another number takes the share of the next smaller
one."""
LATE_LAYERS = 2
"""Most layers that are measured as the last ones: those that the GPU has room for."""
ROUNDS = 3
"""Rounds of a measured step, of which the fastest counts but the first: in that one the GPU may
build its kernels, and other weights have come ahead."""
WORSE = 1.03
"""Factor on the best time up to then, beyond which no more layers are tried."""
GAIN = 0.96
"""Share of the time of the cores alone above which nothing is given away."""
CONFIRMATIONS = 3
"""Times that a choice is measured again beside the cores alone, in turns: another program that used
the cores for a moment has made one of the two slow, and would decide for as long as the engine
runs."""
BLOCK = 32
"""Tokens of a KV block of measured steps."""


@dataclass(frozen=True)
class Share:
    """What is given away in steps of some number of tokens."""

    tokens: int
    """Least tokens of a step that takes this share."""
    of_layers: float = 0.0
    """Share of all layers, which are evenly among them."""
    last: int = 0
    """Number of the last layers that are given away instead.

    The GPU has room for the weights of about two layers, which come while other stages compute.
    The last layers take these, and nothing crosses the link while the cores read theirs.
    """


@dataclass(frozen=True)
class Shares:
    """Share of the layers that is given away, by tokens of a step."""

    measured: tuple[Share, ...]
    """Shares that were measured, by tokens, ascending."""

    def of(self, tokens: int) -> Share:
        """The share for a step of so many tokens."""
        known = [one for one in self.measured if one.tokens <= tokens]
        return known[-1] if known else Share(0)

    @property
    def is_empty(self) -> bool:
        """Whether no step gives anything away."""
        return not any(one.of_layers or one.last for one in self.measured)


@dataclass(frozen=True, eq=False)
class Segment:
    """Layers that the cores compute in one call."""

    layers: NativeLayers
    begin: int
    end: int
    is_given: bool
    """Whether the GPU computes what lies behind the last one's attention."""


class SharedDecode:
    """Computes decode steps of layers that follow one another, some of them partly on a GPU.

    Args:
        layers: at least one, each with known scores and an MLP.
        kernel: what computes linear layers on the cores.
        behind: what computes what lies behind the attention of some of them.
        shares: of layers that are given away, by tokens.

    """

    def __init__(
        self, layers: Sequence[Layer], kernel: StreamingLinear, behind: BehindAttention,
        shares: Shares,
    ) -> None:  # fmt: skip
        self._layers = layers
        self._kernel = kernel
        self._behind = behind
        self.shares = shares
        self._divisions: dict[tuple[int, bool], list[Segment]] = {}

    def count(self, tokens: int) -> int:
        """Layers of a step of so many tokens whose rest the GPU computes."""
        if tokens > self._behind.tokens:
            return 0
        share, layers = self.shares.of(tokens), len(self._layers)
        return min(share.last, layers) or round(share.of_layers * layers)

    def __call__(
        self, requests: Sequence[Any], caches: Sequence[CacheAddress], hidden: torch.Tensor,
        residual: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Compute a decode step.

        Args:
            requests: as of `NativeLayers.run`.
            caches: of each layer.
            hidden: [M, N], bf16, contiguous; as many tokens as give some layers away.
            residual: [M, N], bf16, contiguous; None at the beginning of a model.

        Returns:
            [M, N], which is still to be added to the residual, and it.

        Raises:
            torch.OutOfMemoryError: the GPU's memory has run out; in a group on all ranks.
            RuntimeError: what else CUDA says.
            TimeoutError: ordering the GPU's work takes too long.
            torch.distributed.DistError: another rank of the group has ended, or is late.

        """
        tokens = len(hidden)
        is_late = self.shares.of(tokens).last > 0
        segments = self.divided(self.count(tokens), is_late=is_late)
        return self.run(segments, requests, caches, hidden, residual)

    def run(
        self, segments: Sequence[Segment], requests: Sequence[Any], caches: Sequence[CacheAddress],
        hidden: torch.Tensor, residual: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Compute a step as a call does, with the calls of the cores given."""
        tokens = len(hidden)
        given = [segment.end - 1 for segment in segments if segment.is_given]
        # Weights that the step needs first have come since the step before, as a rule.
        following = itertools.cycle(given)
        if given:
            self._behind.order(next(following))
        for segment in segments:
            if segment.is_given:
                y, total = self._behind.memory(tokens)
            else:
                y, total = torch.empty_like(hidden), torch.empty_like(hidden)
            own = caches[segment.begin : segment.end]
            with meeting(self._kernel.sums):
                segment.layers.run(requests, own, hidden, residual, y, total)
            if not segment.is_given:
                return y, total
            hidden, residual = self._behind.compute(segment.end - 1, y, total, next(following))
        assert residual is not None
        return hidden.clone(), residual.clone()

    def divided(self, count: int, *, is_late: bool = False) -> list[Segment]:
        """Calls of a step in which so many layers are given away.

        Args:
            count: of layers, of which the last one is always one.
            is_late: whether they are the last ones, else evenly among all.

        """
        total = len(self._layers)
        if (count, is_late) not in self._divisions:
            ends = (
                list(range(total - count + 1, total + 1))
                if is_late
                else [(number + 1) * total // count for number in range(count)]
            )
            # Without any the cores compute all.
            begins, ends = [0, *ends[:-1]], ends or [total]
            self._divisions[count, is_late] = [
                self._segment(begin, end, is_given=count > 0)
                for begin, end in zip(begins, ends, strict=True)
            ]
        return self._divisions[count, is_late]

    def _segment(self, begin: int, end: int, *, is_given: bool) -> Segment:
        some = self._layers[begin:end]
        following = [*(layer.input for layer in some[1:]), None]
        blocks = [
            (layer.attention, PostAttentionBlock(replace(layer.parts, next=next_one), self._kernel))
            for layer, next_one in zip(some, following, strict=True)
        ]
        layers = NativeLayers(self._kernel, some[0].input, blocks, ends_attended=is_given)
        return Segment(layers, begin, end, is_given)


def suits(layers: Sequence[Layer]) -> bool:
    """Whether decode steps of layers that follow one another can be shared with a GPU."""
    return all(
        layer.attention.scores is not None and layer.parts.down is not None and layer.mlp is None
        for layer in layers
    )


def shares_of(
    wanted: float | Literal["auto"], layers: Sequence[Layer], kernel: StreamingLinear,
    behind: BehindAttention, agreed: Callable[[float], float] = float,
) -> Shares:  # fmt: skip
    """The shares that `CpuConfig.decode_gpu_share` asks for; arguments as of `measured`."""
    if wanted == "auto":
        return measured(layers, kernel, behind, agreed)
    return Shares((Share(1, wanted),))


def measured(
    layers: Sequence[Layer], kernel: StreamingLinear, behind: BehindAttention,
    agreed: Callable[[float], float] = float,
) -> Shares:  # fmt: skip
    """The shares with which steps of these layers take the least time on this host.

    Args:
        layers: those that `suits`; in a group this rank's parts of them.
        kernel: what computes them on the cores.
        behind: what computes what lies behind their attention.
        agreed: makes of this rank's seconds those that all ranks of its group choose by.

    """
    some = layers[:MEASURED_LAYERS]
    measure = step_seconds(some, kernel, behind)
    most = min(kernel.step_tokens, behind.tokens)
    asked = [tokens for tokens in MEASURED_TOKENS if tokens <= most]
    return best_shares(lambda *step: agreed(measure(*step)), len(some), asked)


Seconds = Callable[[int, int, bool], float]
"""Function that gives the seconds of a step by its tokens, the number of layers that it gives away,
and whether these are the last ones."""


def step_seconds(
    layers: Sequence[Layer], kernel: StreamingLinear, behind: BehindAttention
) -> Seconds:
    """What measures a step of these layers, each request of one token; arguments as of `measured`.

    Before each step the link has had the time that it needs to come ahead, as while other stages
    compute.
    """
    step = SharedDecode(layers, kernel, behind, Shares(()))
    shape = layers[0].attention.shape
    most = min(kernel.step_tokens, behind.tokens)
    cache = torch.zeros(most, shape.kv_heads, BLOCK, 2 * shape.size, dtype=torch.bfloat16)

    def seconds(tokens: int, count: int, is_late: bool) -> float:
        own = torch.arange(tokens)
        lengths = torch.ones(tokens, dtype=torch.int32)
        of_step = StepRequests(torch.zeros_like(own), own * BLOCK, lengths, own.int().unsqueeze(1))
        isa = TILES if kernel.level.name == "amx" else ROWS
        requests = [of_step.native(kernel.native, cache, isa)]
        caches = [address_of(cache)] * len(layers)
        hidden = torch.randn(tokens, layers[0].parts.output.weight.shape[0]).bfloat16()
        segments = step.divided(count, is_late=is_late)
        taken = []
        for _ in range(ROUNDS):
            behind.wait_for_link()
            began = time.perf_counter()
            step.run(segments, requests, caches, hidden, None)
            taken.append(time.perf_counter() - began)
        return min(taken[1:])

    return seconds


def best_shares(seconds: Seconds, layers: int, asked: Sequence[int]) -> Shares:
    """Choose shares by the time of steps, and say so.

    Args:
        seconds: measures a step.
        layers: of the step.
        asked: tokens of steps, ascending.  The more tokens, the more layers are given away.

    """
    found: list[Share] = []
    said = []
    least = 1
    for tokens in asked:
        alone = best = seconds(tokens, 0, False)
        chosen, is_late = 0, False
        for count in range(1, min(LATE_LAYERS, layers) + 1):
            taken = seconds(tokens, count, True)
            if taken < best:
                best, chosen, is_late = taken, count, True
        of_these = float("inf")
        for count in range(least, layers + 1):
            taken = seconds(tokens, count, False)
            if taken < best:
                best, chosen, is_late = taken, count, False
            if taken > WORSE * of_these:
                break
            of_these = min(of_these, taken)
        if best <= GAIN * alone:
            for _ in range(CONFIRMATIONS):
                alone = min(alone, seconds(tokens, 0, False))
                best = min(best, seconds(tokens, chosen, is_late))
        if best > GAIN * alone:
            best, chosen, is_late = alone, 0, False
        if not is_late:
            least = max(least, chosen)
        found.append(Share(tokens, last=chosen) if is_late else Share(tokens, chosen / layers))
        said.append(
            f"{tokens}: {chosen}{' (the last)' if is_late else ''}, "
            f"{1e3 * alone:.1f} to {1e3 * best:.1f} ms"
        )
    logger.info(
        "decode steps of %d layers take least time if the GPU computes the output and MLP matrices "
        "of this many of them, by number of tokens: %s (cpu.decode_gpu_share)",
        layers,
        "; ".join(said),
    )
    return Shares(tuple(found))

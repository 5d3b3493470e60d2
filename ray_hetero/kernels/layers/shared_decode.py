"""Decode steps whose layers the cores share with the GPU that computes prompts.

A decode step reads all weights of a stage from the socket's memory, and from some number of tokens
on the cores multiply for longer than they read.  Meanwhile the link to the GPU is idle.  Here the
GPU computes for some of the layers what lies behind the attention: the output projection and the
MLP, eight ninths of the weights of an 8B model's layer.  These weights cross the link, and
are expanded, while the cores compute the layers before.  The attention of every layer stays on the
cores, where keys and values are, so that a layer costs the same on the link however long the
requests are.

Or the GPU computes some columns of every layer's gate and up, while the cores compute the others
(columns_on_gpu.py): then neither waits for whole layers of the other.

What is given away, and how much of it, depends on the host and on the number of tokens, so that it
is measured at the start: whole steps of some layers, with the cores alone and with more and more on
the GPU.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch

from ray_hetero.kernels.layers import layer_tokens
from ray_hetero.kernels.layers.columns import Columns, MakeColumns, no_columns
from ray_hetero.kernels.layers.decode_shares import (
    DisturbedError,
    Seconds,
    Share,
    Shares,
    Way,
    best_shares,
    had_cores,
    kept_blocks,
    most_parts,
    undisturbed,
)
from ray_hetero.kernels.layers.decode_step import NativeLayers, StepRequests, address_of
from ray_hetero.kernels.layers.kept_shares import Agree, KeptShares, key_of
from ray_hetero.kernels.layers.kv_layouts import ROWS, TILES
from ray_hetero.kernels.layers.layer_parts import CacheAddress, KeptBlocks
from ray_hetero.kernels.layers.post_attention import PostAttentionBlock
from ray_hetero.kernels.layers.steady_share import SteadyShare
from ray_hetero.kernels.linear.rank_sums import meeting
from ray_hetero.kernels.linear.streaming_linear import StreamingLinear
from ray_hetero.kernels.prompts.behind_attention import BehindAttention
from ray_hetero.log import logger

if TYPE_CHECKING:
    from ray_hetero.kernels.layers.layer import Layer

MEASURED_LAYERS = 16
"""Number of the first layers of a run that are measured.  Of 8, steps take a fifth less time a
layer than of 16, as more of it comes over the link before a step."""
MEASURED_TOKENS = (1, 8, 32, 64, 128)
"""Tokens of steps that are measured; those of another number take the share of the nearest one."""
UNCOUNTED = 2
"""Number of the first rounds of a measured step that do not count: the GPU may build its kernels,
other ranks of a group may wait for the first, which prepares, and more weights have come ahead
than come between two steps."""
ROUNDS = 4
"""Rounds of a measured step, with those that do not count."""
SHORT_ROUNDS = 5
"""The same of steps of up to `SHORT_TOKENS`, of which a few milliseconds decide."""
SHORT_TOKENS = 32
BETWEEN_STEPS_S = 0.005
"""Pause between measured steps, in seconds, as another stage takes for its layers.  With time for
the link to fill its memory, 16 layers in 8 bits took 14.6 ms in a start, and 18 in its engine."""
BLOCK = 32
"""Tokens of a KV block of measured steps."""


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
        shares: of what is given away, by tokens.
        columns: computes columns of their MLPs, where that is possible.

    """

    def __init__(
        self, layers: Sequence[Layer], kernel: StreamingLinear, behind: BehindAttention,
        shares: Shares, columns: Columns | None = None,
    ) -> None:  # fmt: skip
        self._layers = layers
        self._kernel = kernel
        self._behind = behind
        self._columns = columns
        self.shares = shares
        self._steady = SteadyShare()
        self._divisions: dict[tuple[int, bool], list[Segment]] = {}

    def count(self, tokens: int) -> int:
        """Layers of a step of so many tokens whose rest the GPU computes."""
        if tokens > self._behind.tokens:
            return 0
        return given_away(self.shares.of(tokens), len(self._layers))

    def has(self, tokens: int) -> bool:
        """Whether the GPU computes something of a step of so many tokens."""
        return self.count(tokens) > 0 or (
            self._columns is not None
            and tokens <= self._behind.tokens
            and self.shares.of(tokens).columns > 0
        )

    def __call__(
        self, requests: Sequence[Any], caches: Sequence[CacheAddress], hidden: torch.Tensor,
        residual: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Compute a decode step.

        Args:
            requests: as of `NativeLayers.run`.
            caches: of each layer.
            hidden: [M, N], bf16, contiguous; as many tokens as a step `has` a share of.
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
        share = self._steady.take(self.shares.of(tokens))
        takes_part = self._fetch(tokens, share)
        if self._columns is not None and share.columns:
            takes_part = self._columns.agreed(takes_part=takes_part)
        if takes_part:
            return self.run_columns(share.columns, requests, caches, hidden, residual)
        segments = self.divided(self.count(tokens), is_late=share.last > 0)
        return self.run(segments, requests, caches, hidden, residual)

    def run_columns(
        self, parts: int, requests: Sequence[Any], caches: Sequence[CacheAddress],
        hidden: torch.Tensor, residual: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Compute a step as a call does, with so many parts of all columns on the GPU."""
        assert self._columns is not None
        (whole,) = self.divided(0)
        kept = self._kept(self._columns, parts)
        y, total = torch.empty_like(hidden), torch.empty_like(hidden)
        share = self._columns.native
        waited_s = share.waited_s
        with meeting(self._kernel.sums), self._columns.of_step(len(hidden), kept):
            whole.layers.run(
                requests, caches, hidden, residual, y, total, share=share, kept=kept
            )  # fmt: skip
        layer_tokens.count_columns_wait(share.waited_s - waited_s)
        return y, total

    def fetch(self, tokens: int) -> bool:
        """Have what the GPU needs of the next step come; whether the cores alone take longer."""
        share = self._steady.following(self.shares.of(tokens))
        return self._fetch(tokens, share, is_ahead=True)

    def interrupt(self) -> None:
        """Learn that a prompt has taken the place of weights: the next step may use others."""
        self._steady.interrupt()

    def _fetch(self, tokens: int, share: Share, *, is_ahead: bool = False) -> bool:
        if self._columns is None or not share.columns or tokens > self._behind.tokens:
            return False
        kept = self._kept(self._columns, share.columns)
        left_s = self._columns.fetch(tokens, kept, is_ahead=is_ahead)
        return left_s <= share.gain_s * len(self._layers)

    def prepare_columns(self, tokens: int, parts: int) -> None:
        """Have steps of `run_columns` take as long as those that come after many, behind one."""
        assert self._columns is not None
        self._columns.prepare(tokens, self._kept(self._columns, parts))

    @staticmethod
    def _kept(columns: Columns, parts: int) -> KeptBlocks:
        return kept_blocks(columns.blocks, columns.output_blocks, parts)

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
    behind: BehindAttention, agreed: Callable[[float], float] = float, *, place: str = "",
    agree: Agree = lambda found: found, columns_of: MakeColumns = no_columns,
) -> Shares:  # fmt: skip
    """The shares that `CpuConfig.decode_gpu_share` asks for.

    Those that take the least time on this host are measured, or were in an earlier start.

    Args:
        wanted: the setting.
        layers: those that `suits`; in a group this rank's parts of them.
        kernel: what computes them on the cores.
        behind: what computes what lies behind their attention.
        agreed: makes of this rank's seconds those that all ranks of its group choose by.
        place: of this rank, see `RankSpec.place`; empty where nothing is kept.
        agree: gives all ranks of the group what its first rank has kept.
        columns_of: makes what computes columns of the layers' MLPs.

    """
    if wanted != "auto":
        return Shares((Share(1, wanted),))
    some = layers[:MEASURED_LAYERS]
    columns = columns_of(len(some))
    measure = step_seconds(some, kernel, behind, columns)
    most = min(kernel.step_tokens, behind.tokens)
    asked = [tokens for tokens in MEASURED_TOKENS if tokens <= most]
    kept = KeptShares(key_of(some, kernel, behind, place), agree)
    if (known := kept.known(asked)) is not None:
        for one in known.measured:
            # No request waits until a kernel is built or loaded.
            if count := given_away(one, len(some)):
                measure(one.tokens, count, "last" if one.last else "evenly")
            elif one.columns:
                measure(one.tokens, one.columns, "columns")
        return known
    try:
        found = best_shares(
            undisturbed(lambda *step: agreed(measure(*step))), len(some), asked,
            0 if columns is None else most_parts(columns.output_blocks),
        )  # fmt: skip
    except DisturbedError:
        logger.warning(
            "other programs compute on this rank's cores, so that it was not measured what the GPU "
            "could compute of decode steps: the cores compute all of them. Start the engine again "
            "when these cores are free, or set cpu.decode_gpu_share."
        )
        return Shares(())
    kept.keep(found)
    return found


def given_away(share: Share, layers: int) -> int:
    """So many of these layers are given away."""
    return min(share.last, layers) or round(share.of_layers * layers)


def step_seconds(
    layers: Sequence[Layer], kernel: StreamingLinear, behind: BehindAttention,
    columns: Columns | None = None,
) -> Seconds:  # fmt: skip
    """What measures a step of these layers, each request of one token; arguments as of `shares_of`.

    Steps follow one another with a pause, in which weights come over the link as far as they do
    while other stages compute.  A step of the cores alone takes infinitely long if these were not
    its own.
    """
    step = SharedDecode(layers, kernel, behind, Shares(()), columns)
    shape = layers[0].attention.shape
    most = min(kernel.step_tokens, behind.tokens)
    cache = torch.zeros(most, shape.kv_heads, BLOCK, 2 * shape.size, dtype=torch.bfloat16)

    def seconds(tokens: int, count: int, way: Way) -> float:
        own = torch.arange(tokens)
        lengths = torch.ones(tokens, dtype=torch.int32)
        of_step = StepRequests(torch.zeros_like(own), own * BLOCK, lengths, own.int().unsqueeze(1))
        isa = TILES if kernel.level.name == "amx" else ROWS
        requests = [of_step.native(kernel.native, cache, isa)]
        caches = [address_of(cache)] * len(layers)
        hidden = torch.randn(tokens, layers[0].parts.output.weight.shape[0]).bfloat16()
        run = (
            partial(step.run_columns, count)
            if way == "columns"
            else partial(step.run, step.divided(count, is_late=way == "last"))
        )
        taken = []
        for number in range(SHORT_ROUNDS if tokens <= SHORT_TOKENS else ROUNDS):
            if number == 1 and way == "columns":
                step.prepare_columns(tokens, count)
            time.sleep(BETWEEN_STEPS_S)
            began, used = time.perf_counter(), time.process_time()
            run(requests, caches, hidden, None)
            passed, used = time.perf_counter() - began, time.process_time() - used
            # Threads wait for the GPU in other steps, and then use no core either.
            is_believed = count > 0 or had_cores(passed, used, torch.get_num_threads())
            taken.append(passed if is_believed else math.inf)
        return min(taken[UNCOUNTED:])

    return seconds

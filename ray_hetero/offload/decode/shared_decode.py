"""Decode steps whose layers the cores share with the GPU that computes prompts.

A decode step reads all weights of a stage from the socket's memory, and from some number of tokens
on the cores multiply for longer than they read.  Meanwhile the link to the GPU is idle.  Here the
GPU computes some columns of every layer's gate and up, which it reads over the link, while the
cores compute the others (mlp_columns.py).  The attention of every layer stays on the cores,
where keys and values are, so that a layer costs the same on the link however long the requests are.

How much is given away depends on the host and on the number of tokens, so that it is measured at
the start: whole steps of some layers, with the cores alone and with more and more on the GPU.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch

from ray_hetero.kernels import step_trace
from ray_hetero.kernels.layers import layer_tokens
from ray_hetero.kernels.layers.decode_step import (
    GpuShare,
    NativeLayers,
    StepRequests,
    address_of,
)
from ray_hetero.kernels.layers.kv_layouts import ROWS, TILES
from ray_hetero.kernels.layers.layer_parts import CacheAddress, CpuBlocks
from ray_hetero.kernels.layers.post_attention import PostAttentionBlock
from ray_hetero.kernels.linear.rank_sums import meeting
from ray_hetero.kernels.linear.streaming_linear import StreamingLinear
from ray_hetero.kernels.step_trace import Event
from ray_hetero.log import logger
from ray_hetero.offload.decode.column_channel import ColumnChannel, MakeColumns
from ray_hetero.offload.decode.share_cache import Agree, ShareCache, key_of
from ray_hetero.offload.decode.share_choice import (
    COLUMN_PARTS,
    DisturbedError,
    Seconds,
    Share,
    Shares,
    best_shares,
    had_cores,
    kept_blocks,
    most_parts,
    undisturbed,
)

if TYPE_CHECKING:
    from ray_hetero.kernels.layers.layer import Layer


STEPS = 4
"""Steps one after the other that want another share before it is taken.

The weights of another share's columns all come anew, which takes as long as one or two steps.
Where the number of requests goes back and forth between two sizes, each step would have them come.
"""


class ShareHysteresis:
    """The share that steps take, which those of a few more or fewer tokens do not change."""

    def __init__(self) -> None:
        self._last: Share | None = None
        self._others = 0
        """Steps up to now, one after the other, that wanted another share than they took."""

    def following(self, wanted: Share) -> Share:
        """The share that the next step takes.

        Args:
            wanted: what was measured for its tokens.

        """
        last = self._last
        if last is None or not last.columns or not wanted.columns:
            return wanted
        is_other = wanted.columns != last.columns
        return last if is_other and self._others + 1 < STEPS else wanted

    def interrupt(self) -> None:
        """Reset the hysteresis; the next step takes the share that it asks for."""
        self._last, self._others = None, 0

    def take(self, wanted: Share) -> Share:
        """Begin a step; the share that it takes, argument as of `following`."""
        taken = self.following(wanted)
        self._others = self._others + 1 if taken.columns != wanted.columns else 0
        self._last = taken
        return taken


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


class SharedDecode:
    """Decode steps of layers that follow one another, with a part on a GPU.

    Args:
        layers: at least one, each with known scores and an MLP.
        kernel: what computes linear layers on the cores.
        columns: computes columns of their MLPs.
        shares: of what is given away, by tokens.

    """

    def __init__(
        self,
        layers: Sequence[Layer],
        kernel: StreamingLinear,
        columns: ColumnChannel,
        shares: Shares,
    ) -> None:
        self._kernel = kernel
        self._columns = columns
        self.shares = shares
        self._steady = ShareHysteresis()
        self._count = len(layers)
        following = [*(layer.input for layer in layers[1:]), None]
        self._layers = NativeLayers(
            kernel, layers[0].input,
            [
                (layer.attention, PostAttentionBlock(replace(layer.parts, next=next_one), kernel))
                for layer, next_one in zip(layers, following, strict=True)
            ],
        )  # fmt: skip

    def has(self, tokens: int) -> bool:
        """Whether the GPU computes something of a step of so many tokens."""
        return tokens <= self._columns.tokens and self.shares.of(tokens).columns > 0

    def __call__(
        self, requests: Sequence[Any], caches: Sequence[CacheAddress], hidden: torch.Tensor,
        residual: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Compute a decode step that `has` a share, as `SharesDecode` says."""
        tokens = len(hidden)
        share = self._steady.take(self.shares.of(tokens))
        takes_part = self._columns.agreed(takes_part=self._fetch(tokens, share))
        return self.run(share.columns if takes_part else 0, requests, caches, hidden, residual)

    def run(
        self, parts: int, requests: Sequence[Any], caches: Sequence[CacheAddress],
        hidden: torch.Tensor, residual: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Compute a step as a call does, with so many parts on the GPU; 0 for the cores alone."""
        step_trace.note(Event.SHARE, parts)
        y, total = torch.empty_like(hidden), torch.empty_like(hidden)
        step = requests, caches, hidden, residual, y, total
        if not parts:
            with meeting(self._kernel.sums):
                self._layers.run(*step)
            return y, total
        kept, share = self._kept(parts), self._columns.native
        waited_s = share.waited_s
        with meeting(self._kernel.sums), self._columns.of_step(len(hidden), kept):
            self._layers.run(*step, share=GpuShare(share, kept))
        layer_tokens.count_columns_wait(share.waited_s - waited_s)
        return y, total

    def fetch(self, tokens: int) -> bool:
        """Prefetch the GPU's weights of the next step. Returns whether using the GPU pays."""
        share = self._steady.following(self.shares.of(tokens))
        return self._fetch(tokens, share, is_ahead=True)

    def interrupt(self) -> None:
        """Learn that a prompt has taken the place of weights: the next step may use others."""
        self._steady.interrupt()

    def _fetch(self, tokens: int, share: Share, *, is_ahead: bool = False) -> bool:
        if not share.columns or tokens > self._columns.tokens:
            return False
        left_s = self._columns.fetch(tokens, self._kept(share.columns), is_ahead=is_ahead)
        return left_s <= share.gain_s * self._count

    def prepare(self, tokens: int, parts: int) -> None:
        """Capture graphs of steps of `run`, so that the next one is measured in steady state."""
        self._columns.prepare(tokens, self._kept(parts))

    def _kept(self, parts: int) -> CpuBlocks:
        return kept_blocks(self._columns.blocks, self._columns.output_blocks, parts)


def suits(layers: Sequence[Layer]) -> bool:
    """Whether decode steps of layers that follow one another can be shared with a GPU."""
    return all(
        layer.attention.scores is not None and layer.parts.down is not None and layer.mlp is None
        for layer in layers
    )


def shares_of(
    wanted: float | Literal["auto"], layers: Sequence[Layer], kernel: StreamingLinear,
    columns_of: MakeColumns, agreed: Callable[[float], float] = float, *, place: str = "",
    agree: Agree = lambda found: found,
) -> Shares:  # fmt: skip
    """The shares that `CpuConfig.decode_gpu_share` asks for.

    Those that take the least time on this host are measured, or were in an earlier start.

    Args:
        wanted: the setting.
        layers: those that `suits`; in a group this rank's parts of them.
        kernel: what computes them on the cores.
        columns_of: makes what computes columns of the layers' MLPs.
        agreed: makes of this rank's seconds those that all ranks of its group choose by.
        place: of this rank, see `RankSpec.place`; empty where nothing is kept.
        agree: gives all ranks of the group what its first rank has kept.

    """
    some = layers[:MEASURED_LAYERS]
    columns = columns_of(len(some))
    if columns is None:
        return Shares(())
    if wanted != "auto":
        # They are given away whatever is gained.
        return Shares((Share(1, max(1, round(wanted * COLUMN_PARTS)), gain_s=math.inf),))
    measure = step_seconds(some, kernel, columns)
    most = min(kernel.limits.native_tokens, columns.tokens)
    asked = [tokens for tokens in MEASURED_TOKENS if tokens <= most]
    kept = ShareCache(key_of(some, kernel, columns, place), agree)
    if (known := kept.known(asked)) is not None:
        for one in known.measured:
            # No request waits until a kernel is built or loaded.
            if one.columns:
                measure(one.tokens, one.columns)
        return known
    try:
        found = best_shares(
            undisturbed(lambda *step: agreed(measure(*step))), len(some), asked,
            most_parts(columns.output_blocks),
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


def step_seconds(
    layers: Sequence[Layer], kernel: StreamingLinear, columns: ColumnChannel
) -> Seconds:
    """Make what measures a step of these layers, each request of one token.

    Steps follow one another with a pause, in which weights come over the link as far as they do
    while other stages compute.  A step of the cores alone takes infinitely long if these were not
    its own.

    Args:
        layers: as of `shares_of`.
        kernel: the same.
        columns: of these layers.

    """
    step = SharedDecode(layers, kernel, columns, Shares(()))
    shape = layers[0].attention.shape
    most = min(kernel.limits.native_tokens, columns.tokens)
    cache = torch.zeros(most, shape.kv_heads, BLOCK, 2 * shape.size, dtype=torch.bfloat16)

    def seconds(tokens: int, parts: int) -> float:
        own = torch.arange(tokens)
        lengths = torch.ones(tokens, dtype=torch.int32)
        of_step = StepRequests(torch.zeros_like(own), own * BLOCK, lengths, own.int().unsqueeze(1))
        isa = TILES if kernel.level.name == "amx" else ROWS
        requests = [of_step.native(kernel.native, cache, isa)]
        caches = [address_of(cache)] * len(layers)
        hidden = torch.randn(tokens, layers[0].parts.output.weight.shape[0]).bfloat16()
        taken = []
        for number in range(SHORT_ROUNDS if tokens <= SHORT_TOKENS else ROUNDS):
            if number == 1 and parts:
                step.prepare(tokens, parts)
            time.sleep(BETWEEN_STEPS_S)
            began, used = time.perf_counter(), time.process_time()
            step.run(parts, requests, caches, hidden, None)
            passed, used = time.perf_counter() - began, time.process_time() - used
            # Threads wait for the GPU in other steps, and then use no core either.
            is_believed = parts > 0 or had_cores(passed, used, torch.get_num_threads())
            taken.append(passed if is_believed else math.inf)
        return min(taken[UNCOUNTED:])

    return seconds

"""Attention of prompts on a GPU, in parts that are put together.

New tokens attend to each other causally, and to the cached keys of their request without a mask.
The parts are put together by their log-sum-exps, see Dao et al., "FlashAttention-2", 2023, so the
cached keys may come in spans of any size.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.attention.varlen import AuxRequest, varlen_attn

from ray_hetero.compat.models.flash_attention import flash_attention_3
from ray_hetero.offload.expand.triton_runtime import kernels
from ray_hetero.offload.prefill.layer_ops import chunks

if TYPE_CHECKING:
    from ray_hetero.offload.prefill.step_memory import StepMemory


class GpuAngles:
    """Cosines and sines of the tokens of a step.

    A model has a table of up to a hundred thousand positions.  Those of new prompts, its first
    ones, stay on the GPU: looked up in host memory for each step, they come half a millisecond
    after everything else is there.

    Args:
        memory: of a step, on the same GPU.
        tokens: most of a step, of which as many positions stay.

    """

    def __init__(self, memory: StepMemory, tokens: int) -> None:
        self._memory = memory
        self._positions = torch.arange(tokens)
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        """Tables with the cosines and sines of their first rows on the GPU: as long as a table is
        here, its address is its own."""

    def __call__(
        self, table: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Look positions up, ordered on the current stream.

        Args:
            table: [positions, rotated], cosines and then sines of each.
            positions: [tokens], int64, in host memory.

        Returns:
            Cosines and sines, [tokens, 1, rotated / 2] each, float32, contiguous; not to be
            written to.

        """
        cos, sin = self._first(table)
        tokens, kept = len(positions), len(cos)
        if tokens <= kept and torch.equal(positions, self._positions[:tokens]):
            return cos[:tokens], sin[:tokens]
        if int(positions.max()) >= kept:
            here = self._memory.host_memory(tokens, table.shape[1], dtype=table.dtype)
            return self._sent(torch.index_select(table, 0, positions, out=here))
        here = self._memory.host_memory(tokens, dtype=torch.int64).copy_(positions)
        there = here.to(self._memory.device, non_blocking=True)
        return cos[there], sin[there]

    def _first(self, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        at = table.data_ptr()
        if at not in self._kept:
            rows = table[: len(self._positions)]
            here = self._memory.host_memory(*rows.shape, dtype=rows.dtype).copy_(rows)
            self._kept[at] = table, *self._sent(here)
        return self._kept[at][1:]

    def _sent(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of a table in page-locked memory on the GPU."""
        there = rows.to(self._memory.device, non_blocking=True).float().unsqueeze(1)
        cos, sin = (half.contiguous() for half in there.chunk(2, dim=-1))
        return cos, sin


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, uses_triton: bool) -> None:
    """Rotate heads in place.

    Args:
        heads: [tokens, heads, size], bf16; heads of a token are neighbours.
        cos: [tokens, 1, rotated / 2], float32, contiguous.
        sin: as `cos`.
        uses_triton: whether one kernel does it, where there are a dozen operators else.

    """
    half = cos.shape[-1]
    if uses_triton:
        tokens, count, size = heads.shape
        assert heads.stride()[1:] == (size, 1)
        kernels().rotate[(tokens,)](
            heads, cos, sin, heads.stride(0), count, size, half,
            _power_of_two(count), _power_of_two(half),
        )  # fmt: skip
        return
    for rows in chunks(len(heads)):
        some = heads[rows]
        left, right = some[..., :half].float(), some[..., half : 2 * half].float()
        some[..., :half] = left * cos[rows] - right * sin[rows]
        some[..., half : 2 * half] = right * cos[rows] + left * sin[rows]


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


MOST_HEAD_SIZE = 256
"""Largest head size that the kernel behind torch.nn.attention.varlen takes."""


@dataclass(frozen=True)
class Lengths:
    """Lengths of sequences that lie one after the other."""

    ends: tuple[int, ...]
    """End of each sequence, as a number of tokens."""
    starts: torch.Tensor
    """[sequences + 1], int32, on the device."""
    most: int

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> Lengths:
        """Make them from the length of each."""
        ends = tuple(itertools.accumulate(lengths))
        # From other memory, a copy has this thread wait for what was ordered before it.
        is_gpu = device.type == "cuda"
        starts = torch.tensor([0, *ends], dtype=torch.int32, pin_memory=is_gpu)
        return cls(ends, starts.to(device, non_blocking=True), max(lengths))


@dataclass(frozen=True)
class Attended:
    """Result of attention to some of the keys."""

    values: torch.Tensor
    """[tokens, heads, size]."""
    lse: torch.Tensor
    """[heads, tokens], float32: logarithms of the sums of the scores' exponentials."""


def attend(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor,
    query_lengths: Lengths, key_lengths: Lengths, scale: float, *, is_causal: bool,
) -> Attended:  # fmt: skip
    """Let sequences of queries attend to as many of keys.

    Args:
        queries: [tokens, heads, size].
        keys: [cached tokens, kv heads, size].
        values: as `keys`.
        query_lengths: of the sequences of queries.
        key_lengths: of those of keys.
        scale: of scores.
        is_causal: whether a query attends to keys up to its own place; its sequences have the same
            lengths then.

    """
    if not queries.is_cuda:
        return _attend_with_torch(
            queries, keys, values, query_lengths, key_lengths, scale, is_causal=is_causal
        )
    if (kernel := flash_attention_3(queries.device)) is not None:
        return Attended(*kernel(
            q=queries, k=keys, v=values, cu_seqlens_q=query_lengths.starts,
            cu_seqlens_k=key_lengths.starts, max_seqlen_q=query_lengths.most,
            max_seqlen_k=key_lengths.most, softmax_scale=scale, is_causal=is_causal,
        ))  # fmt: skip
    # Of one token each, the kernel would turn heads into tokens, and their sums with them.
    most = max(2, query_lengths.most)
    found, lse = varlen_attn(
        queries, keys, values, query_lengths.starts, key_lengths.starts, most, key_lengths.most,
        return_aux=AuxRequest(lse=True), scale=scale,
        window_size=(-1, 0) if is_causal else (-1, -1), enable_gqa=True,
    )  # fmt: skip
    # Described as [tokens, heads], it comes as [heads, tokens].
    tokens, heads, _ = queries.shape
    return Attended(found, lse if tuple(lse.shape) == (heads, tokens) else lse.t())


def _attend_with_torch(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor,
    query_lengths: Lengths, key_lengths: Lengths, scale: float, *, is_causal: bool,
) -> Attended:  # fmt: skip
    """The same, as it is written down; for tests, of which the GPU is a CPU."""
    each = queries.shape[1] // keys.shape[1]
    found = torch.empty_like(queries, memory_format=torch.contiguous_format)
    lse = queries.new_empty((queries.shape[1], len(queries)), dtype=torch.float32)
    begin = key_begin = 0
    for end, key_end in zip(query_lengths.ends, key_lengths.ends, strict=True):
        part, others = slice(begin, end), slice(key_begin, key_end)
        q = queries[part].float().transpose(0, 1)
        k, v = (x[others].float().transpose(0, 1).repeat_interleave(each, dim=0)
                for x in (keys, values))  # fmt: skip
        scores = q @ k.transpose(1, 2) * scale
        if is_causal:
            later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
            scores = scores.masked_fill(later, -math.inf)
        lse[:, part] = scores.logsumexp(-1)
        found[part] = (scores.softmax(-1) @ v).transpose(0, 1).to(queries.dtype)
        begin, key_begin = end, key_end
    return Attended(found, lse)


def put_together(
    whole: Attended, part: Attended, rows: torch.Tensor | None, *, uses_triton: bool
) -> None:
    """Add a part to what has been attended to before, in place.

    Args:
        whole: of all tokens; values contiguous.
        part: of some of them, attended to other keys; values contiguous.
        rows: which of all tokens they are; None if it is all.
        uses_triton: whether one kernel does it, where there are a dozen operators else.

    """
    if uses_triton:
        kernels().put_together[part.values.shape[:2]](
            whole.values, whole.lse, part.values, part.lse, part.values if rows is None else rows,
            *whole.lse.stride(), *part.lse.stride(), whole.values.shape[2], rows is not None,
            1 << (whole.values.shape[2] - 1).bit_length(), num_warps=1,
        )  # fmt: skip
        return
    before, after = whole.lse if rows is None else whole.lse[:, rows], part.lse
    both = torch.logaddexp(before, after)
    old, new = ((lse - both).exp().t().unsqueeze(-1) for lse in (before, after))
    for some in chunks(len(part.values)):
        at = some if rows is None else rows[some]
        whole.values[at] = (
            whole.values[at].float() * old[some] + part.values[some].float() * new[some]
        ).to(whole.values.dtype)
    if rows is None:
        whole.lse.copy_(both)
    else:
        whole.lse[:, rows] = both

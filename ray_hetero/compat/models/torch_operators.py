"""vLLM's operators for CPUs in PyTorch, for a process in which the compiled ones are missing.

Names, arguments and memory are those of the compiled operators, so that whatever calls these finds
them: vLLM's own code, and this project's layers.  They are those that a CPU rank calls for a dense
model with this project's kernels (docs/upgrading-vllm.md).

Uses: names and arguments of vLLM's compiled operators, those in `SCHEMAS`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional

from ray_hetero.errors import UnsupportedError

TILES, TILE = "amx", 16
"""Name of the layout for AMX, and rows and columns of its tiles; kernels/layers/kv_layouts.py
describes the layouts."""
ISAS = ("vec", "vec16", TILES)
"""Layouts of keys and values in a block, by their place in what `get_scheduler_metadata` gives."""
ROWS_AT_ONCE = 512
"""Queries of one request whose scores are in memory at a time."""

_library = torch.library.Library("_C", "FRAGMENT")


def init_cpu_memory_env(node_ids: Sequence[int]) -> None:
    """Leave memory where it is: a rank's process binds its own."""


def compute_slot_mapping(
    query_start_loc: torch.Tensor, positions: torch.Tensor, block_table: torch.Tensor,
    slot_mapping: torch.Tensor, block_size: int,
) -> None:  # fmt: skip
    """Write the place of each token in the KV cache.

    Args:
        query_start_loc: [requests + 1], where each request's tokens begin.
        positions: [tokens] in their requests.
        block_table: [requests, blocks].
        slot_mapping: [tokens] and more, which stay.
        block_size: tokens of a block.

    """
    counts = query_start_loc.diff().long()
    tokens = int(counts.sum())
    requests = torch.arange(len(counts)).repeat_interleave(counts)
    places = positions[:tokens].long()
    blocks = block_table[requests, places // block_size].long()
    slot_mapping[:tokens] = blocks * block_size + places % block_size


def get_scheduler_metadata(
    num_req: int, num_heads_q: int, num_heads_kv: int, head_dim: int, seq_lens: torch.Tensor,
    dtype: torch.dtype, query_start_loc: torch.Tensor, casual: bool, window_size: int,
    isa_hint: str, enable_kv_split: bool, dynamic_causal: torch.Tensor | None,
    kv_cache_dtype: str = "auto",
) -> torch.Tensor:  # fmt: skip
    """Number of the layout of keys and values, which `attend` reads."""
    return torch.tensor([ISAS.index(isa_hint)])


def _keys(cache: torch.Tensor, isa: str) -> torch.Tensor:
    """View of keys [blocks, kv heads, tokens of a block / tile, tile, size / part, part]."""
    blocks, heads, block, size = cache.shape
    if isa == TILES:
        tiled = cache.view(blocks, heads, block // TILE, size // 2, TILE, 2)
        return tiled.permute(0, 1, 2, 4, 3, 5)
    rows = cache.view(blocks, heads, size, block).transpose(2, 3)
    return rows[:, :, None, :, None]


def _values(cache: torch.Tensor, isa: str) -> torch.Tensor:
    """View of values, as `_keys`."""
    blocks, heads, block, size = cache.shape
    if isa == TILES:
        tiled = cache.view(blocks, heads, size // TILE, block // 2, TILE, 2)
        return tiled.permute(0, 1, 3, 5, 2, 4)
    return cache[:, :, None, :, None]


def reshape_and_cache(
    key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor,
    slot_mapping: torch.Tensor, isa: str, k_scale: float = 1.0, v_scale: float = 1.0,
    kv_cache_dtype: str = "auto",
) -> None:  # fmt: skip
    """Write keys and values of tokens into their blocks.

    Args:
        key: [tokens, kv heads, size].
        value: as `key`.
        key_cache: [blocks, kv heads, tokens of a block, size]; each head's part of a block is
            contiguous.
        value_cache: as `key_cache`.
        slot_mapping: [tokens], -1 for those that are not written.
        isa: the layout.
        k_scale: of a quantised cache.
        v_scale: of a quantised cache.
        kv_cache_dtype: of the cache.

    Raises:
        UnsupportedError: the cache is quantised.

    """
    _refuse_quantised(kv_cache_dtype)
    written = slot_mapping >= 0
    slots = slot_mapping[written].long()
    block = key_cache.shape[2]
    for given, into in ((key, _keys(key_cache, isa)), (value, _values(value_cache, isa))):
        tile, parts = into.shape[3], into.shape[4:]
        tokens = given[: len(written)][written]
        within = slots % block
        into[slots // block, :, within // tile, within % tile] = tokens.unflatten(2, parts)


def attend(
    query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, output: torch.Tensor,
    query_start_loc: torch.Tensor, seq_lens: torch.Tensor, scale: float, causal: bool,
    alibi_slopes: torch.Tensor | None, sliding_window_size: int, block_table: torch.Tensor,
    softcap: float, scheduler_metadata: torch.Tensor, s_aux: torch.Tensor | None,
    dynamic_causal: torch.Tensor | None, k_scale: float = 1.0, v_scale: float = 1.0,
    kv_cache_dtype: str = "auto",
) -> None:  # fmt: skip
    """Attend from the last tokens of each request to all of its tokens.

    Args:
        query: [tokens, heads, size].
        key_cache: [blocks, kv heads, tokens of a block, size].
        value_cache: as `key_cache`.
        output: [tokens, heads, size], where the results come.
        query_start_loc: [requests + 1], where each request's queries begin.
        seq_lens: [requests], tokens of each.
        scale: of scores.
        causal: whether tokens see none behind them.
        alibi_slopes: [heads], by which scores fall with the distance.
        sliding_window_size: how many tokens a query sees, its own included; -1 for all.
        block_table: [requests, blocks].
        softcap: bound of scores; 0 for none.
        scheduler_metadata: from `get_scheduler_metadata`.
        s_aux: [heads], a score that takes its share and gives nothing.
        dynamic_causal: by request, whether it is causal.
        k_scale: of a quantised cache.
        v_scale: of a quantised cache.
        kv_cache_dtype: of the cache.

    Raises:
        UnsupportedError: the cache is quantised, or causality differs by request.

    """
    _refuse_quantised(kv_cache_dtype)
    if dynamic_causal is not None:
        raise UnsupportedError("attention in PyTorch has one causality for all requests")
    isa = ISAS[int(scheduler_metadata[0])]
    caches = _keys(key_cache, isa), _values(value_cache, isa)
    block = key_cache.shape[2]
    starts = query_start_loc.tolist()
    for number, length in enumerate(seq_lens.tolist()):
        begin, end = starts[number], starts[number + 1]
        if begin == end:
            continue
        blocks = block_table[number, : -(-length // block)].long()
        keys, values = (_tokens(cache, blocks)[:, :length] for cache in caches)
        for first in range(begin, end, ROWS_AT_ONCE):
            last = min(first + ROWS_AT_ONCE, end)
            at = torch.arange(length - end + first, length - end + last)[:, None]
            behind = at - torch.arange(length)
            bias = _bias(behind, causal, sliding_window_size, alibi_slopes)
            rows = query[first:last].transpose(0, 1)
            found = _attended(rows, keys, values, bias, scale, softcap, s_aux)
            output[first:last] = found.transpose(0, 1)


def _tokens(cache: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """Keys or values [kv heads, tokens, size] of some blocks."""
    heads = cache.shape[1]
    return cache[blocks].flatten(4).transpose(0, 1).reshape(heads, -1, cache.shape[4:].numel())


def _bias(
    behind: torch.Tensor, causal: bool, window: int, slopes: torch.Tensor | None
) -> torch.Tensor:
    """Addend of scores [heads or 1, queries, tokens], from how far each token is behind."""
    bias = torch.zeros(1, *behind.shape)
    if slopes is not None:
        bias = -slopes.float()[:, None, None] * behind
    if causal:
        bias = bias.masked_fill(behind < 0, float("-inf"))
    if window >= 0:
        bias = bias.masked_fill(behind >= window, float("-inf"))
    return bias


def _attended(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor,
    scale: float, softcap: float, sinks: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """Attention [heads, queries, size] of one request, in float32."""
    each = len(queries) // len(keys)
    keys, values = (x.float().repeat_interleave(each, dim=0) for x in (keys, values))
    if not softcap and sinks is None:
        found = functional.scaled_dot_product_attention(
            queries.float()[None], keys[None], values[None], attn_mask=bias[None], scale=scale
        )
        return found[0]
    scores = queries.float() @ keys.transpose(1, 2) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores + bias
    if sinks is not None:
        column = sinks.float()[:, None, None].expand(-1, scores.shape[1], 1)
        scores = torch.cat([scores, column], dim=-1)
    return scores.softmax(-1)[..., : keys.shape[1]] @ values


def _refuse_quantised(kv_cache_dtype: str) -> None:
    if kv_cache_dtype.startswith("fp8"):
        raise UnsupportedError(
            f"PyTorch in the place of vLLM's operators has no KV cache in {kv_cache_dtype}: leave "
            "--kv-cache-dtype out, or install the CPU kernels of vLLM"
        )


def greedy_argmax(logits: torch.Tensor) -> torch.Tensor:
    """Likeliest token of each row [rows], int64."""
    return logits.argmax(dim=-1).view(-1)


def rms_norm(
    out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, epsilon: float
) -> None:
    """Write the norm of x [..., size] into `out`."""
    given = x.float()
    normed = given * torch.rsqrt(given.square().mean(-1, keepdim=True) + epsilon)
    out.copy_(normed if weight is None else normed * weight.float())


def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, epsilon: float
) -> None:
    """Add x [..., size] to the residual, and write the norm of the sum into x."""
    both = residual.float() + x
    residual.copy_(both)
    rms_norm(x, both, weight, epsilon)


def _gated(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., None]:
    def gate(out: torch.Tensor, x: torch.Tensor) -> None:
        left, right = x.float().chunk(2, dim=-1)
        out.copy_(function(left) * right)

    return gate


def rotate(
    positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None, head_size: int,
    cos_sin_cache: torch.Tensor, is_neox: bool, rope_dim_offset: int = 0, inverse: bool = False,
) -> None:  # fmt: skip
    """Rotate the heads of queries and keys in place.

    Args:
        positions: [tokens].
        query: [tokens, heads · size], or [tokens, heads, size].
        key: as `query`.
        head_size: elements of a head.
        cos_sin_cache: [positions, rotated elements]: cosines, then sines.
        is_neox: whether halves turn together; else neighbours do.
        rope_dim_offset: element of a head at which what is rotated begins.
        inverse: whether to turn back.

    """
    table = cos_sin_cache[positions.flatten()].float()
    cos, sin = (half[:, None] for half in table.chunk(2, dim=-1))
    sin = -sin if inverse else sin
    rotated = table.shape[-1]
    for one in (query, key):
        if one is None:
            continue
        heads = one.view(len(table), -1, head_size)
        part = heads[..., rope_dim_offset : rope_dim_offset + rotated]
        pairs = part.unflatten(-1, (2, -1)) if is_neox else part.unflatten(-1, (-1, 2))
        dim = -2 if is_neox else -1
        left, right = pairs.float().unbind(dim)
        turned = torch.stack([left * cos - right * sin, right * cos + left * sin], dim=dim)
        part.copy_(turned.flatten(-2))


_OUT = "(Tensor(a!) out, Tensor input) -> ()"
SCHEMAS: dict[str, tuple[str, Callable[..., Any]]] = {
    "init_cpu_memory_env": ("(SymInt[] node_ids) -> ()", init_cpu_memory_env),
    "compute_slot_mapping_kernel_impl": (
        "(Tensor query_start_loc, Tensor positions, Tensor block_table, Tensor(a!) slot_mapping, "
        "SymInt block_size) -> ()",
        compute_slot_mapping,
    ),
    "get_scheduler_metadata": (
        "(int num_req, int num_heads_q, int num_heads_kv, int head_dim, Tensor seq_lens, "
        "ScalarType dtype, Tensor query_start_loc, bool casual, int window_size, str isa_hint, "
        'bool enable_kv_split, Tensor? dynamic_causal, str kv_cache_dtype="auto") -> Tensor',
        get_scheduler_metadata,
    ),
    "cpu_attn_reshape_and_cache": (
        "(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
        "Tensor slot_mapping, str isa, float k_scale=1., float v_scale=1., "
        'str kv_cache_dtype="auto") -> ()',
        reshape_and_cache,
    ),
    "cpu_attention_with_kv_cache": (
        "(Tensor query, Tensor key_cache, Tensor value_cache, Tensor(a!) output, "
        "Tensor query_start_loc, Tensor seq_lens, float scale, bool causal, Tensor? alibi_slopes, "
        "SymInt sliding_window_size, Tensor block_table, float softcap, Tensor scheduler_metadata, "
        "Tensor? s_aux, Tensor? dynamic_causal, float k_scale=1., float v_scale=1., "
        'str kv_cache_dtype="auto") -> ()',
        attend,
    ),
    "greedy_argmax": ("(Tensor logits) -> Tensor", greedy_argmax),
    "rms_norm": (
        "(Tensor(a!) out, Tensor input, Tensor? weight, float epsilon) -> ()", rms_norm,
    ),
    "fused_add_rms_norm": (
        "(Tensor(a!) input, Tensor(b!) residual, Tensor? weight, float epsilon) -> ()",
        fused_add_rms_norm,
    ),
    "rotary_embedding": (
        "(Tensor positions, Tensor(a!) query, Tensor(b!)? key, int head_size, "
        "Tensor cos_sin_cache, bool is_neox, int rope_dim_offset=0, bool inverse=False) -> ()",
        rotate,
    ),
    "silu_and_mul": (_OUT, _gated(functional.silu)),
    "gelu_and_mul": (_OUT, _gated(functional.gelu)),
    "gelu_tanh_and_mul": (_OUT, _gated(lambda x: functional.gelu(x, approximate="tanh"))),
}  # fmt: skip
"""Schema and function of each operator, by its name."""


def define_missing() -> tuple[str, ...]:
    """Define the operators that no compiled one of vLLM computes on CPUs in this process.

    Returns:
        Their names.

    """
    missing = []
    for name, (schema, function) in SCHEMAS.items():
        is_known = hasattr(torch.ops._C, name)
        if is_known and torch._C._dispatch_has_computed_kernel_for_dispatch_key(
            f"_C::{name}", "CPU"
        ):
            continue
        if not is_known:
            _library.define(name + schema)
        # One has no tensor, by which it would be known to be of a CPU.
        _library.impl(name, function, "CompositeExplicitAutograd")
        missing.append(name)
    return tuple(missing)

"""Steps of requests through decoder layers with a paged cache, and what they must give.

Each request's whole sequence is computed at once as torch computes it: chunks, cached prefixes and
decoding must give the same rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from decoder_parts import HEAD, HIDDEN, attends, computed, known_layers, layers_of, model
from native_module import native
from vllm import _custom_ops as ops
from vllm.v1.attention.backends import cpu_attn

from ray_hetero.kernels.formats import CompactWeight, PackedWeight
from ray_hetero.kernels.formats.base import pack
from ray_hetero.kernels.layers import attention as attention_module
from ray_hetero.kernels.layers import decoder_layers
from ray_hetero.kernels.layers.decoder_layers import DecoderLayers
from ray_hetero.kernels.layers.layer_parts import Linear
from ray_hetero.kernels.linear.streaming_linear import StreamingLinear
from ray_hetero.offload.decode import column_pieces, shared_decode
from ray_hetero.offload.decode.column_channel import MakeColumns
from ray_hetero.offload.decode.mlp_columns import maker_of
from ray_hetero.offload.decode.share_choice import Share, Shares
from ray_hetero.offload.decode.shared_decode import SharedDecode
from ray_hetero.offload.prefill.gpu_layers import AttentionMemory, GpuLayers, shape_of
from ray_hetero.offload.prefill.offload_gpu import OffloadGpu

CPU = torch.device("cpu")
GPU_FAMILIES = ("llama", "qwen3", "mistral", "gemma3", "granite", "stablelm", "falcon-rw")
"""Of `decoder_parts.FAMILIES`, with whole layers that a GPU computes, one for each kind of part."""
SCALE = 0.2
CLOSE = 2**-5
"""How far a row may be from what is expected, relative to its length; of rounding."""


def write_tokens(
    keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, isa: str
) -> None:
    """Write keys and values [tokens, heads, size] as vLLM's operator for CPUs does."""
    blocks, heads, block, both = cache.shape
    size = both // 2
    t, i = slots[:, None, None] % block, torch.arange(size)[None, None]
    if isa == "vec":
        key_at, value_at = i * block + t, t * size + i
    else:
        key_at = t // 16 * 16 * size + i // 2 * 32 + t % 16 * 2 + i % 2
        value_at = i // 16 * 16 * block + t // 2 * 32 + i % 16 * 2 + t % 2
    head = torch.arange(heads)[None, :, None]
    flat = cache.view(blocks, heads, block * both)
    flat[slots[:, None, None] // block, head, key_at] = keys
    flat[slots[:, None, None] // block, head, block * size + value_at] = values


@dataclass(eq=False)
class Conversation:
    """A request."""

    inputs: torch.Tensor
    """[tokens, hidden], bf16: hidden states of all its tokens before the first layer."""
    blocks: list[int] = field(default_factory=list)


class Steps:
    """Layers with caches, and requests that are computed step by step.

    Args:
        monkeypatch: replaces vLLM's forward context.
        device: where prompts are computed.
        least: tokens of a step from which they are.
        most: tokens of a step.
        is_compact: whether weights are.
        columns: parts of the columns of MLPs that the device computes in decode steps.
        most_sent: cached tokens of decoding requests, up to which the cores decode none beside
            prompts.
        unwritten: what caches have where no request has written; vLLM's own attention multiplies
            it with 0.
        parts: more arguments of `decoder_parts.model`.

    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *, device: torch.device = CPU,
        least: int = 8, most: int = 512, layers: int = 2, block: int = 32, blocks: int = 64,
        is_compact: bool = False, isa: str = "vec", has_memory: bool = True,
        columns: int = 0, most_sent: int = 0,
        unwritten: float = torch.nan, **parts: Any,
    ) -> None:  # fmt: skip
        torch.manual_seed(0)
        self.unwritten = unwritten
        monkeypatch.setattr(decoder_layers, "most_sent", lambda layers: most_sent)
        heads, kv_heads = parts.setdefault("heads", 6), parts.setdefault("kv_heads", 2)
        self.block, self.isa = block, isa
        self.of_rank = heads, kv_heads
        """Heads of queries and of keys that vLLM's own attention computes."""
        self.decoder = model(layers, **parts)
        self.layers = layers_of(self.decoder)
        self.heads, self.kv_heads = heads, kv_heads
        config = SimpleNamespace(model_config=SimpleNamespace(dtype=torch.bfloat16))
        monkeypatch.setattr(cpu_attn, "get_current_vllm_config", lambda: config)
        self.contexts: dict[str, Any] = {}
        self.caches = []
        for layer in self.layers:
            attention = attends(layer)
            attention.impl = cpu_attn.CPUAttentionBackendImpl(
                heads, HEAD, SCALE, kv_heads, alibi_slopes=None, sliding_window=None,
                kv_cache_dtype="auto",
            )  # fmt: skip
            if isa == "amx" or not hasattr(torch.ops._C, "cpu_attn_reshape_and_cache"):
                # vLLM's operator has the layout of AMX where the processor has AMX, and is not
                # there at all in a process whose vLLM is that for GPUs.
                attention.impl.do_kv_cache_update = lambda layer, keys, values, cache, slots: (
                    write_tokens(keys, values, cache, slots, isa)
                )
            attention.isa, attention._k_scale_float, attention._v_scale_float = isa, 1.0, 1.0
            # What was never written must not be read.
            shape = (blocks, kv_heads, block, 2 * HEAD)
            self.caches.append(torch.full(shape, unwritten, dtype=torch.bfloat16))
        for module in (attention_module, decoder_layers):
            monkeypatch.setattr(module, "get_attention_context", self.contexts.__getitem__)
        # Those of tests have few.
        monkeypatch.setattr(column_pieces, "LEAST_COLUMNS", 64)
        self.made = self._made(device, least, most, is_compact, has_memory, columns)
        self._free = torch.randperm(blocks - 1).add(1).tolist()

    def _made(
        self, device: torch.device, least: int, most: int, is_compact: bool,
        has_memory: bool, parts: int,
    ) -> DecoderLayers:  # fmt: skip
        kernel = StreamingLinear(native)
        linears, gpu = {}, OffloadGpu(device, most)
        for module in self.decoder.modules():
            if hasattr(module, "matrix"):
                kind = CompactWeight if is_compact else PackedWeight
                held = kind.made(pack(module.matrix), native)
                assert held is not None
                linears[module] = Linear(held, module.added)
                gpu.add(held)
        kernel.gpu = gpu
        kernel.limits = replace(kernel.limits, gpu_from=least, gpu_room=most, has_products=True)
        self.kernel, self.linears = kernel, linears
        self.known = known_layers(self.decoder, linears, kernel)
        gpu.take(self.known[0].parts.output.weight.shape[0])
        shape = shape_of(self.known)
        assert shape is not None
        memory = AttentionMemory(gpu, shape) if has_memory else None
        on_gpu = None if memory is None else GpuLayers(self.known, gpu, memory)
        made = DecoderLayers(self.known, kernel, on_gpu)
        self.shared: SharedDecode | None = None
        self.columns: Any = None
        """Object that computes columns of MLPs in shared decode steps; None without these."""
        self.columns_of: MakeColumns = maker_of(self.known, gpu, kernel)
        """Makes what computes columns of the first layers."""
        if parts:
            assert memory is not None
            assert shared_decode.suits(self.known)
            self.columns = self.columns_of(len(self.known))
            assert self.columns is not None
            shares = Shares((Share(1, parts),))
            self.shared = SharedDecode(self.known, kernel, self.columns, shares)
            made.shared = self.shared
        return made

    def request(
        self, tokens: int, after: Conversation | None = None, shared: int = 0
    ) -> Conversation:
        """A request of so many tokens, the first blocks of it those of another one."""
        inputs = torch.randn(tokens, HIDDEN).bfloat16()
        made = Conversation(inputs)
        if after is not None:
            inputs[: shared * self.block] = after.inputs[: shared * self.block]
            made.blocks = after.blocks[:shared]
        while len(made.blocks) * self.block < tokens:
            made.blocks.append(self._free.pop())
        return made

    def free(self, request: Conversation) -> None:
        """Let other requests have the blocks of one that has ended, and shares none."""
        for cache in self.all_caches:
            cache[request.blocks] = self.unwritten
        self._free += request.blocks
        request.blocks.clear()

    @property
    def all_caches(self) -> list[torch.Tensor]:
        """Caches of all layers, of all ranks."""
        return self.caches

    def expected(self, request: Conversation) -> torch.Tensor:
        """[tokens, hidden]: the sum of what a call gives for the whole sequence."""
        positions = torch.arange(len(request.inputs))
        for layer in self.layers:
            attends(layer).forward = self._attended
        return computed(self.layers, self.known[0].calls, positions, request.inputs.clone())

    def _attended(self, q: Any, k: Any, v: Any) -> Any:
        tokens = len(q)
        q, k, v = (one.reshape(tokens, -1, HEAD).transpose(0, 1).float() for one in (q, k, v))
        each = self.heads // self.kv_heads
        k, v = (one.repeat_interleave(each, dim=0) for one in (k, v))
        found = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=SCALE
        )
        return found.transpose(0, 1).reshape(tokens, -1).bfloat16()

    def begin(self, parts: Sequence[tuple[Conversation, int, int]]) -> tuple[Any, Any]:
        """Let vLLM's forward context be that of a step; positions and hidden states.

        Args:
            parts: requests, each with its first token of the step and the one behind its last.

        """
        counts = [end - begin for _, begin, end in parts]
        starts = torch.tensor([0, *counts]).cumsum(0).int()
        lengths = torch.tensor([end for *_, end in parts], dtype=torch.int32)
        most = max(len(request.blocks) for request, *_ in parts)
        table = torch.tensor(
            [request.blocks + [0] * (most - len(request.blocks)) for request, *_ in parts],
            dtype=torch.int32,
        )
        positions = torch.cat([torch.arange(begin, end) for _, begin, end in parts])
        slots = torch.cat([
            torch.tensor(request.blocks)[torch.arange(begin, end) // self.block] * self.block
            + torch.arange(begin, end) % self.block
            for request, begin, end in parts
        ])  # fmt: skip
        metadata = cpu_attn.CPUAttentionMetadata(
            num_actual_tokens=len(positions), max_query_len=max(counts), query_start_loc=starts,
            max_seq_len=int(lengths.max()), seq_lens=lengths, block_table=table,
            slot_mapping=slots, scheduler_metadata=self._plan(lengths, starts),
        )  # fmt: skip
        for layer, cache in zip(self.layers, self.caches, strict=True):
            attention = attends(layer)
            self.contexts[attention.layer_name] = metadata, attention, cache, slots
        return positions, torch.cat([request.inputs[b:e] for request, b, e in parts])

    def _plan(self, lengths: torch.Tensor, starts: torch.Tensor) -> torch.Tensor | None:
        """What vLLM's own attention reads; None where it is not there for these caches."""
        if self.isa != "vec" or not hasattr(torch.ops._C, "get_scheduler_metadata"):
            return None
        heads, kv_heads = self.of_rank
        plan: torch.Tensor = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=len(lengths), num_heads=heads, num_kv_heads=kv_heads, head_dim=HEAD,
            seq_lens=lengths, dtype=torch.bfloat16, query_start_loc=starts, causal=True,
            sliding_window_size=-1, isa="vec", enable_kv_split=True,
        )  # fmt: skip
        return plan

    def check(self, *parts: tuple[Conversation, int, int]) -> None:
        """Compute a step, and compare it with the whole sequences."""
        positions, hidden = self.begin(parts)
        self.compare(*self.made(positions, hidden, None), parts)

    def compare(
        self, y: torch.Tensor, total: torch.Tensor, parts: Sequence[tuple[Conversation, int, int]]
    ) -> None:
        """Compare a step's results with the whole sequences."""
        apart = self.apart(y, total, parts)
        assert float(apart.max()) < CLOSE, f"row {int(apart.argmax())}: {apart.max():.4f}"

    def apart(
        self, y: torch.Tensor, total: torch.Tensor, parts: Sequence[tuple[Conversation, int, int]]
    ) -> torch.Tensor:
        """How far each row of a step's results is from the whole sequences, in parts of it."""
        expected = torch.cat([self.expected(request)[begin:end] for request, begin, end in parts])
        return (y.float() + total.float() - expected).norm(dim=1) / expected.norm(dim=1)

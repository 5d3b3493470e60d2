"""Steps of requests through layers of which the ranks of a group have parts.

The ranks are threads, and the first has the pretended GPU compute prompts for all; see
paged_steps.py for what is expected.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Literal

import decoder_parts
import pytest
import torch
import torch.distributed as dist
from decoder_parts import HEAD, Product, attends, known_layers, layers_of, model
from native_module import native
from paged_steps import CPU, SCALE, Conversation, Steps
from vllm import _custom_ops as ops
from vllm.v1.attention.backends import cpu_attn

from ray_hetero.kernels.formats import CompactWeight, PackedWeight
from ray_hetero.kernels.formats.base import pack
from ray_hetero.kernels.layers import post_attention
from ray_hetero.kernels.layers.decoder_layers import DecoderLayers
from ray_hetero.kernels.layers.layer_parts import Linear
from ray_hetero.kernels.linear.rank_sums import RankSums
from ray_hetero.kernels.linear.streaming_linear import StreamingLinear
from ray_hetero.offload.decode.share_choice import Share, Shares
from ray_hetero.offload.decode.shared_decode import SharedDecode
from ray_hetero.offload.group import joining
from ray_hetero.offload.group.group_layers import PromptOffer
from ray_hetero.offload.weights.shared_weights import SharedWeights
from ray_hetero.runtime.shared_pages import STEP, SharedPages

SECONDS = 120.0
RANKS = 4
"""What the first rank of the group is called; the others follow."""
HEADS = 3
"""Of queries a rank, which share one head of keys."""


class Threads:
    """Ranks of a group that are threads."""

    def __init__(self, count: int) -> None:
        self._place = threading.local()
        self._barrier = threading.Barrier(count)
        self._told: list[Any] = [None] * count

    def run(self, calls: list[Callable[[], Any]]) -> list[Any]:
        """What calls return that wait for each other, or raise."""

        def run(own: int) -> Any:
            self._place.own = own
            return calls[own]()

        with ThreadPoolExecutor(len(calls)) as pool:
            futures = [pool.submit(run, own) for own in range(len(calls))]
            return [one.exception(SECONDS) or one.result() for one in futures]

    def gather(self, told: Any) -> list[Any]:
        self._told[self._place.own] = told
        self._barrier.wait(SECONDS)
        heard = list(self._told)
        self._barrier.wait(SECONDS)
        return heard

    def all_gather_object(self, heard: list[Any], told: Any, group: Any) -> None:
        heard[:] = self.gather(told)

    def all_reduce(self, x: Any) -> Any:
        return torch.stack(self.gather(x.float())).sum(0).bfloat16()


def sums_of(count: int, limit_s: float = 60.0) -> list[RankSums]:
    """The sums of ranks that are connected."""
    elements = native.STEP_TOKENS * decoder_parts.HIDDEN
    memory = torch.zeros(native.RankSums.bytes(count, elements), dtype=torch.uint8)
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(count - 1)]
    of_ranks: list[list[socket.socket | None]] = [[None, *(first for first, _ in pairs)]]
    of_ranks += [[second, *[None] * (count - 1)] for _, second in pairs]
    return [
        RankSums(
            native, memory, elements=elements, ranks=range(RANKS, RANKS + count), own=own,
            limit_s=limit_s, connections=connections,
        )
        for own, connections in enumerate(of_ranks)
    ]  # fmt: skip


class Rank:
    """A rank's parts of layers, with caches of its own."""

    def __init__(
        self, whole: GroupSteps, own: int, sums: RankSums, *, is_compact: bool, is_shared: bool
    ) -> None:
        count = whole.count
        self.decoder = model(
            len(whole.layers), heads=HEADS, kv_heads=1, family=whole.family, **whole.parts
        )
        self.heads_of_keys = whole.kv_heads
        self.layers = layers_of(self.decoder)
        self.kernel = StreamingLinear(native)
        self.kernel.few_tokens, self.kernel.sums = native.FEW_TOKENS, sums
        self.weights = SharedWeights()
        self.caches = []
        linears = {}
        for number, (mine, theirs) in enumerate(zip(self.layers, whole.layers, strict=True)):
            for module, other in zip(mine.modules(), theirs.modules(), strict=True):
                if isinstance(module, Product):
                    self._take(module, other, own, count, mine)
                    kind = CompactWeight if is_compact else PackedWeight
                    held = kind.made(pack(module.matrix.contiguous()), native)
                    assert held is not None
                    linears[module] = Linear(self.weights.moved(held), module.added)
                else:
                    for name, values in module.named_parameters(recurse=False):
                        values.data.copy_(other.get_parameter(name))
            attention = attends(mine)
            attention.layer_name = f"{own}.{number}"
            attention.impl = cpu_attn.CPUAttentionBackendImpl(
                HEADS, HEAD, SCALE, 1, alibi_slopes=None, sliding_window=None,
                kv_cache_dtype="auto",
            )  # fmt: skip
            attention.impl.do_kv_cache_update = attends(theirs).impl.do_kv_cache_update
            attention.isa, attention._k_scale_float, attention._v_scale_float = whole.isa, 1.0, 1.0
            theirs_cache = whole.caches[number]
            shape = (len(theirs_cache), 1, *theirs_cache.shape[2:])
            self.caches.append(torch.full(shape, whole.unwritten, dtype=torch.bfloat16))
        if own and is_shared:
            self._share_caches()
        self.linears = linears
        self.known = known_layers(self.decoder, linears, self.kernel)
        self.offer = PromptOffer(
            [self.known], self.weights, whole.device, whole.most, whole.least,
            share=whole.share, kernel=self.kernel if whole.share else None,
        )  # fmt: skip
        self.made: Any = None
        self.columns: Any = None
        """Giver of columns of its MLPs in shared decode steps; None without these."""

    def _take(self, module: Product, other: Product, own: int, count: int, layer: Any) -> None:
        qkv, output, gate_up, down = (
            layer.self_attn.qkv_proj, layer.self_attn.o_proj, layer.mlp.gate_up_proj,
            layer.mlp.down_proj,
        )  # fmt: skip
        module.tp_size, module.reduce_results, module.input_is_parallel = count, True, True
        if module in {output, down}:
            module.matrix, module.added = other.matrix.chunk(count, 1)[own], other.added
            return
        assert module in {qkv, gate_up}
        kinds = [HEADS * count * HEAD, *[self.heads_of_keys * HEAD] * 2]
        sizes = kinds if module is qkv else [len(other.matrix) // 2] * 2
        # Ranks that are more than there are heads of keys share them, as vLLM has it.
        parts = [count, *[self.heads_of_keys] * 2] if module is qkv else [count] * 2

        def mine(x: Any) -> Any:
            return torch.cat([
                one.chunk(number)[own * number // count]
                for one, number in zip(x.split(sizes), parts, strict=True)
            ])  # fmt: skip

        module.matrix = mine(other.matrix)
        module.added = None if other.added is None else mine(other.added)

    def _share_caches(self) -> None:
        """As compat/worker/kv_cache.py has it: all layers in one piece of memory."""
        size = sum(cache.nbytes for cache in self.caches)
        pages = SharedPages.made(-(-size // STEP) * STEP, "caches")
        pages.seal()
        pages.keep()
        each = self.caches[0].numel()
        whole = pages.memory.view(torch.bfloat16)
        self.caches = [
            whole[at * each : (at + 1) * each].view(cache.shape).copy_(cache)
            for at, cache in enumerate(self.caches)
        ]


class GroupSteps(Steps):
    """Whole layers, and what each rank of a group has of them.

    Args:
        monkeypatch: as for `Steps`.
        count: ranks.
        is_shared: whether ranks have their caches in shared memory.
        limit_s: longest wait for another rank.
        device: where the first rank has prompts computed.
        layers: of the stage.
        kv_heads: of all ranks, each of which has one; None is one for each rank.
        share: of the columns of MLPs that the device computes in decode steps.
        wide: columns of a rank's MLP.
        blocks: of a cache.
        unwritten: as for `Steps`.
        parts: other arguments of `decoder_parts.model`.

    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, count: int = 2, *, family: str = "llama",
        is_compact: bool = False, is_shared: bool = True, limit_s: float = 60.0, least: int = 8,
        most: int = 512, isa: str = "vec", device: torch.device = CPU,
        layers: int = 2, kv_heads: int | None = None, share: float | Literal["auto"] = 0.0,
        wide: int = 64, blocks: int = 64, unwritten: float = torch.nan, **parts: Any,
    ) -> None:  # fmt: skip
        monkeypatch.setattr(decoder_parts, "WIDE", wide * count)
        super().__init__(
            monkeypatch, family=family, heads=HEADS * count, kv_heads=kv_heads or count,
            least=least, most=most, isa=isa, has_memory=False, layers=layers, blocks=blocks,
            unwritten=unwritten, **parts,
        )  # fmt: skip
        monkeypatch.setattr(decoder_parts, "WIDE", wide)
        self.count, self.family, self.parts, self.share = count, family, parts, share
        self.least, self.most, self.device = least, most, device
        self.of_rank = HEADS, 1
        self.threads = Threads(count)
        monkeypatch.setattr(dist, "all_gather_object", self.threads.all_gather_object)
        monkeypatch.setattr(
            post_attention, "tensor_model_parallel_all_reduce", self.threads.all_reduce
        )
        # Its memory belongs to the process, which these ranks have in common.
        stock, lock = ops.cpu_attention_with_kv_cache, threading.Lock()

        def attend_alone(*given: Any, **more: Any) -> Any:
            with lock:
                return stock(*given, **more)

        monkeypatch.setattr(ops, "cpu_attention_with_kv_cache", attend_alone)
        self.sums = sums_of(count, limit_s)
        self.ranks = [
            Rank(self, own, sums, is_compact=is_compact, is_shared=is_shared)
            for own, sums in enumerate(self.sums)
        ]

    def join(self) -> list[Any]:
        """Have the ranks come together; what computes each one's prompts."""
        found = self.threads.run(
            [lambda rank=rank, sums=sums: joining.joined(None, sums, rank.offer)
             for rank, sums in zip(self.ranks, self.sums, strict=True)]
        )  # fmt: skip
        for rank, groups in zip(self.ranks, found, strict=True):
            if isinstance(groups, Exception):
                raise groups
            group = None if groups is None else groups[0]
            rank.made = DecoderLayers(rank.known, rank.kernel, group)
            if group is not None:
                rank.kernel.limits = replace(
                    rank.kernel.limits, gpu_from=group.from_tokens, gpu_room=group.tokens
                )
            if group is not None and not group.shares.is_empty:
                rank.columns = group.columns_of(len(rank.known))
                rank.made.shared = SharedDecode(rank.known, rank.kernel, rank.columns, group.shares)
        return found

    @property
    def all_caches(self) -> list[torch.Tensor]:
        return [*self.caches, *(cache for rank in self.ranks for cache in rank.caches)]

    def give_columns(self, parts: int) -> list[Any]:
        """Have so many parts of all columns given away; what computes them, by rank."""
        for rank in self.ranks:
            rank.made.shared.shares = Shares((Share(1, parts),))
        return [rank.columns for rank in self.ranks]

    def step(
        self, *parts: tuple[Conversation, int, int], residual: Any = None, is_dummy: bool = False
    ) -> list[Any]:
        """What each rank gives for a step, or raises.

        Args:
            parts: as of `Steps.begin`.
            residual: of all its tokens.
            is_dummy: whether it is a run of vLLM's without requests.

        """
        positions, hidden = self.begin(parts)
        for rank in self.ranks:
            for number, cache in enumerate(rank.caches):
                metadata, _, _, slots = self.contexts[attends(self.layers[number]).layer_name]
                attention = attends(rank.layers[number])
                context = (None, attention, cache, None) if is_dummy else (
                    metadata, attention, cache, slots
                )  # fmt: skip
                self.contexts[attention.layer_name] = context
        return self.threads.run(
            [lambda rank=rank: rank.made(positions, hidden, residual) for rank in self.ranks]
        )

    def check(self, *parts: tuple[Conversation, int, int]) -> None:
        found = self.step(*parts)
        for one in found:
            if isinstance(one, Exception):
                raise one
        (y, total), *others = found
        self.compare(y, total, parts)
        for other in others:
            assert torch.equal(other[0], y)
            assert torch.equal(other[1], total)

    def end(self, own: int) -> None:
        """Let a rank's connections be those of a process that has ended."""
        for connection in self.sums[own].connections:
            if connection is not None:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)


class GroupDecoding:
    """A request that a group decodes, whose steps the GPU has columns of.

    Args:
        monkeypatch: as for `Steps`.
        count: ranks.
        given: of `GroupSteps`.

    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int, **given: Any) -> None:
        self.steps = GroupSteps(
            monkeypatch, count, layers=5, share=0.6, wide=160, most=512, **given
        )
        self.steps.join()
        self.columns = self.steps.give_columns(12)
        self.request, self.done = self.steps.request(900), 0

    def step(self, tokens: int = 1) -> list[int]:
        """Compute the request's next tokens; in how many steps the GPU had a part, by rank."""
        self.steps.check((self.request, self.done, self.done + tokens))
        self.done += tokens
        return [one.steps for one in self.columns]

    def fails(self) -> list[Any]:
        """What each rank gives for a step, or raises."""
        return self.steps.step((self.request, self.done, self.done + 1))

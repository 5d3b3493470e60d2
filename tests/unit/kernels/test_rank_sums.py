"""Sums over the ranks of a group in memory that their processes share."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

import decoder_parts  # noqa: E402
import torch.distributed as dist  # noqa: E402
from decoder_parts import HEAD, attends, known_layers, linears, model  # noqa: E402
from native_module import BETWEEN_PRODUCTS, LEVELS, level_of, native, needs_native  # noqa: E402
from test_decode_step import CLOSE, LAYERS, Requests  # noqa: E402
from vllm.v1.attention.backends import cpu_attn  # noqa: E402

from ray_hetero.distributed import shared_sums  # noqa: E402
from ray_hetero.kernels.formats import CompactWeight, PackedWeight  # noqa: E402
from ray_hetero.kernels.formats.base import pack  # noqa: E402
from ray_hetero.kernels.layers import decode_step, fusible_layers  # noqa: E402
from ray_hetero.kernels.layers.decoder_layers import DecoderLayers  # noqa: E402
from ray_hetero.kernels.layers.layer_parts import (  # noqa: E402
    Linear,
    Norm,
    PostAttention,
    QkvInput,
)
from ray_hetero.kernels.layers.post_attention import PostAttentionBlock  # noqa: E402
from ray_hetero.kernels.linear.rank_sums import RankSums, SumTerms, meeting  # noqa: E402
from ray_hetero.kernels.linear.streaming_linear import StreamingLinear  # noqa: E402
from ray_hetero.runtime import sealed_memory, unix_sockets  # noqa: E402

pytestmark = [needs_native, pytest.mark.timeout(300)]

HERE = Path(__file__).parents[1]
PROCESS_SECONDS = 120.0
HIDDEN, ATTENDED, WIDE, QKV = 256, 384, 768, 320


class Rank:
    """A rank in a process of its own."""

    def __init__(self, **given: Any) -> None:
        inherited = [given["memory"], *(one for one in given["connections"] if one >= 0)]
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "rank_sums_process.py"), json.dumps(given)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=inherited,
            env={**os.environ, "OMP_NUM_THREADS": "2"},
        )  # fmt: skip

    def told(self) -> dict[str, Any]:
        """The next line that it prints; the test's own limit ends the wait."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the rank has ended with {self.process.wait(PROCESS_SECONDS)}"
        told: dict[str, Any] = json.loads(line)
        return told

    def begin(self) -> None:
        """Let it go on once all are ready: from then on each has to be there within the limit."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self) -> None:
        self.process.kill()
        self.process.wait(PROCESS_SECONDS)
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()


@contextlib.contextmanager
def ranks(count: int, *, limit_s: float, doing: list[str]) -> Iterator[list[Rank]]:
    """Ranks of a group, each connected to the first one."""
    size = native.RankSums.bytes(count, 1 << 17)
    memory = sealed_memory.made("sums", size)
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(count - 1)]
    firsts = [-1, *(first.fileno() for first, _ in pairs)]
    others = [[second.fileno()] + [-1] * (count - 1) for _, second in pairs]
    made = [
        Rank(memory=memory, own=own, members=count, limit_s=limit_s, doing=doing[own],
             connections=connections)
        for own, connections in enumerate([firsts, *others])
    ]  # fmt: skip
    os.close(memory)
    for pair in pairs:
        for end in pair:
            end.close()
    try:
        for rank in made:
            rank.told()
        for rank in made:
            rank.begin()
        yield made
    finally:
        for rank in made:
            rank.end()


def as_bf16(values: Any) -> Any:
    """The nearest bf16 of finite values."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


@pytest.mark.parametrize("count", [2, 3])
def test_all_ranks_hold_the_same_bits_at_each_level(count: int) -> None:
    from rank_sums_process import SIZES, digest, numbers

    expected = {}
    for elements in SIZES:
        total = numbers(0, elements)
        for member in range(1, count):
            total = total + numbers(member, elements)
        expected[elements] = digest(as_bf16(total))
    with ranks(count, limit_s=100, doing=["check"] * count) as found:
        for rank in found:
            for level in LEVELS:
                for elements in SIZES:
                    for _ in range(3):
                        told = rank.told()
                        assert told["level"] == level
                        assert told["sums"] == expected[elements], (level, elements)


@pytest.mark.parametrize(("count", "lost"), [(2, 0), (2, 1), (3, 2)])
def test_a_rank_that_is_killed_is_named_at_once(count: int, lost: int) -> None:
    with ranks(count, limit_s=10_000, doing=["repeat"] * count) as found:
        for rank in found:
            rank.told()
        found[lost].process.kill()
        for rank in found[:lost] + found[lost + 1 :]:
            error = f"rank {10 + lost}, of the same tensor-parallel group, has ended"
            assert rank.told() == {"error": error}


@pytest.mark.parametrize(("count", "lost"), [(2, 0), (3, 1)])
def test_a_rank_that_is_stopped_is_named_within_the_limit(count: int, lost: int) -> None:
    with ranks(count, limit_s=5.5, doing=["repeat"] * count) as found:
        for rank in found:
            rank.told()
        found[lost].process.send_signal(signal.SIGSTOP)
        error = (
            f"rank {10 + lost}, of the same tensor-parallel group, was not there in 5.5 s "
            "(exchange.timeout_s)"
        )
        for rank in found[:lost] + found[lost + 1 :]:
            assert rank.told() == {"error": error}
        # It must not go on by itself when it is woken up.
        found[lost].process.send_signal(signal.SIGCONT)
        assert found[lost].told() == {"error": error}


def test_ranks_that_compute_different_steps_find_out() -> None:
    with ranks(2, limit_s=100, doing=["repeat", "other"]) as found:
        for rank in found:
            rank.told()
        errors = {rank.told()["error"] for rank in found}
    assert len(errors) == 1
    assert "of the same tensor-parallel group, computes another step" in errors.pop()


# ---- layers of which each rank has a part, the ranks being threads ------------------------------


def shared(count: int, elements: int) -> list[RankSums]:
    memory = torch.zeros(native.RankSums.bytes(count, elements), dtype=torch.uint8)
    return [
        RankSums(
            native, memory, elements=elements, ranks=range(count), own=own, limit_s=60,
            connections=[None] * count,
        )
        for own in range(count)
    ]  # fmt: skip


def together(calls: list[Any]) -> list[Any]:
    """What calls return that wait for each other."""
    results: list[Any] = [None] * len(calls)

    def run(place: int) -> None:
        results[place] = calls[place]()

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PROCESS_SECONDS)
    assert all(result is not None for result in results)
    return results


def linear(weight: Any, bias: Any = None, *, is_compact: bool) -> Linear:
    kind = CompactWeight if is_compact else PackedWeight
    held = kind.made(pack(weight.contiguous()), native)
    assert held is not None
    return Linear(held, bias)


def parts_of(
    count: int, *, is_last: bool, is_compact: bool, has_mlp: bool = True
) -> list[PostAttention]:
    """A layer's parts, and those that each rank has of it."""
    torch.manual_seed(count)
    shapes = (HIDDEN, ATTENDED), (WIDE, HIDDEN), (WIDE, HIDDEN), (HIDDEN, WIDE)
    output, gate, up, down = (
        torch.randn(shape).mul_(shape[1] ** -0.5).bfloat16() for shape in shapes
    )
    output_bias, down_bias = torch.randn(2, HIDDEN).bfloat16().float()
    qkv = torch.randn(QKV, HIDDEN).mul_(HIDDEN**-0.5).bfloat16()
    norms = [Norm(torch.rand(HIDDEN).add_(0.5).bfloat16(), 1e-5) for _ in range(2)]

    def made(own: int, of: int) -> PostAttention:
        first = own == 0
        gate_up = torch.cat([one.chunk(of)[own] for one in (gate, up)])
        following = QkvInput(norms[1], linear(qkv, is_compact=is_compact))
        projection = linear(
            output.chunk(of, 1)[own], output_bias if first else None, is_compact=is_compact
        )
        if not has_mlp:
            return PostAttention(projection, norms[0])
        return PostAttention(
            projection,
            norms[0],
            linear(gate_up, is_compact=is_compact),
            linear(down.chunk(of, 1)[own], down_bias if first else None, is_compact=is_compact),
            None if is_last else following,
        )

    return [made(0, 1), *(made(own, count) for own in range(count))]


@pytest.mark.parametrize("level", BETWEEN_PRODUCTS)
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize(
    ("is_last", "has_mlp"), [(False, True), (True, True), (True, False)],
    ids=["next", "MLP", "norm"],
)  # fmt: skip
def test_parts_of_a_layer_give_what_the_whole_gives(
    is_last: bool, has_mlp: bool, count: int, level: str
) -> None:
    whole, *parts = parts_of(count, is_last=is_last, is_compact=count == 2, has_mlp=has_mlp)
    sums = shared(count, native.STEP_TOKENS * HIDDEN)

    def block(parts: PostAttention, sums: RankSums | None) -> PostAttentionBlock:
        kernel = StreamingLinear(native, level_of(level))
        kernel.sums = sums
        return PostAttentionBlock(parts, kernel)

    alone = block(whole, None)
    blocks = [block(one, own) for one, own in zip(parts, sums, strict=True)]
    for tokens in (1, 3, 17, 32):
        attended = torch.randn(tokens, ATTENDED).bfloat16()
        residual = torch.randn(tokens, HIDDEN).bfloat16()
        expected = alone(attended, residual)
        slices = [one.contiguous() for one in attended.chunk(count, 1)]
        found = together([partial(one, x, residual) for one, x in zip(blocks, slices, strict=True)])
        for y, total in found:
            torch.testing.assert_close(y.float(), expected[0].float(), rtol=2**-6, atol=2**-5)
            torch.testing.assert_close(total.float(), expected[1].float(), rtol=2**-6, atol=2**-5)
            assert torch.equal(y, found[0][0])
            assert torch.equal(total, found[0][1])


class Whole(Requests):
    """Layers of all heads, and what each rank of a group has of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, lengths: list[int], count: int) -> None:
        monkeypatch.setattr(decoder_parts, "WIDE", 64 * count)
        super().__init__(monkeypatch, lengths, heads=3 * count, kv_heads=count)
        self.count = count

    def part(self, own: int) -> Any:
        """The model of a rank."""
        made = model(LAYERS, heads=3, kv_heads=1)
        for theirs, mine in zip(self.layers, list(made.layers)[1:-1], strict=True):
            qkv = theirs.self_attn.qkv_proj.matrix.split(
                [3 * self.count * HEAD, self.count * HEAD, self.count * HEAD]
            )
            gate_up = theirs.mlp.gate_up_proj.matrix.chunk(2)
            slices = {
                mine.self_attn.qkv_proj: torch.cat([one.chunk(self.count)[own] for one in qkv]),
                mine.self_attn.o_proj: theirs.self_attn.o_proj.matrix.chunk(self.count, 1)[own],
                mine.mlp.gate_up_proj: torch.cat([one.chunk(self.count)[own] for one in gate_up]),
                mine.mlp.down_proj: theirs.mlp.down_proj.matrix.chunk(self.count, 1)[own],
            }
            for product, matrix in slices.items():
                product.matrix, product.tp_size = matrix.contiguous(), self.count
                product.reduce_results = product.input_is_parallel = True
            for norm in ("input_layernorm", "post_attention_layernorm"):
                getattr(mine, norm).weight.data.copy_(getattr(theirs, norm).weight.data)
            attends(mine).impl = cpu_attn.CPUAttentionBackendImpl(
                3, HEAD, 0.2, 1, alibi_slopes=None, sliding_window=None, kv_cache_dtype="auto"
            )
        return made


FEW = [300, 1, 64]
MANY = [5 + 7 * number % 60 for number in range(70)]
"""So many that three ranks add up slices."""
BEST = LEVELS[-1] if LEVELS else ""


@pytest.mark.parametrize(
    ("lengths", "count", "level"),
    [
        *((FEW, count, level) for count in (2, 3) for level in BETWEEN_PRODUCTS),
        *((MANY, 2, level) for level in ("software_tiles", BEST)),
        (MANY, 3, BEST),
    ],
    ids=lambda one: len(one) if isinstance(one, list) else one,
)
def test_a_decode_step_of_ranks_gives_what_one_rank_gives(
    lengths: list[int], count: int, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Whole(monkeypatch, lengths, count)
    hidden, residual = whole.inputs(is_first=False)
    caches = whole.begin("vec")
    alone = whole.made(level)
    assert alone.decode_step is not None
    contexts = [whole.contexts[layer.self_attn.attn.layer_name] for layer in whole.layers]
    before = [cache.clone() for cache in caches]
    requests = decode_step.StepRequests(whole.positions, whole.slots, whole.lengths, whole.blocks)
    expected = alone.decode_step.run([requests], contexts[:1], contexts, hidden, residual)
    calls, kept, written = [], [], []
    for own, sums in enumerate(shared(count, native.STEP_TOKENS * decoder_parts.HIDDEN)):
        kernel = StreamingLinear(native, level_of(level))
        kernel.sums = sums
        rank = whole.part(own)
        layers = DecoderLayers(known_layers(rank, linears(rank), kernel), kernel)
        mine = [cache[:, own : own + 1].contiguous() for cache in before]
        given = [
            (made, module, cache, slots)
            for (made, module, _, slots), cache in zip(contexts, mine, strict=True)
        ]
        assert layers.decode_step is not None
        kept.append(layers)
        step = partial(layers.decode_step.run, [requests], given[:1], given, hidden, residual)
        calls.append(step)
        written.append(mine)
    found = together(calls)
    for y, total in found:
        torch.testing.assert_close(y.float(), expected[0].float(), **CLOSE)
        torch.testing.assert_close(total.float(), expected[1].float(), **CLOSE)
        assert torch.equal(y, found[0][0])
        assert torch.equal(total, found[0][1])
    for number, cache in enumerate(caches):
        together_again = torch.cat([mine[number] for mine in written], 1)
        torch.testing.assert_close(together_again.float(), cache.float(), **CLOSE)


def test_layers_of_a_group_are_left_to_vllm_without_shared_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rank = Whole(monkeypatch, [1], 2).part(0)
    kernel = StreamingLinear(native)
    layer, made = list(rank.layers)[1], linears(rank)
    why = fusible_layers.layer_of(rank, layer, made, kernel)
    assert why == "tensor-parallel ranks add their products up in between"
    kernel.sums = shared(2, native.STEP_TOKENS * decoder_parts.HIDDEN)[1]
    biases = [
        replace(made[one], bias=torch.zeros(decoder_parts.HIDDEN))
        for one in (layer.self_attn.o_proj, layer.mlp.down_proj)
    ]
    made |= dict(zip((layer.self_attn.o_proj, layer.mlp.down_proj), biases, strict=True))
    found = fusible_layers.layer_of(rank, layer, made, kernel)
    # The first rank adds biases.
    assert (found.parts.output.bias, found.parts.down.bias) == (None, None)
    layer.mlp.down_proj.reduce_results = False
    why = fusible_layers.layer_of(rank, layer, made, kernel)
    assert why == "tensor-parallel ranks add other products up than those that are known"


def test_a_missing_rank_is_an_error_of_a_collective() -> None:
    _, part, _ = parts_of(2, is_last=True, is_compact=False)
    kernel = StreamingLinear(native)
    memory = torch.zeros(native.RankSums.bytes(2, native.STEP_TOKENS * HIDDEN), dtype=torch.uint8)
    kernel.sums = RankSums(
        native, memory, elements=native.STEP_TOKENS * HIDDEN, ranks=[4, 5], own=0, limit_s=0.2,
        connections=[None, None],
    )  # fmt: skip
    block = PostAttentionBlock(part, kernel)
    given = torch.randn(1, ATTENDED // 2).bfloat16(), torch.randn(1, HIDDEN).bfloat16()
    # The second time too: what is in the memory is of no step any more.
    for _ in range(2):
        with pytest.raises(dist.DistError, match=r"^rank 5, .* not there in 0.2 s \(exchange\.tim"):
            block(*given)


def test_layers_need_room_for_their_sums() -> None:
    _, part, _ = parts_of(2, is_last=True, is_compact=False)
    kernel = StreamingLinear(native)
    kernel.sums = shared(2, HIDDEN)[0]
    with pytest.raises(ValueError, match="expected room for the sums of 128 × 256 elements"):
        PostAttentionBlock(part, kernel)


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(ValueError, match="of mine"), meeting(shared(2, 16)[0]):
        raise ValueError("of mine")


# ---- how the ranks come together ----------------------------------------------------------------

TERMS = SumTerms("portable", 32, 1 << 12, 8)


class Group:
    """Told objects of ranks that are threads, in the place of Gloo."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.barrier = threading.Barrier(count)
        self.told: list[Any] = [None] * count

    def gather(self, own: int, told: Any) -> list[Any]:
        self.told[own] = told
        self.barrier.wait(PROCESS_SECONDS)
        heard = list(self.told)
        self.barrier.wait(PROCESS_SECONDS)
        return heard


def joined(monkeypatch: pytest.MonkeyPatch, terms: list[SumTerms | None]) -> list[Any]:
    group, place = Group(len(terms)), threading.local()

    def all_gather_object(heard: list[Any], told: Any, group: Any) -> None:
        heard[:] = group.gather(place.own, told)

    monkeypatch.setattr(dist, "all_gather_object", all_gather_object)
    monkeypatch.setattr(dist, "get_rank", lambda: 4 + place.own)

    def join(own: int) -> Any:
        place.own = own
        ranks = range(4, 4 + len(terms))
        return [shared_sums.joined(group, list(ranks), native, terms[own], 60)]  # type: ignore[arg-type]

    return [one for (one,) in together([lambda own=own: join(own) for own in range(len(terms))])]


def test_ranks_that_agree_share_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    found = joined(monkeypatch, [TERMS] * 3)
    assert [one.is_first for one in found] == [True, False, False]
    x = [torch.randn(64) for _ in found]
    y = [torch.zeros(64, dtype=torch.bfloat16) for _ in found]

    def add(own: int) -> bool:
        found[own].native.run(
            x=x[own].data_ptr(), elements=64, y=y[own].data_ptr(), level=native.levels()[-1]
        )
        return True

    together([lambda own=own: add(own) for own in range(3)])
    for one in y:
        assert torch.equal(one, (x[0] + x[1] + x[2]).bfloat16())


@pytest.mark.parametrize("other", [None, SumTerms("portable", 4, 1 << 12, 8)])
def test_ranks_that_differ_share_nothing(
    other: SumTerms | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert joined(monkeypatch, [TERMS, other]) == [None, None]
    assert joined(monkeypatch, [other, TERMS]) == [None, None]


@pytest.mark.parametrize(
    ("module", "name"), [(sealed_memory, "made"), (unix_sockets, "bind_abstract")]
)
def test_where_the_system_gives_no_memory_nothing_is_shared(
    module: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*given: Any) -> Any:
        raise OSError("no more")

    monkeypatch.setattr(module, name, refuse)
    before = set(os.listdir("/proc/self/fd"))
    assert joined(monkeypatch, [TERMS, TERMS]) == [None, None]
    assert set(os.listdir("/proc/self/fd")) == before


def test_ranks_of_other_machines_share_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    machines = iter(["one", "another"])
    monkeypatch.setattr(shared_sums, "machine_id", lambda: next(machines))
    assert joined(monkeypatch, [TERMS, TERMS]) == [None, None]

"""Whole layers on the GPU give what whole sequences give, however these are cut into steps.

The GPU is the CPU here, with the same copies and the same order; on a GPU it is
tests/gpu/test_prefill_layers.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from decoder_parts import HIDDEN  # noqa: E402
from native_module import needs_native  # noqa: E402
from paged_steps import CPU, GPU_FAMILIES, Steps, write_tokens  # noqa: E402
from vllm import _custom_ops as ops  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402

from ray_hetero.errors import UnsupportedError  # noqa: E402
from ray_hetero.kernels.layers import decoder_layers, layer_tokens  # noqa: E402
from ray_hetero.kernels.layers.kv_layouts import unpack_blocks  # noqa: E402
from ray_hetero.kernels.layers.layer_parts import AttentionShape  # noqa: E402
from ray_hetero.kernels.layers.layer_tokens import LayerTokens  # noqa: E402
from ray_hetero.kernels.layers.step_rows import Request, one_prompt, step_rows  # noqa: E402
from ray_hetero.offload import layer_fusion  # noqa: E402
from ray_hetero.offload.prefill import gpu_layers, kv_transfer, layer_ops, offload_gpu  # noqa: E402
from ray_hetero.offload.prefill.gpu_attention import Lengths, attend, put_together  # noqa: E402
from ray_hetero.offload.prefill.gpu_layers import AttentionMemory  # noqa: E402
from ray_hetero.offload.prefill.offload_gpu import OffloadGpu  # noqa: E402
from ray_hetero.planning import prefill_memory  # noqa: E402
from ray_hetero.planning.prefill_memory import attention_bytes  # noqa: E402

current_platform.import_kernels()
pytestmark = needs_native


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_memory, "PIECE_BYTES", 128 << 10)
    # Two blocks of 32 tokens and two heads of keys.
    monkeypatch.setattr(prefill_memory, "KV_SPAN_BYTES", 2 * 32 * 2 * 2 * 64 * 2)
    monkeypatch.setattr(offload_gpu, "LEAST_BYTES", 1)
    monkeypatch.setattr(layer_ops, "CHUNK_TOKENS", 24)


@pytest.mark.parametrize("family", GPU_FAMILIES)
def test_prompts_alone_and_together(
    family: str, monkeypatch: pytest.MonkeyPatch, on_gpu: list[int]
) -> None:
    steps = Steps(monkeypatch, family=family)
    one, other, third = (steps.request(tokens) for tokens in (70, 33, 9))
    steps.check((one, 0, 70))
    steps.check((other, 0, 33), (third, 0, 9))
    assert on_gpu == [70, 42]


@pytest.mark.parametrize("isa", ["vec", "amx"])
def test_chunks_of_a_prompt(isa: str, monkeypatch: pytest.MonkeyPatch, on_gpu: list[int]) -> None:
    steps = Steps(monkeypatch, isa=isa)
    request, other = steps.request(300), steps.request(200)
    steps.check((request, 0, 50))
    steps.check((request, 50, 64), (other, 0, 40))
    # Of cached keys there are spans with tokens of one request, of both, and partial blocks.
    steps.check((request, 64, 180), (other, 40, 45))
    steps.check((other, 45, 190), (request, 180, 300))
    # Five tokens are as few as a request has that verifies drafts.
    assert on_gpu == [50, 54, 116, 265]


def test_a_prefix_that_another_request_has_computed(
    monkeypatch: pytest.MonkeyPatch, on_gpu: list[int]
) -> None:
    steps = Steps(monkeypatch)
    first = steps.request(100)
    steps.check((first, 0, 100))
    second = steps.request(120, after=first, shared=3)
    steps.check((second, 96, 120))
    assert on_gpu == [100, 24]


def test_a_prefix_that_another_request_computes_in_the_same_step(
    monkeypatch: pytest.MonkeyPatch, on_gpu: list[int]
) -> None:
    steps = Steps(monkeypatch)
    first = steps.request(100)
    second = steps.request(70, after=first, shared=2)
    third = steps.request(65, after=first, shared=2)
    # The last has one token left, which the cores would decode before its prefix is there.
    steps.check((first, 0, 100), (second, 64, 70), (third, 64, 65))
    assert on_gpu == [107]


@pytest.mark.parametrize("is_compact", [False, True])
def test_requests_decode_beside_prompts(
    is_compact: bool, monkeypatch: pytest.MonkeyPatch, on_gpu: list[int]
) -> None:
    steps = Steps(monkeypatch, is_compact=is_compact)
    one, other, prompt = (steps.request(tokens) for tokens in (60, 92, 150))
    steps.check((one, 0, 58), (other, 0, 88))
    steps.check((one, 58, 59), (prompt, 0, 70), (other, 88, 89))
    # The second verifies drafts.
    layer_tokens.take()
    steps.check((prompt, 70, 150), (one, 59, 60), (other, 89, 92))
    assert on_gpu == [146, 70, 80]
    layers = len(steps.caches)
    assert layer_tokens.take() == LayerTokens(native=4 * layers, on_gpu=80 * layers)


def test_requests_with_few_cached_tokens_are_computed_with_the_prompts(
    monkeypatch: pytest.MonkeyPatch, on_gpu: list[int]
) -> None:
    steps = Steps(monkeypatch, most_sent=58 + 88)
    one, other, prompt = (steps.request(tokens) for tokens in (60, 92, 150))
    steps.check((one, 0, 58), (other, 0, 88))
    steps.check((one, 58, 59), (prompt, 0, 70), (other, 88, 89))
    # Two cached tokens more: the cores decode both.
    steps.check((prompt, 70, 150), (one, 59, 60), (other, 89, 92))
    assert on_gpu == [146, 72, 80]


def test_cached_tokens_that_are_sent_by_hand() -> None:
    def layer(keys: int) -> Any:
        linears = [SimpleNamespace(weight=SimpleNamespace(shape=(64, 96))) for _ in range(4)]
        return SimpleNamespace(
            input=SimpleNamespace(qkv=linears[0]), parts=SimpleNamespace(linears=linears[1:]),
            attention=SimpleNamespace(shape=AttentionShape(4, 2, keys // 2)),
        )  # fmt: skip

    # 2 · 4 · 64 · 96 weights, 2 · 2 · 48 elements of a token: 256 for each, of which a sixteenth.
    assert decoder_layers.most_sent([layer(48), layer(48)]) == 16


def test_a_dummy_run_is_made_on_the_gpu_and_leaves_no_keys(
    monkeypatch: pytest.MonkeyPatch, on_gpu: list[int]
) -> None:
    steps = Steps(monkeypatch)
    steps.begin([(steps.request(40), 0, 40)])
    for name, (_, attention, cache, _) in steps.contexts.items():
        steps.contexts[name] = None, attention, cache, None
    found = steps.made(torch.arange(40), torch.randn(40, HIDDEN).bfloat16(), None)
    assert on_gpu == [40]
    assert all(bool(one.isfinite().all()) for one in found)
    assert all(bool(cache.isnan().all()) for cache in steps.caches)


def test_a_residual_is_added_first(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch)
    request = steps.request(40)
    positions, hidden = steps.begin([(request, 0, 40)])
    residual = torch.randn(40, HIDDEN).bfloat16()
    kept = hidden.clone(), residual.clone()
    y, total = steps.made(positions, hidden, residual)
    assert torch.equal(hidden, kept[0])
    assert torch.equal(residual, kept[1])
    request.inputs = hidden + residual
    torch.testing.assert_close(
        y.float() + total.float(), steps.expected(request), rtol=2**-5, atol=2**-3
    )


def test_an_error_in_the_gpus_thread_is_raised_in_the_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = Steps(monkeypatch)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(gpu_layers, "put_together", fail)
    request = steps.request(100)
    steps.check((request, 0, 50))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        steps.check((request, 50, 100))


def test_a_gpu_that_runs_out_of_memory_leaves_attention_to_the_cores(
    monkeypatch: pytest.MonkeyPatch, on_gpu: list[int]
) -> None:
    steps = Steps(monkeypatch)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(gpu_layers, "attend", fail)
    monkeypatch.setattr(steps.made, "one_by_one", lambda *given: given)
    positions, hidden = steps.begin([(steps.request(40), 0, 40)])
    layer_tokens.take()
    for _ in range(2):
        assert steps.made(positions, hidden, None)[1] is hidden
    assert on_gpu == [40]
    assert layer_tokens.take().on_gpu == 0


def test_memory_that_is_not_there_is_said_with_what_it_costs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = OffloadGpu(CPU, 64)

    def no_memory(*args: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore")

    monkeypatch.setattr(gpu_layers, "KvReturns", no_memory)
    with pytest.raises(UnsupportedError, match=r"0\.0 GiB more .* allocate 2\.00 GiB\. Prompts"):
        AttentionMemory(gpu, AttentionShape(4, 2, 64))


def test_memory_by_hand() -> None:
    # Two results of 4096 elements, two layers' 1024 of keys and as many of values, two bytes each.
    spans = 3 * prefill_memory.KV_SPAN_BYTES
    assert attention_bytes(32, 8, 128, 100) == 100 * 2 * (2 * 4096 + 2 * 2 * 1024) + spans


def test_slots_are_not_sorted_where_no_tokens_are_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    sorted_ones: list[torch.Tensor] = []
    sort = torch.sort

    def sort_and_note(x: torch.Tensor) -> Any:
        sorted_ones.append(x)
        return sort(x)

    monkeypatch.setattr(torch, "sort", sort_and_note)
    slots = torch.arange(32, 40)
    new = Request(0, 8, 0, ())
    assert kv_transfer.spans_of([new], slots, 16, 4, CPU) == []
    assert not sorted_ones
    (span,) = kv_transfer.spans_of([replace(new, cached=16, blocks=(1,))], slots, 16, 4, CPU)
    assert (span.runs, span.tokens) == (((1, 1),), 16)
    assert len(sorted_ones) == 1


@pytest.mark.parametrize("isa", ["vec", "amx"])
def test_blocks_are_read_token_by_token(isa: str) -> None:
    count, heads, block, size = 2, 3, 32, 64
    keys, values = torch.randn(2, count, block, heads, size).bfloat16()
    blocks = torch.empty(count, heads, block, 2 * size, dtype=torch.bfloat16)
    slots = torch.arange(count * block)
    write_tokens(keys.flatten(0, 1), values.flatten(0, 1), blocks, slots, isa)
    if isa == "vec":
        expected = torch.zeros_like(blocks)
        halves = expected.view(count, heads, 2 * block, size).chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(
            keys.flatten(0, 1), values.flatten(0, 1), *halves, slots, isa
        )
        assert torch.equal(blocks, expected)
    found = torch.empty(2, count * block, heads, size, dtype=torch.bfloat16)
    unpack_blocks(blocks, isa, found)
    assert torch.equal(found[0], keys.flatten(0, 1))
    assert torch.equal(found[1], values.flatten(0, 1))


def test_attention_to_keys_in_parts_is_attention_to_all_of_them() -> None:
    torch.manual_seed(0)
    queries, keys, values = (torch.randn(n, h, 32) for n, h in ((11, 4), (50, 2), (50, 2)))
    both, first, second, of_second = (
        Lengths.of(lengths, CPU) for lengths in ([5, 6], [20, 30], [20], [5])
    )
    whole = attend(queries, keys, values, both, first, 0.2, is_causal=False)
    # The second sequence's last ten keys apart, and all of the first one's.
    part = attend(queries[5:], keys[20:40], values[20:40], Lengths.of([6], CPU), second, 0.2,
                  is_causal=False)  # fmt: skip
    ten = Lengths.of([10], CPU)
    some = attend(queries[5:], keys[40:], values[40:], Lengths.of([6], CPU), ten, 0.2,
                  is_causal=False)  # fmt: skip
    put_together(part, some, None, uses_triton=False)
    torch.testing.assert_close(part.values, whole.values[5:])
    torch.testing.assert_close(part.lse, whole.lse[:, 5:])
    alone = attend(queries, keys[:30], values[:30], both, Lengths.of([20, 10], CPU), 0.2,
                   is_causal=False)  # fmt: skip
    rest = attend(queries[5:], keys[30:], values[30:], Lengths.of([6], CPU), second, 0.2,
                  is_causal=False)  # fmt: skip
    put_together(alone, rest, torch.arange(5, 11), uses_triton=False)
    torch.testing.assert_close(alone.values, whole.values)
    assert of_second.most == 5


TABLE = torch.tensor([[1, 2, 3], [4, 5, 0], [6, 7, 8]], dtype=torch.int32)


def test_rows_of_a_step() -> None:
    # A request that decodes, a chunk behind 40 tokens, and a request without tokens.
    rows = step_rows([0, 1, 21, 21], [90, 60, 70], TABLE, 32, 4)
    assert rows.decoding.tolist() == rows.decoding_rows.tolist() == [0]
    assert rows.decoding_lengths.tolist() == [90]
    assert rows.rows == slice(1, 21)
    assert rows.requests == (Request(0, 20, 40, (4, 5)),)
    assert rows.tokens == 20
    # Two prompts around a request that verifies a draft.
    rows = step_rows([0, 10, 12, 32], [10, 33, 20], TABLE, 32, 4)
    assert rows.decoding.tolist() == [1, 1]
    assert rows.decoding_rows.tolist() == [10, 11]
    assert rows.decoding_lengths.tolist() == [32, 33]
    assert isinstance(rows.rows, torch.Tensor)
    assert rows.rows.tolist() == [*range(10), *range(12, 32)]
    assert rows.requests == (Request(0, 10, 0, ()), Request(10, 20, 0, ()))


def test_more_requests_than_the_cores_decode_are_prompts() -> None:
    rows = step_rows([0, 1, 2, 12], [90, 60, 70], TABLE, 32, 1)
    assert rows.decoding.tolist() == []
    assert [request.tokens for request in rows.requests] == [1, 1, 10]
    # So are those whose cached tokens, 89 and 59, are few enough to be sent.
    for most_sent, decoding in ((148, []), (147, [0, 1])):
        rows = step_rows([0, 1, 2, 12], [90, 60, 70], TABLE, 32, 4, most_sent)
        assert rows.decoding.tolist() == decoding
    assert one_prompt(5).requests == (Request(0, 5, 0, ()),)


def test_a_request_that_reads_what_another_one_writes_is_not_decoded_beside_it() -> None:
    table = torch.tensor([[1, 2, 3], [1, 2, 9], [6, 7, 8]], dtype=torch.int32)
    # The second's first two blocks are the first one's, which are computed now.
    rows = step_rows([0, 96, 97, 98], [96, 65, 70], table, 32, 4)
    assert rows.decoding.tolist() == [2]
    # They were computed before: the first one's chunk begins behind them.
    rows = step_rows([0, 32, 33, 34], [96, 65, 70], table, 32, 4)
    assert rows.decoding.tolist() == [1, 2]
    # A prompt whose cached block is the one that a request fills by decoding.
    table = torch.tensor([[1, 2], [1, 4]], dtype=torch.int32)
    rows = step_rows([0, 1, 21], [32, 52], table, 32, 4)
    assert rows.decoding.tolist() == []


def test_kernels_give_what_torch_gives() -> None:
    pytest.importorskip("triton")
    # Triton decides when it is imported whether it interprets.
    code = """
import torch
from ray_hetero.offload.expand import compact_expansion
from ray_hetero.offload.prefill import layer_ops
from ray_hetero.offload.prefill.gpu_attention import rotate
from ray_hetero.kernels.layers.layer_parts import Norm
assert compact_expansion._is_right(torch.device("cpu"))
for size, half in ((64, 32), (96, 24)):
    rows = torch.randn(3, 7 * size).bfloat16()
    # Queries and keys are followed by values, which stay as they are.
    heads = [rows.clone().view(3, 7, size)[:, :5] for _ in range(2)]
    cos, sin = torch.rand(2, 3, 1, half)
    rotate(heads[0], cos, sin, uses_triton=False)
    rotate(heads[1], cos, sin, uses_triton=True)
    assert not torch.equal(heads[0], rows.view(3, 7, size)[:, :5])
    torch.testing.assert_close(heads[0], heads[1], rtol=2**-7, atol=2**-7)
for columns, kind, adds in ((4096, "rms", True), (96, "rms_plus_one", True), (200, "rms", False)):
    y, total = torch.randn(2, 5, columns).bfloat16()
    norm = Norm(torch.rand(columns).bfloat16(), 1e-5, kind)
    assert layer_ops.has_norm(norm, columns)
    expected = total + y if adds else total.clone()
    x = torch.empty_like(total)
    layer_ops.add_and_norm_at_once(y if adds else None, total, norm, norm.weight, x)
    # The interpreter cuts what a GPU rounds.
    torch.testing.assert_close(total, expected, rtol=2**-7, atol=0)
    torch.testing.assert_close(x, norm(expected), rtol=2**-6, atol=2**-8)
for columns in (96, 2048, 5632):
    y, x = 3 * torch.randn(4, 2 * columns), torch.empty(4, columns).bfloat16()
    y = y.bfloat16()
    layer_ops.activate_at_once(y, x)
    gate, up = y.chunk(2, dim=-1)
    torch.testing.assert_close(x, torch.nn.functional.silu(gate) * up, rtol=2**-6, atol=2**-8)
print(True)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.stdout.strip().endswith("True"), done.stderr


def test_layers_whose_weights_are_too_small_for_the_gpu_stay_on_the_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(offload_gpu, "LEAST_BYTES", 1 << 30)
    steps = Steps(monkeypatch, has_memory=False)
    assert steps.made._on_gpu is None
    kernel = steps.made._kernel
    assert layer_fusion._memory(steps.known, kernel, {}) is None

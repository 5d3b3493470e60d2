"""Whole decoder layers on a real GPU, as a CPU rank has it compute them; engines are in
test_prompt_gpu.py."""

from __future__ import annotations

import select
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cpu_rank import layout, replace_streams
from gpu_host import IS_PRETENDED, needs_gpus

sys.path.append(str(Path(__file__).parents[1] / "unit"))
pytest.register_assert_rewrite("embeddings", "group_steps", "paged_steps")

from decoder_parts import HIDDEN  # noqa: E402
from group_steps import GroupSteps  # noqa: E402
from native_module import needs_native  # noqa: E402
from paged_steps import GPU_FAMILIES, Steps  # noqa: E402

from ray_hetero.compat.models.flash_attention import flash_attention_3  # noqa: E402
from ray_hetero.distributed.messages import Packing  # noqa: E402
from ray_hetero.kernels.formats.fp4 import Fp4Weight  # noqa: E402
from ray_hetero.kernels.formats.fp8 import Fp8Weight  # noqa: E402
from ray_hetero.kernels.formats.integers import Int4Weight, Int8Weight  # noqa: E402
from ray_hetero.kernels.formats.scaled import Layout, ScaledWeight  # noqa: E402
from ray_hetero.kernels.layers.kv_layouts import unpack_blocks  # noqa: E402
from ray_hetero.offload.decode import column_pieces  # noqa: E402
from ray_hetero.offload.expand import compact_expansion, scaled_expansion  # noqa: E402
from ray_hetero.offload.prefill import offload_gpu, stage_output  # noqa: E402
from ray_hetero.offload.prefill.gpu_attention import (  # noqa: E402
    Lengths,
    _attend_with_torch,
    attend,
    put_together,
)
from ray_hetero.offload.prefill.kv_transfer import unpack  # noqa: E402
from ray_hetero.offload.prefill.stage_output import (  # noqa: E402
    StageOutput,
    turns_from,
)
from ray_hetero.planning import prefill_memory  # noqa: E402
from ray_hetero.runtime import gpu_memory  # noqa: E402

pytestmark = [pytest.mark.gpu, needs_gpus(1)]
GPU = torch.device("cpu" if IS_PRETENDED else "cuda:0")
SCALED = [Int4Weight, Int8Weight, Fp8Weight, Fp4Weight]


@pytest.fixture(autouse=True)
def _as_in_a_cpu_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_streams(monkeypatch)
    monkeypatch.setattr(prefill_memory, "PIECE_BYTES", 128 << 10)
    monkeypatch.setattr(prefill_memory, "KV_SPAN_BYTES", 2 * 32 * 2 * 2 * 64 * 2)
    monkeypatch.setattr(offload_gpu, "LEAST_BYTES", 1)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("lengths", [[1, 1, 1], [128], [5, 1, 300], [16, 48]], ids=str)
def test_attention_is_that_of_torch(lengths: list[int], is_causal: bool) -> None:
    torch.manual_seed(0)
    keys_of = lengths if is_causal else [3 * length + 7 for length in lengths]
    for heads, kv_heads, size in ((8, 2, 128), (4, 4, 64), (128, 8, 32)):
        # Rows of queries, keys and values together, as they come out of one product.
        width = (heads + 2 * kv_heads) * size
        rows = torch.randn(sum(lengths), width).bfloat16().view(-1, heads + 2 * kv_heads, size)
        more = torch.randn(sum(keys_of), 2, kv_heads, size).bfloat16()

        def parts(device: Any, rows: Any = rows, more: Any = more, heads: int = heads,
                  kv_heads: int = kv_heads) -> list[Any]:  # fmt: skip
            there = rows.to(device)
            own = there[:, heads : heads + kv_heads], there[:, heads + kv_heads :]
            other = more.to(device).unbind(1)
            given = [Lengths.of(some, device) for some in (lengths, keys_of)]
            return [there[:, :heads], *(own if is_causal else other), *given]

        expected = _attend_with_torch(*parts(torch.device("cpu")), 0.1, is_causal=is_causal)
        found = attend(*parts(GPU), 0.1, is_causal=is_causal)
        torch.testing.assert_close(found.values.cpu(), expected.values, rtol=2**-6, atol=2**-6)
        torch.testing.assert_close(found.lse.cpu(), expected.lse, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("isa", ["amx", "vec"])
@pytest.mark.parametrize(
    "shape", [(3, 2, 32, 64), (2, 3, 128, 96), (5, 4, 128, 128), (2, 1, 16, 16)], ids=str
)
def test_blocks_are_unpacked_token_by_token(shape: tuple[int, int, int, int], isa: str) -> None:
    count, heads, block, size = shape
    blocks = torch.randn(count, heads, block, 2 * size, device=GPU).bfloat16()
    # Two ranks' heads side by side.
    found, expected = torch.zeros(2, 2, count * block, 2 * heads, size, device=GPU).bfloat16()
    unpack(blocks, isa, found[:, :, heads:], uses_triton=not IS_PRETENDED)
    unpack_blocks(blocks, isa, expected[:, :, heads:])
    assert torch.equal(found, expected)


@pytest.mark.parametrize("has_rows", [False, True])
@pytest.mark.parametrize("uses_triton", [False, not IS_PRETENDED])
def test_attention_in_parts_is_attention_to_all_keys(*, uses_triton: bool, has_rows: bool) -> None:
    torch.manual_seed(0)
    queries = torch.randn(100, 8, 128).bfloat16().to(GPU)
    keys, values = torch.randn(2, 900, 2, 128).bfloat16().to(GPU)
    own, every = Lengths.of([100], GPU), Lengths.of([900], GPU)
    whole = attend(queries, keys, values, own, every, 0.1, is_causal=False)
    first, rest = (Lengths.of([count], GPU) for count in (500, 400))
    found = attend(queries, keys[:500], values[:500], own, first, 0.1, is_causal=False)
    begun = [x.clone() for x in (found.values, found.lse)]
    rows, some = None, slice(None)
    if has_rows:
        some = slice(30, 90)
        rows, own = torch.arange(30, 90, device=GPU), Lengths.of([60], GPU)
    part = attend(queries[some], keys[500:], values[500:], own, rest, 0.1, is_causal=False)
    put_together(found, part, rows, uses_triton=uses_triton)
    torch.testing.assert_close(found.values[some], whole.values[some], rtol=2**-6, atol=2**-6)
    torch.testing.assert_close(found.lse[:, some], whole.lse[:, some], rtol=1e-4, atol=1e-4)
    if has_rows:
        others = torch.tensor([*range(30), *range(90, 100)], device=GPU)
        torch.testing.assert_close(found.values[others], begun[0][others], rtol=0, atol=0)
        torch.testing.assert_close(found.lse[:, others], begun[1][:, others], rtol=0, atol=0)


@pytest.mark.skipif(IS_PRETENDED, reason="on a CPU attention is torch's")
def test_attention_is_flash_attention_3_where_vllm_has_it() -> None:
    is_hopper = torch.cuda.get_device_capability(GPU)[0] == 9
    assert (flash_attention_3(GPU) is not None) == is_hopper


@pytest.mark.skipif(IS_PRETENDED, reason="a CPU has no kernel of Triton's")
def test_compact_weights_are_expanded_by_one_kernel_that_gives_what_torch_gives() -> None:
    torch.cuda.set_device(GPU)
    assert compact_expansion.choose_expand(GPU) is compact_expansion.expand_with_triton


@pytest.mark.skipif(IS_PRETENDED, reason="a CPU has no kernel of Triton's")
@pytest.mark.parametrize("group", [4, 32, 128, 160])
@pytest.mark.parametrize("kind", SCALED, ids=lambda kind: kind.name)
def test_codes_are_expanded_by_one_kernel_that_gives_what_torch_gives(
    kind: type[ScaledWeight], group: int
) -> None:
    torch.cuda.set_device(GPU)
    for name in kind.scale_types:
        for is_uniform in {False, name == "float32"}:
            for has_zeros in {False, kind.has_zeros}:
                factor = 0.37 if name == "float8_e4m3fn" else 1.0
                layout = Layout(group, getattr(torch, name), is_uniform, has_zeros, factor)
                assert scaled_expansion.is_right(kind, layout, GPU), layout


@pytest.mark.parametrize("isa", ["vec", "amx"])
@pytest.mark.parametrize("family", GPU_FAMILIES)
def test_prompts_chunks_and_prefixes(
    family: str, isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps(monkeypatch, device=GPU, family=family, isa=isa, layers=3)
    one, other = steps.request(300), steps.request(200)
    steps.check((one, 0, 50))
    steps.check((one, 50, 64), (other, 0, 40))
    steps.check((one, 64, 180), (other, 40, 45))
    steps.check((other, 45, 190), (one, 180, 300))
    again = steps.request(120, after=one, shared=3)
    steps.check((again, 96, 120))
    first = steps.request(100)
    second, third = (steps.request(tokens, after=first, shared=2) for tokens in (70, 65))
    steps.check((first, 0, 100), (second, 64, 70), (third, 64, 65))


@needs_native
@pytest.mark.parametrize("is_compact", [False, True])
def test_requests_decode_beside_prompts(is_compact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch, device=GPU, is_compact=is_compact, isa=layout(), layers=3)
    one, other, prompt = (steps.request(tokens) for tokens in (60, 92, 150))
    steps.check((one, 0, 58), (other, 0, 88))
    steps.check((one, 58, 59), (prompt, 0, 70), (other, 88, 89))
    steps.check((prompt, 70, 150), (one, 59, 60), (other, 89, 92))


@needs_native
def test_embeddings_are_sent_while_others_are_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch, device=GPU, layers=3, columns=8, blocks=160, most=4096)
    gpu, table = steps.kernel.gpu, torch.randn(500, HIDDEN).bfloat16()
    one, other = steps.request(3000), steps.request(300)
    tokens = {request: torch.randint(500, (len(request.inputs),)) for request in (one, other)}
    begin, factor = steps.begin, 1

    def begin_embedded(parts: Any) -> tuple[Any, Any]:
        for request, own in tokens.items():
            request.inputs.copy_(table[own] * factor)
        positions, hidden = begin(parts)
        own = torch.cat([tokens[request][b:e] for request, b, e in parts])
        gpu.settle()
        # Copies of these may still be under way when the next rows are looked up.
        gpu.memory.embedded(table, own.flip(0), gpu.computing)
        looked_up = gpu.memory.embedded(table, own, gpu.computing)
        if factor != 1:
            looked_up *= factor
        assert torch.equal(looked_up, hidden)
        return positions, looked_up

    taken, take = [], gpu.memory.embedded.take

    def take_and_note(rows: torch.Tensor) -> torch.Tensor | None:
        there = take(rows)
        taken.append(there is not None)
        return there

    monkeypatch.setattr(gpu.memory.embedded, "take", take_and_note)
    monkeypatch.setattr(steps, "begin", begin_embedded)
    steps.check((one, 0, 2900))
    steps.check((one, 2900, 2901), (other, 0, 100))
    for at in range(2):
        # The GPU computes layers of decode steps, in the same memory.
        steps.check((one, 2901 + at, 2902 + at), (other, 100 + at, 101 + at))
    steps.check((one, 2903, 3000), (other, 102, 103))
    assert taken == [True] * 3
    factor = 8
    steps.check((one, 0, 2900))
    assert taken == [True] * 3 + [False]


def check_decode_steps(steps: Steps) -> None:
    """Six decode steps of two requests, a prompt in between."""
    one, other, prompt = (steps.request(tokens) for tokens in (60, 92, 150))
    steps.check((one, 0, 52), (other, 0, 84))
    for at in range(3):
        steps.check((one, 52 + at, 53 + at), (other, 84 + at, 85 + at))
    # A prompt takes the place of what has come ahead.
    steps.check((prompt, 0, 150))
    for at in range(3):
        steps.check((one, 55 + at, 56 + at), (other, 87 + at, 88 + at))


@needs_native
@pytest.mark.parametrize("is_compact", [False, True])
@pytest.mark.parametrize("columns", [2, 9, 16, 21])
@pytest.mark.parametrize("family", GPU_FAMILIES)
def test_columns_of_decode_steps(
    family: str, columns: int, is_compact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(column_pieces, "LEAST_COLUMNS", 64)
    steps = Steps(
        monkeypatch, device=GPU, family=family, columns=columns, is_compact=is_compact,
        isa=layout(), layers=3,
    )  # fmt: skip
    check_decode_steps(steps)


@needs_native
@pytest.mark.parametrize("is_compact", [False, True])
@pytest.mark.parametrize("count", [2, 3])
def test_layers_of_which_ranks_of_a_group_have_parts(
    count: int, is_compact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = GroupSteps(
        monkeypatch, count, device=GPU, is_compact=is_compact, isa=layout(), layers=3, has_bias=True
    )
    assert None not in steps.join()
    one, other, prompt = (steps.request(tokens) for tokens in (60, 92, 150))
    steps.check((one, 0, 58), (other, 0, 88))
    steps.check((one, 58, 59), (prompt, 0, 70), (other, 88, 89))
    steps.check((prompt, 70, 150), (one, 59, 60), (other, 89, 92))
    again = steps.request(120, after=prompt, shared=3)
    steps.check((again, 96, 120))


@needs_native
@pytest.mark.parametrize("is_compact", [False, True])
@pytest.mark.parametrize(("count", "columns"), [(2, 2), (2, 16), (3, 9)])
def test_columns_of_the_ranks_of_a_group(
    count: int, columns: int, is_compact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(column_pieces, "LEAST_COLUMNS", 160)
    steps = GroupSteps(
        monkeypatch, count, device=GPU, is_compact=is_compact, isa=layout(), layers=3,
        has_bias=True, share=1.0, wide=160,
    )  # fmt: skip
    assert None not in steps.join()
    given = steps.give_columns(columns)
    check_decode_steps(steps)
    assert [one.steps for one in given] == [6] * count


READS = """
import sys
import torch
from ray_hetero.runtime import gpu_memory
device = torch.device("cuda", 0)
torch.cuda.set_device(device)
print(gpu_memory.identity(device))
memory = gpu_memory.opened(device, bytes.fromhex(sys.argv[1]), int(sys.argv[2]))
print(memory.view(torch.int32).sum().item())
"""


@pytest.mark.skipif(IS_PRETENDED, reason="a CPU has no memory of a GPU")
def test_another_process_reads_memory_of_the_gpu() -> None:
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    memory, handle = gpu_memory.made(device, 1 << 20)
    memory.view(torch.int32).copy_(torch.arange(1 << 18))
    torch.cuda.synchronize()
    told = subprocess.run(
        [sys.executable, "-c", READS, handle.hex(), str(memory.nbytes)],
        check=True, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert told.stdout.split() == [gpu_memory.identity(device), str(sum(range(1 << 18)))]
    gpu_memory.give_back(memory)


@pytest.mark.parametrize("is_compact", [False, True])
def test_turns_are_measured_between_steps(
    monkeypatch: pytest.MonkeyPatch, *, is_compact: bool
) -> None:
    steps = Steps(monkeypatch, device=GPU, isa=layout(), is_compact=is_compact)
    gpu = steps.made.gpu
    assert gpu is not None
    for tokens in (100, 70):
        request = steps.request(tokens + 1)
        steps.check((request, 0, tokens))
        assert turns_from(gpu) > 0
        steps.check((request, tokens, tokens + 1))


WAITS = """
import sys, torch
from ray_hetero.offload.prefill.stage_output import GpuOffer, accept
from ray_hetero.runtime.gpu_memory import lock_pages
device = torch.device("cuda", 0)
torch.cuda.set_device(device)
torch.zeros(1, device=device)
seen = accept(GpuOffer(sys.argv[1], bytes.fromhex(sys.argv[2]), int(sys.argv[3])), device)
done = torch.zeros(16, dtype=torch.int32)
lock_pages(done)
print(seen.words is not None, flush=True)
sys.stdin.readline()
for number in (1, 2):
    seen.words.wait(number)
    rows = seen.rows.clone()
    seen.words.say(number)
    seen.words.tell(done.data_ptr(), number)
    print("ordered", int(done[0]), flush=True)
    torch.cuda.synchronize()
    print(int(rows.long().sum()), int(done[0]), flush=True)
"""


@pytest.mark.skipif(IS_PRETENDED, reason="a CPU has no memory of a GPU")
def test_streams_of_two_processes_wait_for_rows_and_for_their_being_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stage_output, "turns_from", lambda gpu: 0)
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    # Not the name that vLLM's CPU worker has something else in.
    computing = torch.cuda.streams.Stream(device)
    given: Any = SimpleNamespace(device=device, computing=computing, wait=torch.cuda.synchronize)
    output, capacity = StageOutput(given), 64
    packing = Packing({
        name: torch.empty(1, 256, dtype=torch.bfloat16) for name in ("hidden_states", "residual")
    })  # fmt: skip
    offer = output.offer(packing, capacity)
    assert offer is not None
    with subprocess.Popen(
        [sys.executable, "-c", WAITS, offer.gpu, offer.handle.hex(), str(offer.nbytes)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as reading:  # fmt: skip
        assert reading.stdin is not None
        assert reading.stdout is not None
        assert reading.stdout.readline() == "True\n"
        # Both ends have set their words before the first step.
        output.accepted(is_seen=True, waits=True)
        torch.cuda.synchronize()
        print(file=reading.stdin, flush=True)
        for number in (1, 2):
            assert reading.stdout.readline() == f"ordered {number - 1}\n"
            assert not select.select([reading.stdout], [], [], 0.5)[0]
            x, total = (torch.randn(capacity, 256, device=device).bfloat16() for _ in range(2))
            torch.cuda.synchronize()
            output.put(capacity, slice(None), x, total)
            output.finish(x)
            expected = sum(int(one.view(torch.uint8).long().sum()) for one in (x, total))
            assert reading.stdout.readline() == f"{expected} {number}\n"
        assert reading.wait(30) == 0
    output.settle()
    gpu_memory.give_back(output._memory)  # type: ignore[arg-type]

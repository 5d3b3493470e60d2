"""PyTorch in the place of vLLM's operators for CPUs gives what these give."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from vllm.platforms import current_platform  # noqa: E402

from ray_hetero.compat.models import torch_operators  # noqa: E402
from ray_hetero.compat.models.torch_operators import SCHEMAS  # noqa: E402
from ray_hetero.errors import UnsupportedError  # noqa: E402
from ray_hetero.kernels.layers import kv_layouts  # noqa: E402

current_platform.import_kernels()
HEADS, KV_HEADS, SIZE, BLOCK = 4, 2, 32, 32
HAS_TILES = hasattr(torch.ops._C, "weight_packed_linear")
ISAS = ["vec", pytest.param("amx", marks=pytest.mark.skipif(not HAS_TILES, reason="no tiles"))]
CLOSE = {"rtol": 2**-7, "atol": 2**-7}


def both(name: str, *given: Any) -> tuple[list[Any], list[Any]]:
    """Arguments and result after vLLM's operator, and after the function in its place."""
    found = []
    for function in (getattr(torch.ops._C, name), SCHEMAS[name][1]):
        copies = [x.clone() if isinstance(x, torch.Tensor) else x for x in given]
        found.append([*copies, function(*copies)])
    return found[0], found[1]


def assert_close(theirs: list[Any], ours: list[Any]) -> None:
    for one, other in zip(theirs, ours, strict=True):
        if isinstance(one, torch.Tensor):
            torch.testing.assert_close(other, one, **CLOSE)


@pytest.mark.parametrize("name", SCHEMAS)
def test_arguments_are_those_of_the_operator(name: str) -> None:
    theirs = getattr(torch.ops._C, name).default._schema
    ours = torch._C.parse_schema(f"_C::{name}{SCHEMAS[name][0]}")
    assert [str(one.type) for one in ours.arguments] == [str(one.type) for one in theirs.arguments]
    assert [one.name for one in ours.arguments] == [one.name for one in theirs.arguments]
    assert [one.default_value for one in ours.arguments] == [
        one.default_value for one in theirs.arguments
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_norms_and_activations(dtype: Any) -> None:
    torch.manual_seed(1)
    x, residual, weight = torch.randn(7, 64), torch.randn(7, 64), torch.rand(64) + 0.5
    x, residual, weight = (one.to(dtype) for one in (x, residual, weight))
    assert_close(*both("rms_norm", torch.empty_like(x), x, weight, 1e-5))
    assert_close(*both("fused_add_rms_norm", x, residual, weight, 1e-5))
    for name in ("silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul"):
        assert_close(*both(name, torch.empty(7, 32, dtype=dtype), x))
    logits = torch.randn(5, 100)
    assert_close(*both("greedy_argmax", logits))


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("rotated", [SIZE, SIZE // 2])
def test_rotation(is_neox: bool, rotated: int) -> None:
    torch.manual_seed(2)
    table = torch.randn(50, rotated)
    query, key = torch.randn(6, HEADS * SIZE), torch.randn(6, KV_HEADS * SIZE)
    positions = torch.tensor([0, 3, 49, 7, 7, 1])
    assert_close(*both("rotary_embedding", positions, query, key, SIZE, table, is_neox))


def test_slots() -> None:
    starts = torch.tensor([0, 3, 4, 6], dtype=torch.int32)
    positions = torch.tensor([31, 32, 33, 5, 0, 1])
    blocks = torch.tensor([[4, 2, 0], [1, 0, 0], [3, 0, 0]], dtype=torch.int32)
    slots = torch.full((6,), -7, dtype=torch.int64)
    name = "compute_slot_mapping_kernel_impl"
    theirs, ours = both(name, starts, positions, blocks, slots, BLOCK)
    assert torch.equal(theirs[3], ours[3])
    assert ours[3].tolist() == [4 * BLOCK + 31, 2 * BLOCK, 2 * BLOCK + 1, BLOCK + 5, 96, 97]


def blocks_of(dtype: Any, count: int = 20) -> tuple[Any, Any, Any]:
    """A cache, and its keys and values as vLLM hands them on."""
    cache = torch.zeros(count, KV_HEADS, BLOCK, 2 * SIZE, dtype=dtype)
    keys, values = cache.view(count, KV_HEADS, 2 * BLOCK, SIZE).chunk(2, dim=2)
    return cache, keys, values


@pytest.mark.parametrize("isa", ISAS)
def test_keys_and_values_lie_where_the_operator_puts_them(isa: str) -> None:
    torch.manual_seed(3)
    key, value = torch.randn(2, 40, KV_HEADS, SIZE).bfloat16()
    slots = torch.randperm(20 * BLOCK)[:40]
    slots[5] = -1
    made = []
    for write in (torch.ops._C.cpu_attn_reshape_and_cache, torch_operators.reshape_and_cache):
        cache, keys, values = blocks_of(torch.bfloat16)
        write(key, value, keys, values, slots, isa)
        made.append(cache)
    assert torch.equal(*made)
    assert (torch_operators.TILES, torch_operators.TILE) == (kv_layouts.TILES, kv_layouts.TILE)
    with pytest.raises(UnsupportedError, match="no KV cache in fp8_e4m3"):
        torch_operators.reshape_and_cache(
            key, value, keys, values, slots, isa, kv_cache_dtype="fp8_e4m3"
        )


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    "more", [{}, {"window": 10}, {"softcap": 3.0}, {"sinks": True}, {"slopes": True}],
    ids=lambda more: next(iter(more), "plain"),
)  # fmt: skip
def test_attention(isa: str, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(4)
    monkeypatch.setattr(torch_operators, "ROWS_AT_ONCE", 16)
    dtype = torch.bfloat16
    lengths, rows = torch.tensor([70, 1, 40], dtype=torch.int32), [70, 1, 3]
    starts = torch.tensor([0, 70, 71, 74], dtype=torch.int32)
    table = torch.randperm(20)[:9].view(3, 3).int()
    key, value = torch.randn(2, 20 * BLOCK, KV_HEADS, SIZE).to(dtype)
    query = torch.randn(sum(rows), HEADS, SIZE).to(dtype)
    sinks = torch.randn(HEADS).to(dtype) if "sinks" in more else None
    slopes = torch.rand(HEADS) / 4 if "slopes" in more else None
    window = more.get("window", -1)
    found = []
    # The compiled one reads tiles with AMX's instructions only.
    for layout, plan, attend in (
        ("vec", torch.ops._C.get_scheduler_metadata, torch.ops._C.cpu_attention_with_kv_cache),
        (isa, torch_operators.get_scheduler_metadata, torch_operators.attend),
    ):
        _, keys, values = blocks_of(dtype)
        slots = torch.arange(20 * BLOCK)
        torch_operators.reshape_and_cache(key, value, keys, values, slots, layout)
        metadata = plan(
            3, HEADS, KV_HEADS, SIZE, lengths, dtype, starts, True, window, layout, True, None
        )
        output = torch.zeros_like(query)
        attend(
            query, keys, values, output, starts, lengths, 0.2, True, slopes, window, table,
            more.get("softcap", 0.0), metadata, sinks, None,
        )  # fmt: skip
        found.append(output)
    torch.testing.assert_close(found[1], found[0], rtol=2**-5, atol=2**-6)


BARE = """
import torch
from ray_hetero.compat.models import torch_operators
assert torch_operators.define_missing() == tuple(torch_operators.SCHEMAS)
assert torch_operators.define_missing() == ()
x = torch.randn(3, 64)
out = torch.empty(3, 32)
torch.ops._C.silu_and_mul(out, x)
torch.testing.assert_close(out, torch.nn.functional.silu(x[:, :32]) * x[:, 32:])
assert torch.equal(torch.ops._C.greedy_argmax(x), x.argmax(-1))
"""


def test_what_is_there_is_left_and_what_is_missing_is_defined() -> None:
    assert torch_operators.define_missing() == ()
    subprocess.run([sys.executable, "-c", BARE], check=True, timeout=120)

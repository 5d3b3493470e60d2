"""The streaming linear kernel computes what torch computes, whatever the shapes and threads."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from native_module import LEVELS, TESTED, level_of, native, needs_native  # noqa: E402
from vllm.model_executor.layers import utils  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402

from ray_hetero.compat.models import cpu_linear  # noqa: E402
from ray_hetero.config import CpuConfig  # noqa: E402
from ray_hetero.errors import UnsupportedError  # noqa: E402
from ray_hetero.kernels.formats import CompactWeight, HostWeight, PackedWeight  # noqa: E402
from ray_hetero.kernels.formats.base import pack  # noqa: E402
from ray_hetero.kernels.linear import streaming_linear  # noqa: E402

current_platform.import_kernels()


def packed(outputs: int, inputs: int, is_compact: bool) -> tuple[torch.Tensor, HostWeight]:
    weight = torch.randn(outputs, inputs).mul_(inputs**-0.5).bfloat16()
    # Some that are rare, so that a compact one has outliers: large, tiny, none at all.
    for share, value in ((1499, 30.0), (1503, -(2.0**-40)), (1511, 0.0)):
        weight.view(-1)[::share] = value
    if not is_compact:
        return weight, PackedWeight.made(pack(weight), native)
    held = CompactWeight.made(pack(weight), native)
    assert held is not None
    assert held.encoding.outliers_count > 0 or weight.numel() <= 1024
    return weight, held


def packed_of(layer: torch.nn.Module) -> torch.Tensor:
    return pack(layer.weight.data)


def compute(
    x: torch.Tensor, weight: HostWeight, bias: torch.Tensor | None, level: str
) -> torch.Tensor:
    (tokens, _), outputs = x.shape, weight.shape[0]
    y = torch.full((tokens, outputs), float("nan"), dtype=torch.bfloat16)
    native.linear(
        x=x.data_ptr(), stride=x.stride(0), w=weight.data.data_ptr(), encoding=weight.encoding,
        bias=0 if bias is None else bias.data_ptr(), y=y.data_ptr(), m=tokens,
        level=level_of(level),
    )  # fmt: skip
    return y


@needs_native
@pytest.mark.parametrize("level", TESTED)
@pytest.mark.parametrize("is_compact", [False, True])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("outputs", "inputs"), [(32, 32), (96, 1376), (512, 256), (544, 2080)])
def test_it_computes_what_torch_computes(
    outputs: int, inputs: int, threads: int, is_compact: bool, level: str
) -> None:
    torch.manual_seed(outputs + threads)
    weight, weight_packed = packed(outputs, inputs, is_compact)
    bias = torch.randn(outputs)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for tokens in (1, 2, 7, 8, 9, 16, 17, 32, 33, 70):
            # A view of a wider tensor, as attention hands over slices.
            x = torch.randn(tokens, inputs + 64).bfloat16()[:, :inputs]
            expected = x.float() @ weight.float().T + bias
            found = compute(x, weight_packed, bias, level).float()
            # One rounding to bf16, 8 bits; products of large weights cancel out.
            torch.testing.assert_close(found, expected, rtol=2**-8, atol=2**-6)
    finally:
        torch.set_num_threads(before)


@needs_native
@pytest.mark.parametrize("level", TESTED)
@pytest.mark.parametrize("is_compact", [False, True])
def test_the_result_depends_neither_on_threads_nor_on_chance(is_compact: bool, level: str) -> None:
    torch.manual_seed(1)
    _, weight = packed(320, 3072, is_compact)
    before = torch.get_num_threads()
    for tokens in (1, 8, 40):
        x = torch.randn(tokens, 3072).bfloat16()
        expected = compute(x, weight, None, level)
        try:
            for threads in (1, 2, 5, 2):
                torch.set_num_threads(threads)
                assert torch.equal(compute(x, weight, None, level), expected)
        finally:
            torch.set_num_threads(before)


@needs_native
@pytest.mark.parametrize("level", TESTED)
@pytest.mark.parametrize("is_compact", [False, True])
@pytest.mark.parametrize("tokens", [256, 257, 1024, 1025, 2100])
def test_prompts_are_computed_in_slabs_and_pieces(
    tokens: int, is_compact: bool, level: str
) -> None:
    torch.manual_seed(tokens)
    inputs = 1376 if level in ("avx512_bf16", "amx") else 160
    weight, weight_packed = packed(1120, inputs, is_compact)
    x = torch.randn(tokens, inputs).bfloat16()
    found = compute(x, weight_packed, None, level).float()
    torch.testing.assert_close(found, x.float() @ weight.float().T, rtol=2**-8, atol=2**-6)


SHORT_OF_MEMORY = """
import resource, sys
import numpy as np
from ray_hetero import _streaming_linear as native

m, n, k = int(sys.argv[2]), 32, 1 << 20
x, w, y = (np.zeros(shape, dtype=np.uint16) for shape in ((m, k), (n, k), (m, n)))
def linear(m):
    native.linear(
        x=x.ctypes.data, stride=k, w=w.ctypes.data, encoding=native.Packed(n, k), bias=0,
        y=y.ctypes.data, m=m, level=native.level(sys.argv[1]),
    )
linear(1)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (16 << 20), used + (16 << 20)))
try:
    linear(m)
except MemoryError:
    print("short of memory")
linear(1)
print("still there")
"""


@needs_native
@pytest.mark.parametrize("tokens", [32, 48])
def test_a_lack_of_memory_is_an_error_and_not_the_end(tokens: int) -> None:
    # Tokens are copied as tiles, 2 MiB for each, by each of two threads, or once for both.
    made = subprocess.run(
        [sys.executable, "-c", SHORT_OF_MEMORY, "software_tiles", str(tokens)],
        capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "2"},
    )  # fmt: skip
    assert made.stdout.splitlines() == ["short of memory", "still there"], made.stderr


@needs_native
def test_a_shape_that_the_layout_cannot_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="multiples of 32, got 32 and 48"):
        native.Packed(32, 48)


@needs_native
def test_levels_are_known_by_name() -> None:
    assert LEVELS[:2] == ["software_tiles", "portable"]
    assert native.level("portable").name == "portable"
    assert [level.has_tiles for level in native.levels()[:2]] == [True, False]
    with pytest.raises(ValueError, match=r"processor has \(software_tiles, portable.*got sse"):
        native.level("sse")


@needs_native
def test_vllms_layers_use_it_and_hold_their_weights_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", utils.dispatch_cpu_unquantized_gemm)
    assert streaming_linear.choose(CpuConfig(linear_kernel="streaming")) is not None
    cpu_linear.use_linear(torch.ops.ray_hetero.streaming_linear, streaming_linear.suits, packed_of)
    weight, _ = packed(64, 128, is_compact=False)
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    layer.bias = torch.nn.Parameter(torch.randn(64).bfloat16(), requires_grad=False)
    bias = layer.bias.float()
    utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
    assert layer.weight.numel() == 0
    for shape in ((3, 128), (2, 5, 128), (300, 128)):
        x = torch.randn(shape).bfloat16()
        expected = torch.nn.functional.linear(x.float(), weight.float(), bias)
        found = layer.cpu_linear(x, layer.weight, layer.bias)
        torch.testing.assert_close(found.float(), expected, rtol=2**-7, atol=2**-7)


@needs_native
def test_it_stays_one_operator_in_a_compiled_graph() -> None:
    assert streaming_linear.choose(CpuConfig(linear_kernel="streaming")) is not None
    weight_packed = packed(64, 128, is_compact=False)[1].data

    def layer(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.ray_hetero.streaming_linear(x, weight_packed, None) + 1

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (3, 5):
        x = torch.randn(tokens, 128).bfloat16()
        torch.testing.assert_close(compiled(x), layer(x), rtol=0, atol=0)


@needs_native
def test_other_layers_are_left_to_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[object] = []
    monkeypatch.setattr(
        utils, "dispatch_cpu_unquantized_gemm", lambda layer, remove_weight: left.append(layer)
    )
    cpu_linear.use_linear(torch.ops.aten.linear, streaming_linear.suits, packed_of)
    layers = [
        SimpleNamespace(weight=torch.zeros(64, 64)),
        SimpleNamespace(weight=torch.zeros(40, 64).bfloat16()),
        SimpleNamespace(weight=torch.zeros(4, 64, 64).bfloat16()),
        SimpleNamespace(weight=torch.zeros(64, 64, dtype=torch.bfloat16, device="meta")),
    ]
    for layer in layers:
        utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
    assert left == layers


def test_streaming_that_cannot_be_had_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming_linear, "_native", None)
    with pytest.raises(UnsupportedError, match="C\\+\\+ compiler"):
        streaming_linear.choose(CpuConfig(linear_kernel="streaming"))
    said: list[str] = []
    monkeypatch.setattr(
        streaming_linear.logger, "warning", lambda text, *given: said.append(text % given)
    )
    assert streaming_linear.choose(CpuConfig(linear_kernel="vllm")) is None
    assert not said
    # Several times slower, which nobody asked for.
    assert streaming_linear.choose(CpuConfig()) is None
    assert "C++ compiler" in said[0]


@needs_native
def test_the_default_follows_the_processors_best_instructions() -> None:
    by_default = CpuConfig()
    levels = ("amx", "avx512_bf16", "avx512", "avx2", "portable", None)
    assert [by_default.streams(level) for level in levels] == [
        True,
        True,
        True,
        True,
        False,
        False,
    ]
    formats = [by_default.weight_format(level) for level in levels]
    assert formats == 3 * ["compact"] + 3 * ["packed"]
    for choice, name in ((True, "compact"), (False, "packed")):
        chosen = CpuConfig(compact_weights=choice)
        assert {chosen.weight_format(level) for level in levels} == {name}
    for choice, streams in (("streaming", True), ("vllm", False)):
        assert {CpuConfig(linear_kernel=choice).streams(level) for level in levels} == {streams}
    assert native is not None
    best = native.levels()[-1].name
    assert (streaming_linear.choose(by_default) is not None) == by_default.streams(best)


@needs_native
def test_tokens_that_overlap_are_refused() -> None:
    _, weight = packed(32, 64, is_compact=False)
    x = torch.randn(3, 64).bfloat16()
    with pytest.raises(ValueError, match="a stride of at least 64 elements, got 63"):
        compute(x.as_strided((3, 64), (63, 1)), weight, None, LEVELS[-1])
    # Of one token the stride says nothing.
    assert compute(x.as_strided((1, 64), (0, 1)), weight, None, LEVELS[-1]).isfinite().all()

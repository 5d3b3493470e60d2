"""Steps of many tokens are computed piece by piece, read ahead, as torch computes them.

The prompt GPU is the CPU here: the same copies and products in the same order.  On a GPU it
is tests/gpu/test_prompt_gpu.py.
"""

from __future__ import annotations

import logging
import mmap
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from native_module import native, needs_native  # noqa: E402
from slow_links import slow_cores, slow_link  # noqa: E402
from vllm.model_executor.layers import utils  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402

from ray_hetero.config import CpuConfig  # noqa: E402
from ray_hetero.errors import UnsupportedError  # noqa: E402
from ray_hetero.kernels.formats import CompactWeight, PackedWeight  # noqa: E402
from ray_hetero.kernels.formats.base import pack  # noqa: E402
from ray_hetero.kernels.linear import streaming_linear  # noqa: E402
from ray_hetero.kernels.linear.streaming_linear import StreamingLinear  # noqa: E402
from ray_hetero.kernels.step_route import StepLimits  # noqa: E402
from ray_hetero.offload.linear_layers import LinearLayers  # noqa: E402
from ray_hetero.offload.prefill import offload_gpu, submission, threshold  # noqa: E402
from ray_hetero.offload.prefill.offload_gpu import OffloadGpu  # noqa: E402
from ray_hetero.offload.weights import piece_reader  # noqa: E402
from ray_hetero.offload.weights.piece_reader import PieceReader  # noqa: E402
from ray_hetero.offload.weights.weight_pieces import Piece  # noqa: E402
from ray_hetero.planning import prefill_memory  # noqa: E402
from ray_hetero.planning.prefill_memory import (  # noqa: E402
    CUDA_BYTES,
    EXPANDED,
    SLOTS,
    WORKING_BYTES,
    gpu_bytes,
    slots_within,
)

current_platform.import_kernels()
pytestmark = needs_native
CPU = torch.device("cpu")
SHAPES = [(1536, 512), (544, 1024), (4128, 160)]


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    # Eight blocks of the first shape, four of the second, all 129 of the third in four pieces.
    monkeypatch.setattr(prefill_memory, "PIECE_BYTES", 256 << 10)


def weights(seed: int = 0) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    return [torch.randn(n, k).mul_(k**-0.5).bfloat16() for n, k in SHAPES]


def prompt_gpu(
    plain: list[torch.Tensor], tokens: int = 64, *, is_compact: bool = False
) -> tuple[OffloadGpu, list[torch.Tensor]]:
    gpu = OffloadGpu(CPU, tokens)
    kind = CompactWeight if is_compact else PackedWeight
    packed = [weight for weight in (kind.made(pack(weight), native) for weight in plain) if weight]
    assert len(packed) == len(plain)
    for weight in packed:
        gpu.add(weight)
    gpu.take()
    return gpu, [weight.data for weight in packed]


def check(gpu: OffloadGpu, plain: torch.Tensor, packed: torch.Tensor, tokens: int) -> None:
    outputs, inputs = plain.shape
    # A view of a wider tensor, as attention hands over slices.
    x = torch.randn(tokens, inputs + 64).bfloat16()[:, :inputs]
    for bias in (None, torch.randn(outputs).bfloat16().float()):
        expected = x.float() @ plain.float().T + (0 if bias is None else bias)
        found = gpu.linear(x, packed, bias)
        assert found.is_contiguous()
        torch.testing.assert_close(found.float(), expected, rtol=2**-8, atol=2**-8)


@pytest.mark.parametrize("is_compact", [False, True])
def test_it_computes_what_torch_computes(is_compact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload_gpu, "LEAST_BYTES", 1)
    plain = weights()
    gpu, packed = prompt_gpu(plain, is_compact=is_compact)
    for tokens in (64, 1, 33):
        for one, other in zip(plain, packed, strict=True):
            check(gpu, one, other, tokens)


def test_weights_that_come_in_another_order_than_before() -> None:
    plain = weights()
    gpu, packed = prompt_gpu(plain)
    for turn in ([0, 1, 2], [0, 1, 2], [2, 0], [1, 1, 0], [2, 2, 2, 1], [0, 1, 2]):
        for index in turn:
            check(gpu, plain[index], packed[index], 5)


def test_each_piece_is_read_once_a_step_and_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = weights()
    gpu, packed = prompt_gpu(plain)
    fetched: list[tuple[int, int]] = []
    fetch = PieceReader.fetch

    def fetch_and_count(self: PieceReader, piece: Piece) -> None:
        fetched.append((piece.weight.data_ptr(), piece.begin))
        fetch(self, piece)

    monkeypatch.setattr(PieceReader, "fetch", fetch_and_count)
    pieces = sum(map(len, gpu.pieces))
    slots = gpu.reader.slots
    assert slots < pieces

    def step() -> Iterator[int]:
        for one in packed:
            gpu.linear(torch.zeros(4, one.shape[1]).bfloat16(), one, None)
            yield len(fetched)

    list(step())
    assert len(set(fetched)) == pieces
    # The order is known now: what the first layer needs is there before it is asked for.
    list(step())
    own = [placed.piece for found in gpu.pieces for placed in found]
    places = {(piece.weight.data_ptr(), piece.begin): number for number, piece in enumerate(own)}
    for _ in range(3):
        fetched.clear()
        counts = list(step())
        # Where a piece is larger than what is left of the memory, one less is ahead.
        assert abs(counts[-1] - pieces) <= 1
        first = len(gpu.pieces[0])
        assert abs(counts[0] - first) <= 1
        order = [places[one] for one in fetched]
        assert order == [(order[0] + number) % pieces for number in range(len(order))]
        # Some are expanded already, the others wait as they are stored.
        _, *expanded = (buffer.piece for buffer in gpu.reader._buffers)
        ahead = [*expanded, *(slot.piece for slot in gpu.reader._ahead)]
        assert slots <= len(ahead) <= pieces
        assert ahead == own[: len(ahead)]


def test_a_piece_is_expanded_before_the_products_of_the_one_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = weights()
    gpu, packed = prompt_gpu(plain)
    expanded: list[Piece] = []
    expand = PieceReader._expand

    def expand_and_note(self: PieceReader, buffer: Any, piece: Piece) -> None:
        expanded.append(piece)
        expand(self, buffer, piece)

    def step() -> None:
        for one in packed:
            gpu.linear(torch.zeros(4, one.shape[1]).bfloat16(), one, None)

    step()
    monkeypatch.setattr(PieceReader, "_expand", expand_and_note)
    own = [placed.piece for found in gpu.pieces for placed in found]
    step()
    # Nobody has known what comes behind the last piece.
    assert expanded[:3] == own[:3]
    for _ in range(2):
        expanded.clear()
        step()
        ahead = EXPANDED - 1
        assert expanded == [*own[ahead:], *own[:ahead]]


def test_the_rate_of_the_link_is_that_of_the_largest_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = weights()
    gpu, packed = prompt_gpu(plain)
    copied: list[Piece] = []

    def taking_half_a_second(order: Callable[[], None], done: Any) -> float:
        order()
        return 0.5

    with monkeypatch.context() as patched:
        patched.setattr(PieceReader, "copy", lambda reader, piece, memory: copied.append(piece))
        patched.setattr(piece_reader, "_fastest", taking_half_a_second)
        assert gpu.link_rate == 2 * gpu.reader.largest.weight.nbytes
    assert copied == [gpu.reader.largest]
    check(gpu, plain[0], packed[0], 5)


def test_the_thread_that_orders_work_need_not_wait_for_the_main_one() -> None:
    before = sys.getswitchinterval()
    try:
        sys.setswitchinterval(0.005)
        OffloadGpu(CPU, 64).submit(lambda: None).result(timeout=60)
        assert sys.getswitchinterval() == pytest.approx(submission.SWITCH_S)
        # One that was asked for stays.
        sys.setswitchinterval(1e-5)
        OffloadGpu(CPU, 64).submit(lambda: None).result(timeout=60)
        assert sys.getswitchinterval() == pytest.approx(1e-5)
    finally:
        sys.setswitchinterval(before)


def test_small_weights_and_long_steps_are_left_to_the_socket() -> None:
    gpu = OffloadGpu(CPU, 64)
    small, large = (torch.zeros(n, 512, dtype=torch.bfloat16) for n in (32, 1024))
    gpu.add(PackedWeight.made(small, native))
    gpu.add(PackedWeight.made(large, native))
    gpu.take()
    assert not gpu.suits(small, 64)
    assert gpu.suits(large, 64)
    assert not gpu.suits(large, 65)


def test_a_rank_without_such_weights_takes_nothing() -> None:
    taken = OffloadGpu(CPU, 64).take()
    assert (taken.weight_bytes, taken.gpu_bytes) == (0, 0)


def test_memory_by_hand() -> None:
    cuda = (620 + 192) << 20
    # Five pieces and three unpacked of 256 KiB; 64 tokens of 1536 outputs, 512 inputs and a
    # residual of as many, two bytes.
    assert gpu_bytes(1536, 512, 64) == cuda + 8 * (256 << 10) + 64 * 2560 * 2
    # One block of 32 outputs and 8192 inputs is larger than a piece should be.
    assert gpu_bytes(32, 8192, 1) == cuda + 8 * 32 * 8192 * 2 + 16416 * 2


@pytest.mark.parametrize("is_compact", [False, True])
def test_what_is_taken_is_what_is_counted(
    is_compact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = [(2048, 512), (512, 4096)]  # as of an MLP whose hidden states have 512 elements
    plain = [torch.randn(n, k).mul_(k**-0.5).bfloat16() for n, k in sizes]
    kind = CompactWeight if is_compact else PackedWeight
    taken: list[int] = []
    empty = torch.empty

    def empty_and_note(*shape: Any, **how: Any) -> torch.Tensor:
        made = empty(*shape, **how)
        # What `host_memory` makes is named by its device too, but may be page-locked.
        if "pin_memory" not in how and "device" in how:
            taken.append(made.nbytes)
        return made

    def slots(tokens: int, hidden: int | None) -> int:
        gpu = OffloadGpu(CPU, tokens)
        for weight in plain:
            packed = kind.made(pack(weight), native)
            assert packed is not None
            gpu.add(packed)
        monkeypatch.setattr(torch, "empty", empty_and_note)
        taken.clear()
        of_weights = gpu.take(hidden).gpu_bytes - gpu_bytes(2048, 4096, tokens)
        monkeypatch.setattr(torch, "empty", empty)
        assert of_weights == sum(weight.gpu_bytes for weight in gpu._weights.values())
        counted = gpu_bytes(2048, 4096, tokens) - CUDA_BYTES - WORKING_BYTES
        slot = (256 << 10) * (3 if is_compact else 4) // 4
        assert counted - slot < sum(taken) <= counted
        return gpu.reader.slots

    assert sum(n * k for n, k in sizes) * 2 // (256 << 10) == 24  # pieces
    # A piece in 12 bits leaves a quarter of the room for one in 16.
    few = SLOTS * 4 // 3 if is_compact else SLOTS
    assert slots(64, None) == few
    # 64 tokens of 3584 elements: 448 KiB.
    assert slots(64, 512) == few + (3 if is_compact else 1)


def test_there_are_not_more_slots_than_pieces() -> None:
    gpu, _ = prompt_gpu([weights()[0][:1024]], 4096)
    assert gpu.reader.slots == len(gpu.pieces[0]) == 4 < SLOTS
    assert slots_within(10, 20, 3) == 1


def test_memory_that_is_not_there_is_an_error_that_says_what_to_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu, _ = prompt_gpu([])
    gpu.add(PackedWeight.made(pack(weights()[0]), native))

    def no_memory(self: OffloadGpu, *sizes: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore")

    monkeypatch.setattr(OffloadGpu, "_allocate", no_memory)
    with pytest.raises(UnsupportedError, match=r"takes 0\.8 GiB .* allocate 2\.00 GiB\. Lower"):
        gpu.take()
    assert not gpu.suits(weights()[0], 1)


@pytest.fixture
def layer(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.nn.Module]:
    monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", utils.dispatch_cpu_unquantized_gemm)
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(weights()[0], requires_grad=False)
    layer.bias = None
    yield layer
    if kernel := streaming_linear.at_hand():
        kernel.gpu, kernel.limits = None, StepLimits(native.STEP_TOKENS)


def noted_tokens(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of each linear layer that a GPU computes from now on."""
    tokens_of_gpu: list[int] = []
    linear = OffloadGpu.linear

    def linear_and_note(self: OffloadGpu, x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        tokens_of_gpu.append(x.shape[0])
        return linear(self, x, *rest)

    monkeypatch.setattr(OffloadGpu, "linear", linear_and_note)
    return tokens_of_gpu


def test_a_ranks_layers_are_computed_where_the_tokens_say(
    layer: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = CpuConfig(
        linear_kernel="streaming",
        prefill_on_gpu=True,
        prefill_on_gpu_tokens=8,
        compact_weights=True,
    )
    layers = LinearLayers(config, CPU, 64)
    plain = layer.weight.data.float()
    utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
    layers.loaded(torch.nn.Module())
    tokens_of_gpu = noted_tokens(monkeypatch)
    for shape in ((7, 512), (8, 512), (2, 4, 512), (64, 512), (65, 512)):
        x = torch.randn(shape).bfloat16()
        found = layer.cpu_linear(x, layer.weight, None)
        assert found.shape == (*shape[:-1], 1536)
        torch.testing.assert_close(found.float(), x.float() @ plain.T, rtol=2**-7, atol=2**-7)
    assert tokens_of_gpu == [8, 8, 64]


@pytest.mark.usefixtures("one_thread")
def test_layers_that_are_no_operator_stay_on_the_cores_where_the_link_is_slow(
    layer: torch.nn.Module, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    layers = LinearLayers(CpuConfig(linear_kernel="streaming", prefill_on_gpu=True), CPU, 1024)
    plain = layer.weight.data.float()
    utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
    kernel = streaming_linear.at_hand()
    assert kernel is not None
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with monkeypatch.context() as patch, caplog.at_level("INFO", logger="vllm"):
        slow_cores(patch, kernel, 0.1)
        slow_link(patch, list(layers._linears.values()), 0.25)
        layers.loaded(torch.nn.Module())
    least = kernel.limits.gpu_from
    assert least is not None
    assert 320 - 32 < least < 1024
    # Where another handler hears vLLM's loggers too, each record is there twice.
    said = {id(one): one.getMessage() for one in caplog.records}.values()
    assert sum("the GPU's link is slow" in one for one in said) == 1
    assert "decode steps of up to" not in caplog.text
    tokens_of_gpu = noted_tokens(monkeypatch)
    for tokens in (96, least - 1, least):
        x = torch.randn(tokens, 512).bfloat16()
        found = layer.cpu_linear(x, layer.weight, None)
        torch.testing.assert_close(found.float(), x.float() @ plain.T, rtol=2**-7, atol=2**-7)
    assert tokens_of_gpu == [least]


def test_ranks_that_add_up_products_do_not_lower_their_limits_alone(
    layer: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(
        threshold, "settle", lambda *given, has_steps, **more: asked.append(has_steps)
    )
    layers = LinearLayers(CpuConfig(linear_kernel="streaming"), CPU, 64)
    assert layers.kernel is not None
    layers.kernel.gpu = object()
    one = SimpleNamespace(input=SimpleNamespace(qkv=None), parts=SimpleNamespace(linears=()))
    found: Any = SimpleNamespace(runs=[SimpleNamespace(layers=[one])])
    sums: Any = object()
    for layers.kernel.sums in (None, sums):
        layers._settle(layers.kernel, found, is_shared=False)
    layers.kernel.sums = None
    assert asked == [True, False]


def test_memory_that_is_not_there_is_a_warning_unless_it_was_asked_for(
    layer: torch.nn.Module, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_memory(self: OffloadGpu, *sizes: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(OffloadGpu, "_allocate", no_memory)
    unasked = LinearLayers(CpuConfig(linear_kernel="streaming"), CPU, 64)
    held = unasked._packed(layer)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with caplog.at_level("WARNING", logger="vllm"):
        unasked.loaded(torch.nn.Module())
    assert "CUDA out of memory" in caplog.text
    x = torch.zeros(64, 512).bfloat16()
    assert torch.ops.ray_hetero.streaming_linear(x, held, None).shape == (64, 1536)
    asked = LinearLayers(CpuConfig(linear_kernel="streaming", prefill_on_gpu=True), CPU, 64)
    asked._packed(layer)
    with pytest.raises(UnsupportedError, match=r"cpu\.prefill_on_gpu to false"):
        asked.loaded(torch.nn.Module())


def test_a_gpu_is_not_taken_for_small_weights(
    layer: torch.nn.Module, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(offload_gpu, "LEAST_BYTES", layer.weight.nbytes + 1)
    layers = LinearLayers(CpuConfig(linear_kernel="streaming"), CPU, 64)
    utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with caplog.at_level("INFO", logger="vllm"):
        layers.loaded(torch.nn.Module())
    kernel = streaming_linear.at_hand()
    assert kernel is not None
    assert kernel.gpu is None
    assert kernel.limits.gpu_from is None
    assert "prompts stay on the cores: all weights of this rank are small" in caplog.text
    assert "computed by the GPU" not in caplog.text


@pytest.mark.parametrize("has_large", [True, False])
def test_small_weights_of_layers_are_read_with_large_ones(
    has_large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = weights()[:2]
    most = max(one.nbytes for one in plain)
    monkeypatch.setattr(offload_gpu, "LEAST_BYTES", most if has_large else most + 1)
    layers = LinearLayers(CpuConfig(linear_kernel="streaming", compact_weights=False), CPU, 64)
    kernel = layers.kernel
    assert kernel is not None
    modules = [torch.nn.Linear(*reversed(one.shape), bias=False) for one in plain]
    for module, one in zip(modules, plain, strict=True):
        module.weight.data = one
        layers._packed(module)
    large, small = (layers._linears[module] for module in modules)
    assert large.weight.data.nbytes > small.weight.data.nbytes
    layer = SimpleNamespace(
        input=SimpleNamespace(qkv=large), parts=SimpleNamespace(linears=(small,), output=small)
    )
    found: Any = SimpleNamespace(runs=[SimpleNamespace(layers=[layer])])
    layers._take_gpu(kernel, found)
    assert small.weight.data.data_ptr() % mmap.PAGESIZE == 0
    assert (kernel.gpu is not None) == has_large
    if has_large:
        for one, linear in zip(plain, (large, small), strict=True):
            check(kernel.gpu, one, linear.weight.data, 33)


def test_weights_that_come_anew_are_refused(
    layer: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = pytest.importorskip("vllm.v1.worker.gpu_model_runner").GPUModelRunner
    monkeypatch.setattr(runner, "reload_weights", runner.reload_weights)
    layers = LinearLayers(CpuConfig(linear_kernel="streaming"), None, 64)
    again = layer.weight.data.clone()
    utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
    layers.loaded(torch.nn.Module())
    with pytest.raises(UnsupportedError, match=r"Start a new engine, or set cpu\.linear_kernel"):
        runner.reload_weights(None, weights_path="other")
    # Some ways of loading do not pass there.
    layer.weight = torch.nn.Parameter(again, requires_grad=False)
    with pytest.raises(UnsupportedError, match="cannot load weights anew"):
        utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)


def test_a_prompt_gpu_that_cannot_be_had_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="no GPU rank of this engine is on the node"):
        LinearLayers(CpuConfig(linear_kernel="streaming", prefill_on_gpu=True), None, 64)
    with pytest.raises(UnsupportedError, match=r"Type: cpu\.linear_kernel: streaming"):
        LinearLayers(CpuConfig(linear_kernel="vllm", prefill_on_gpu=True), CPU, 64)


def test_a_gpu_that_runs_out_of_memory_leaves_products_to_the_cores(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain = weights()
    gpu, packed = prompt_gpu(plain)
    kernel = StreamingLinear(native)
    kernel.gpu, kernel.limits = gpu, StepLimits(128, 8, gpu.tokens, has_products=True)
    x = torch.randn(32, SHAPES[0][1]).bfloat16()
    expected = kernel(x, packed[0], None)

    def fail(*given: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(gpu.memory, "sent_alone", fail)
    with caplog.at_level(logging.WARNING, "vllm.ray_hetero"):
        for _ in range(2):
            found = kernel(x, packed[0], None)
    torch.testing.assert_close(found.float(), expected.float(), rtol=2**-8, atol=2**-8)
    assert (kernel.gpu, kernel.limits.has_products) == (None, False)
    assert caplog.text.count("from now on the cores compute them") == 1

"""What lies between two attentions as one piece of work, against torch."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from native_module import LEVELS, native, needs_native  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402

from ray_hetero.kernels import gpu_prefill  # noqa: E402
from ray_hetero.kernels.gpu_prefill import GpuPrefill  # noqa: E402
from ray_hetero.kernels.layer_parts import (  # noqa: E402
    Linear,
    Norm,
    PostAttention,
    QkvInput,
)
from ray_hetero.kernels.post_attention import PostAttentionBlock  # noqa: E402
from ray_hetero.kernels.streaming_linear import Prompts, StreamingLinear  # noqa: E402
from ray_hetero.planning import prefill_memory  # noqa: E402
from ray_hetero.weight_formats import CompactWeight, PackedWeight  # noqa: E402
from ray_hetero.weight_formats.base import pack  # noqa: E402

current_platform.import_kernels()
pytestmark = needs_native

HIDDEN, ATTENDED, WIDE, QUERIES = 512, 384, 1376, 768
EPSILON = 1e-5
TOLERANCE = {"rtol": 2**-6, "atol": 2**-5}
"""Of sums of bf16 products that were rounded four times on their way."""
LOOSER = {"rtol": 2**-6, "atol": 2**-3}
"""Where vLLM's operators compute: those for AVX2 round more often."""


def kernel(level: str = LEVELS[-1] if LEVELS else "", few_tokens: int = 4) -> StreamingLinear:
    """Where more than four tokens are many."""
    made = StreamingLinear(native, native.level(level))
    made.few_tokens = few_tokens
    return made


def linear(
    outputs: int, inputs: int, *, has_bias: bool = False, is_compact: bool = False
) -> tuple[Linear, torch.Tensor]:
    weight = torch.randn(outputs, inputs).mul_(inputs**-0.5).bfloat16()
    bias = torch.randn(outputs).bfloat16().float() if has_bias else None
    held = (CompactWeight if is_compact else PackedWeight).made(pack(weight), native)
    assert held is not None
    return Linear(held, bias), weight.float()


def norm() -> Norm:
    return Norm(torch.rand(HIDDEN).add_(0.5).bfloat16(), EPSILON)


class Layer:
    """Random parts, and what torch computes with them."""

    def __init__(self, *, is_last: bool, is_compact: bool = False) -> None:
        torch.manual_seed(3)
        made = [
            linear(HIDDEN, ATTENDED, is_compact=is_compact),
            linear(2 * WIDE, HIDDEN, has_bias=True, is_compact=is_compact),
            # Layers of both kinds may be together.
            linear(HIDDEN, WIDE),
            linear(QUERIES, HIDDEN, has_bias=True, is_compact=is_compact),
        ]
        output, gate_up, down, queries = (one for one, _ in made)
        self._plain = {id(one): weight for one, weight in made}
        following = None if is_last else QkvInput(norm(), queries)
        self.parts = PostAttention(output, norm(), gate_up, down, following)

    def _linear(self, x: torch.Tensor, one: Linear) -> torch.Tensor:
        y = x.float() @ self._plain[id(one)].T
        return (y if one.bias is None else y + one.bias).bfloat16()

    @staticmethod
    def _add_and_norm(
        x: torch.Tensor, residual: torch.Tensor, norm: Norm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        both = x.float() + residual.float()
        scale = torch.rsqrt(both.square().mean(-1, keepdim=True) + norm.epsilon)
        return (both * scale).bfloat16() * norm.weight, both.bfloat16()

    def expected(
        self, attended: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        parts = self.parts
        x, total = self._add_and_norm(self._linear(attended, parts.output), residual, parts.norm)
        gate, up = self._linear(x, parts.gate_up).float().chunk(2, dim=1)
        x = self._linear((torch.nn.functional.silu(gate) * up).bfloat16(), parts.down)
        if parts.next is None:
            return x, total
        x, total = self._add_and_norm(x, total, parts.next.norm)
        return self._linear(x, parts.next.qkv), total


def check(fused: PostAttentionBlock, layer: Layer, tokens: int) -> None:
    # Views of wider tensors, as slices of what a step has more of.
    attended = torch.randn(tokens, ATTENDED + 32).bfloat16()[:, :ATTENDED]
    residual = torch.randn(tokens, HIDDEN + 32).bfloat16()[:, :HIDDEN]
    before = residual.clone()
    tolerance = TOLERANCE if tokens <= fused._kernel.few_tokens else LOOSER
    for found, expected in zip(
        fused(attended, residual), layer.expected(attended, residual), strict=True
    ):
        assert found.is_contiguous()
        torch.testing.assert_close(found.float(), expected.float(), **tolerance)
    assert torch.equal(residual, before)


@pytest.mark.parametrize("is_compact", [False, True])
@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 4, 5, 40])
def test_it_computes_what_torch_computes(tokens: int, is_last: bool, is_compact: bool) -> None:
    layer = Layer(is_last=is_last, is_compact=is_compact)
    check(PostAttentionBlock(layer.parts, kernel()), layer, tokens)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("is_compact", [False, True])
@pytest.mark.parametrize("tokens", [1, 8, 16, 17, 32, 33])
def test_at_each_level(tokens: int, is_compact: bool, level: str) -> None:
    layer = Layer(is_last=False, is_compact=is_compact)
    check(PostAttentionBlock(layer.parts, kernel(level, few_tokens=32)), layer, tokens)


@pytest.mark.parametrize("threads", [1, 3, 5])
def test_threads_do_not_change_the_result(threads: int) -> None:
    layer = Layer(is_last=False)
    fused = PostAttentionBlock(layer.parts, kernel())
    attended, residual = (torch.randn(3, n).bfloat16() for n in (ATTENDED, HIDDEN))
    expected = fused(attended, residual)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for _ in range(20):
            for one, other in zip(fused(attended, residual), expected, strict=True):
                assert torch.equal(one, other)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("is_compact", [False, True])
@pytest.mark.parametrize("is_last", [False, True])
def test_many_tokens_are_one_piece_of_work_for_a_gpu(
    is_last: bool, is_compact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_memory, "PIECE_BYTES", 256 << 10)
    monkeypatch.setattr(gpu_prefill, "LEAST_BYTES", 1)
    # The last chunk is shorter.
    monkeypatch.setattr(gpu_prefill, "CHUNK_TOKENS", 24)
    layer = Layer(is_last=is_last, is_compact=is_compact)
    gpu = GpuPrefill(torch.device("cpu"), 64)
    for one in layer.parts.linears:
        gpu.add(one.weight)
    gpu.take()
    computing = kernel()
    computing.prompts = Prompts(gpu, 16)
    fused = PostAttentionBlock(layer.parts, computing)
    sizes: list[int] = []
    post_attention = GpuPrefill.post_attention

    def call_and_note(self: GpuPrefill, parts: PostAttention, x: torch.Tensor, *rest: Any) -> Any:
        sizes.append(len(x))
        return post_attention(self, parts, x, *rest)

    monkeypatch.setattr(GpuPrefill, "post_attention", call_and_note)
    for tokens in (15, 16, 64, 65, 50):
        check(fused, layer, tokens)
    assert sizes == [16, 64, 50]


def test_layers_that_do_not_fit_together_are_refused() -> None:
    layer = Layer(is_last=False)
    swapped = PostAttention(layer.parts.output, norm(), layer.parts.down, layer.parts.gate_up)
    with pytest.raises(ValueError, match="fit together"):
        PostAttentionBlock(swapped, kernel())

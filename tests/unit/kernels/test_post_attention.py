"""What lies between two attentions as one piece of work, against torch."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from native_module import BETWEEN_PRODUCTS, LEVELS, level_of, native, needs_native  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402

from ray_hetero.kernels.formats import CompactWeight, PackedWeight  # noqa: E402
from ray_hetero.kernels.formats.base import pack  # noqa: E402
from ray_hetero.kernels.layers import post_attention  # noqa: E402
from ray_hetero.kernels.layers.layer_parts import (  # noqa: E402
    ACTIVATIONS,
    Activation,
    Linear,
    Norm,
    NormKind,
    PostAttention,
    QkvInput,
)
from ray_hetero.kernels.layers.post_attention import PostAttentionBlock  # noqa: E402
from ray_hetero.kernels.linear.streaming_linear import StreamingLinear  # noqa: E402
from ray_hetero.kernels.step_route import StepLimits  # noqa: E402
from ray_hetero.offload.prefill import layer_ops, offload_gpu  # noqa: E402
from ray_hetero.offload.prefill.offload_gpu import OffloadGpu  # noqa: E402
from ray_hetero.planning import prefill_memory  # noqa: E402

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
    made = StreamingLinear(native, level_of(level))
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


def norm(kind: NormKind = "rms", *, of_rounded: bool = False) -> Norm:
    weight = torch.rand(HIDDEN).add_(0.5).bfloat16()
    bias = torch.randn(HIDDEN).bfloat16() if kind == "layer" else None
    return Norm(weight, EPSILON, kind, bias, of_rounded)


class Layer:
    """Random parts, and what torch computes with them.

    Args:
        is_last: whether no layer follows.
        is_compact: whether most weights are.
        is_gated: whether the MLP has a gate.
        kind: of all norms.
        of_rounded: whether sums are rounded first.
        has_own_norms: whether what is added to the residual has norms.
        changes: of the other parts.

    """

    def __init__(
        self, *, is_last: bool, is_compact: bool = False, is_gated: bool = True,
        kind: NormKind = "rms", of_rounded: bool = False, has_own_norms: bool = False,
        **changes: Any,
    ) -> None:  # fmt: skip
        torch.manual_seed(3)
        made = [
            linear(HIDDEN, ATTENDED, is_compact=is_compact),
            linear((1 + is_gated) * WIDE, HIDDEN, has_bias=True, is_compact=is_compact),
            # Layers of both kinds may be together.
            linear(HIDDEN, WIDE),
            linear(QUERIES, HIDDEN, has_bias=True, is_compact=is_compact),
        ]
        output, gate_up, down, queries = (one for one, _ in made)
        self._plain = {id(one): weight for one, weight in made}
        following = None if is_last else QkvInput(norm(kind, of_rounded=of_rounded), queries)
        own = {name: norm(kind) for name in ("output_norm", "down_norm") if has_own_norms}
        self.parts = PostAttention(
            output, norm(kind, of_rounded=of_rounded), gate_up, down, following, **own, **changes
        )

    def _linear(self, x: torch.Tensor, one: Linear) -> torch.Tensor:
        y = x.float() @ self._plain[id(one)].T
        return (y if one.bias is None else y + one.bias).bfloat16()

    def _norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        """Of float32, in bf16."""
        weight = norm.weight.float()
        if norm.kind == "layer":
            assert norm.bias is not None
            x = x - x.mean(-1, keepdim=True)
        scaled = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.epsilon)
        if norm.kind == "layer":
            return (scaled * weight + norm.bias.float()).bfloat16()
        if norm.kind == "rms_plus_one":
            return (scaled * (1 + weight)).bfloat16()
        return scaled.bfloat16() * norm.weight

    def _addend(self, x: torch.Tensor, own: Norm | None) -> torch.Tensor:
        x = x if own is None else self._norm(x.float(), own)
        return (x.float() * self.parts.multiplier).bfloat16()

    def _add_and_norm(
        self, x: torch.Tensor, residual: torch.Tensor, norm: Norm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        both = x.float() + residual.float()
        return self._norm(both.bfloat16().float() if norm.of_rounded else both, norm), (
            both.bfloat16()
        )

    def _activated(self, x: torch.Tensor) -> torch.Tensor:
        functions = {
            "silu": lambda x: x * torch.sigmoid(x),
            "gelu": lambda x: x * 0.5 * (1 + torch.erf(x * 0.5**0.5)),
            "gelu_tanh": lambda x: 0.5 * x * (
                1 + torch.tanh((2 / math.pi) ** 0.5 * (x + 0.044715 * x**3))
            ),
            "relu": lambda x: x.clamp(min=0),
            "relu_squared": lambda x: x.clamp(min=0).square(),
        }  # fmt: skip
        function = functions[self.parts.activation]
        if not self.parts.is_gated:
            return function(x.float()).bfloat16()
        gate, up = x.float().chunk(2, dim=1)
        return (function(gate) * up).bfloat16()

    def expected(
        self, attended: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        parts = self.parts
        added = self._addend(self._linear(attended, parts.output), parts.output_norm)
        x, total = self._add_and_norm(added, residual, parts.norm)
        if parts.is_parallel:
            x = self._norm(residual.float(), parts.norm)
        x = self._linear(self._activated(self._linear(x, parts.gate_up)), parts.down)
        x = self._addend(x, parts.down_norm)
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


@pytest.mark.parametrize("level", BETWEEN_PRODUCTS)
@pytest.mark.parametrize("is_compact", [False, True])
@pytest.mark.parametrize("tokens", [1, 8, 16, 17, 32, 33])
def test_at_each_level(tokens: int, is_compact: bool, level: str) -> None:
    layer = Layer(is_last=False, is_compact=is_compact)
    check(PostAttentionBlock(layer.parts, kernel(level, few_tokens=32)), layer, tokens)


VARIANTS: dict[str, dict[str, Any]] = {
    "gemma": {"kind": "rms_plus_one", "activation": "gelu_tanh", "has_own_norms": True},
    "glm": {"has_own_norms": True},
    "granite": {"multiplier": 0.22, "of_rounded": True},
    "granite with norms": {"multiplier": 0.22, "has_own_norms": True},
    "stablelm": {"kind": "layer", "of_rounded": True},
    "opt": {"kind": "layer", "is_gated": False, "activation": "relu", "of_rounded": True},
    "falcon": {"kind": "layer", "is_gated": False, "activation": "gelu", "is_parallel": True},
    "parallel, gated": {"is_parallel": True, "activation": "gelu"},
    "squared": {"is_gated": False, "activation": "relu_squared"},
}


@pytest.mark.parametrize("level", BETWEEN_PRODUCTS)
@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("tokens", [1, 5, 33])
def test_parts_of_other_models(tokens: int, variant: str, is_last: bool, level: str) -> None:
    layer = Layer(is_last=is_last, **VARIANTS[variant])
    check(PostAttentionBlock(layer.parts, kernel(level, few_tokens=32)), layer, tokens)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("level", BETWEEN_PRODUCTS)
def test_activations_of_all_numbers(level: str, activation: Activation) -> None:
    # The products change nothing: each activation is seen alone.
    size = 512
    same = Linear(PackedWeight.made(pack(torch.eye(size).bfloat16()), native), None)
    ones = Norm(torch.ones(size).bfloat16(), 0.0)
    parts = PostAttention(same, ones, same, same, activation=activation, is_parallel=True)
    numbers = torch.cat([torch.linspace(-12, 12, 384), torch.logspace(-30, 3, 64),
                         -torch.logspace(-30, 3, 64)]).bfloat16()[None]  # fmt: skip
    x = numbers.float()
    x = (x * torch.rsqrt(x.square().mean())).bfloat16()
    found, _ = PostAttentionBlock(parts, kernel(level))(torch.zeros_like(x), numbers)
    expected = ACTIVATIONS[activation](x.double())
    torch.testing.assert_close(found.double(), expected, rtol=2**-7, atol=1e-6)


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


@pytest.mark.parametrize(
    "variant", [{}, {"is_compact": True}, *VARIANTS.values()],
    ids=["packed", "compact", *VARIANTS],
)  # fmt: skip
@pytest.mark.parametrize("is_last", [False, True])
def test_many_tokens_are_one_piece_of_work_for_a_gpu(
    is_last: bool, variant: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_memory, "PIECE_BYTES", 256 << 10)
    monkeypatch.setattr(offload_gpu, "LEAST_BYTES", 1)
    # The last chunk is shorter.
    monkeypatch.setattr(layer_ops, "CHUNK_TOKENS", 24)
    layer = Layer(is_last=is_last, **variant)
    gpu = OffloadGpu(torch.device("cpu"), 64)
    for one in layer.parts.linears:
        gpu.add(one.weight)
    gpu.take()
    computing = kernel()
    computing.gpu, computing.limits = gpu, StepLimits(128, 16, gpu.tokens)
    fused = PostAttentionBlock(layer.parts, computing)
    sizes: list[int] = []
    post_attention = OffloadGpu.post_attention

    def call_and_note(gpu: OffloadGpu, parts: PostAttention, x: torch.Tensor, *rest: Any) -> Any:
        sizes.append(len(x))
        return post_attention(gpu, parts, x, *rest)

    monkeypatch.setattr(OffloadGpu, "post_attention", call_and_note)
    for tokens in (15, 16, 64, 65, 50):
        check(fused, layer, tokens)
    assert sizes == [16, 64, 50]


def test_steps_of_many_tokens_round_and_do_not_cut_off() -> None:
    torch.manual_seed(0)
    how = Norm(torch.ones(HIDDEN).bfloat16(), EPSILON)
    x, y = (torch.randn(64, HIDDEN).bfloat16() for _ in range(2))
    total = x.float() + y.float()
    normed, behind = post_attention.norm(x, how), post_attention.add_and_norm(y, x.clone(), how)
    for found, given in ((normed, x.float()), (behind, total)):
        exact = torch.nn.functional.rms_norm(given.double(), (HIDDEN,), eps=EPSILON)
        # What is cut off is smaller in all places.
        assert 0.45 < (found.double().abs() < exact.abs()).double().mean() < 0.55


def test_layers_that_do_not_fit_together_are_refused() -> None:
    layer = Layer(is_last=False)
    with pytest.raises(ValueError, match="an activation among silu, gelu"):
        PostAttentionBlock(replace(layer.parts, activation="tanh"), kernel())
    swapped = PostAttention(layer.parts.output, norm(), layer.parts.down, layer.parts.gate_up)
    with pytest.raises(ValueError, match="fit together"):
        PostAttentionBlock(swapped, kernel())

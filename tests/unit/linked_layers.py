"""Layers of experts in memory that another process could map, beside what they are in plain
tensors; for the tests of experts over the link, on a GPU too.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from native_module import LEVELS, native

from ray_hetero.compat.models.quantised_experts import StoredExperts
from ray_hetero.kernels.experts.activations import SILU, SWIGLU_OAI, SWIGLU_STEP, Activation, Order
from ray_hetero.kernels.experts.expert_matrices import ExpertMatrices
from ray_hetero.kernels.experts.expert_room import SharedRoom
from ray_hetero.kernels.experts.quantised_experts import KINDS, codes_of, held
from ray_hetero.kernels.experts.routed_experts import RoutedExperts
from ray_hetero.kernels.formats import FORMATS
from ray_hetero.offload.experts.linked_experts import LinkedSlice, received, shared

EXPERTS, HIDDEN, INNER, CHOSEN = 7, 64, 96, 3
ACTIVATIONS = {
    "silu": SILU, "swigluoai": SWIGLU_OAI, "swiglustep": SWIGLU_STEP,
    "silu limited": Activation(limit=0.75, up_limit=0.75),
    "swigluoai_uninterleave": Activation(
        "swigluoai_uninterleave", alpha=1.702, beta=1.0, limit=0.75, up_limit=0.75
    ),
    "situ": Activation("situ", limit=1.5, up_limit=2.0),
    "gelu": Activation("gelu"), "gelu_tanh": Activation("gelu_tanh"),
    "relu2_no_mul": Activation("relu2_no_mul"),
}  # fmt: skip
"""Activations with figures that vLLM's operators take."""


class Layer:
    """A layer on so many expert ranks, and what it is in plain tensors.

    Args:
        kind: the format; of a quantised checkpoint too.
        ranks: among which its inner size is divided.
        activation: a key of `ACTIVATIONS`.
        inner: of all slices together.
        is_mixed: whether the values of some experts do not suit the compact format.

    """

    def __init__(
        self, kind: str, ranks: int, activation: str = "silu", *, inner: int = INNER,
        is_mixed: bool = False,
    ) -> None:  # fmt: skip
        self.activation = ACTIVATIONS[activation]
        self._order = self.activation.order
        each = inner // ranks
        has_bias = activation == "swigluoai"
        outputs = inner if self._order is Order.ALONE else 2 * inner
        w13 = (torch.randn(EXPERTS, outputs, HIDDEN) * HIDDEN**-0.5).bfloat16()
        w2 = (torch.randn(EXPERTS, HIDDEN, inner) * inner**-0.5).bfloat16()
        for weight in (w13, w2):
            weight.view(-1)[::1499] = 20.0
            weight.view(-1)[::1999] = -(2.0**-40)
            if is_mixed:
                weight[2:4] = torch.exp2(torch.randint(-60, 0, weight[2:4].shape)).bfloat16()
        biases = (None, None)
        if has_bias:
            biases = (torch.randn(EXPERTS, outputs).bfloat16(),
                      torch.randn(EXPERTS, HIDDEN).bfloat16())  # fmt: skip
        self.ranks: list[RoutedExperts] = []
        plain: list[tuple[torch.Tensor, ...]] = []
        for rank in range(ranks):
            part = self._outputs(inner, rank, each)
            own = (w13[:, part], w2[:, :, rank * each : (rank + 1) * each].contiguous())
            own_biases: Any = (None, None)
            if biases[0] is not None and biases[1] is not None:
                # The first rank adds the bias of down.
                own_biases = (biases[0][:, part], biases[1] if rank == 0 else 0 * biases[1])
            given = None if kind in FORMATS else stored(kind, *own)
            self.ranks.append(self._made(kind, *own, *own_biases, given))
            plain.append(tuple(one.float() for one in own) if given is None else dequantised(given))
        self.w13 = torch.empty(EXPERTS, outputs, HIDDEN)
        for rank, (gate_up, _) in enumerate(plain):
            self.w13[:, self._outputs(inner, rank, each)] = gate_up
        self.w2 = torch.cat([down for _, down in plain], dim=2)
        self.biases = biases

    def _outputs(self, inner: int, rank: int, each: int) -> torch.Tensor:
        """Which outputs of gate and up a rank has."""
        own = torch.arange(rank * each, (rank + 1) * each)
        if self._order is Order.ALONE:
            return own
        if self._order is Order.TURNS:
            return torch.stack([2 * own, 2 * own + 1], dim=1).flatten()
        return torch.cat([own, inner + own])

    def _made(
        self, kind: str, w13: Any, w2: Any, w13_bias: Any, w2_bias: Any, given: Any
    ) -> RoutedExperts:
        common: dict[str, Any] = {
            "native": native, "level": native.level(LEVELS[-1]), "activation": self.activation,
            "room": SharedRoom,
        }  # fmt: skip
        if given is None:
            matrices = ExpertMatrices(w13, w2, w13_bias, w2_bias)
            return RoutedExperts(matrices, kind=FORMATS[kind], **common)
        weights = held(given, native, self._order)
        return RoutedExperts.of_weights(weights, EXPERTS, w13_bias, w2_bias, **common)

    @functools.cached_property
    def slices(self) -> tuple[LinkedSlice, ...]:
        """As a GPU's process maps them."""
        found = []
        for experts in self.ranks:
            pages = shared(experts)
            assert pages is not None
            found.append(received(pages.descriptor, len(pages.memory)))
        return tuple(found)

    def expected(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """In float32, but for what is rounded between the two products."""
        y = torch.zeros(x.shape)
        for expert in range(EXPERTS):
            tokens, chosen = (ids == expert).nonzero(as_tuple=True)
            both = x[tokens].float() @ self.w13[expert].T
            if self.biases[0] is not None:
                both += self.biases[0][expert].float()
            out = self.activation(both).bfloat16().float() @ self.w2[expert].T
            if self.biases[1] is not None:
                out += self.biases[1][expert].float()
            y.index_add_(0, tokens, out * weights[tokens, chosen, None])
        return y


def stored(kind: str, w13: torch.Tensor, w2: torch.Tensor) -> StoredExperts:
    """Weights in the codes of a checkpoint; the values are other ones."""

    def codes(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        experts, outputs, inputs = weight.shape
        if kind == "fp8":
            scales = torch.rand(experts, outputs // 32, inputs // 32) + 0.5
            return weight.to(torch.float8_e4m3fn), scales
        if kind == "mxfp4":
            scales = torch.randint(122, 126, (experts, outputs, inputs // 32), dtype=torch.uint8)
            return torch.randint(256, (experts, outputs, inputs // 2), dtype=torch.uint8), scales
        if kind == "nvfp4":
            scales = (torch.rand(experts, outputs, inputs // 16) + 0.5).to(torch.float8_e4m3fn)
            return torch.randint(256, (experts, outputs, inputs // 2), dtype=torch.uint8), scales
        if kind == "int8":
            scales = torch.rand(experts, outputs, 1) * 0.002
            return torch.randint(-128, 128, weight.shape, dtype=torch.int8), scales
        words = torch.randint(-(2**31), 2**31, (experts, outputs, inputs // 8), dtype=torch.int32)
        scales = (torch.rand(experts, outputs, inputs // 32) * 0.02).bfloat16()
        return words, scales

    (gate_up, gate_up_scale), (down, down_scale) = codes(w13), codes(w2)
    block = (32, 32) if kind == "fp8" else None
    # An expert has factors of its own.
    factors = [torch.rand(EXPERTS) * 0.05 + 0.01 if kind == "nvfp4" else None for _ in range(2)]
    return StoredExperts(
        kind, gate_up, down, gate_up_scale, down_scale, block=block, w13_factor=factors[0],
        w2_factor=factors[1],
    )  # fmt: skip


def dequantised(given: StoredExperts) -> tuple[torch.Tensor, torch.Tensor]:
    """What the codes of a checkpoint are."""
    pairs = [codes_of(given, expert) for expert in range(EXPERTS)]
    gate_up, down = (
        torch.stack([KINDS[given.scheme].expanded(pair[half]).float() for pair in pairs])
        for half in range(2)
    )
    return gate_up, down


def routed(tokens: int, *, most: int = EXPERTS) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens with weights and ids of experts below a number."""
    x = torch.randn(tokens, HIDDEN).bfloat16()
    ids = torch.rand(tokens, most).topk(CHOSEN).indices.int()
    return x, torch.rand(tokens, CHOSEN), ids


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    most = float(expected.abs().max())
    torch.testing.assert_close(found.float(), expected, rtol=2**-6, atol=2**-7 * max(1.0, most))

"""vLLM's kernel for routed experts on a GPU, called with weights that no layer of vLLM's holds."""

from __future__ import annotations

import functools
import math
from contextvars import ContextVar
from typing import Any, Protocol

from ray_hetero.compat.patching import original, replace


class ActivationFigures(Protocol):
    """An activation of experts with its figures."""

    @property
    def value(self) -> str:
        """The value of vLLM's `MoEActivation`."""

    @property
    def alpha(self) -> float:
        """Factor of the gate in its sigmoid."""

    @property
    def beta(self) -> float:
        """Summand of up."""

    @property
    def limit(self) -> float:
        """Limit of the gate; infinite for none."""

    @property
    def up_limit(self) -> float:
        """Limit of up; infinite for none."""


Matrices = tuple[Any, Any, Any, Any]
"""Gates and ups [E, 2 · inner, hidden] as the activation wants them, downs [E, hidden, inner], and
the biases of both [E, outputs], or None; in bf16."""


def fused_experts(
    x: Any,
    matrices: Matrices,
    weights: Any,
    ids: Any,
    *,
    activation: ActivationFigures,
    count: int,
    places: Any = None,
) -> Any:
    """Sums [M, hidden] over the experts of each token, of those that are here.

    Replaces: `fused_moe.apply_moe_activation`, which the function calls between its products.
    Uses: `fused_moe.fused_experts`, `config.biased_moe_quant_config`, `activation.MoEActivation`,
    `activation.ApplyMoEActivationConfig`.
    Why: the function drops the figures of activations, which only its classes hand on.
    Can go when: `fused_experts` takes them.

    Args:
        x: [M, hidden], bf16, contiguous.
        matrices: of the experts that are here.
        weights: [M, chosen], float32.
        ids: [M, chosen], none of them negative.
        activation: what becomes of gate and up.
        count: experts of the layer.
        places: [count], int32: which of E each one is, -1 for one that is not here; None where E
            is all of them.

    """
    w13, w2, w13_bias, w2_bias = matrices
    limit, up_limit = activation.limit, activation.up_limit
    kernel, as_activation, as_config, as_figures = _kernel()
    config = None if w13_bias is None else as_config(w13_bias, w2_bias)
    _figures.set(as_figures(
        clamp_limit=None if math.isinf(limit) else limit, alpha=activation.alpha,
        beta=activation.beta, activation_situ_beta=limit,
        activation_situ_linear_beta=None if math.isinf(up_limit) else up_limit,
    ))  # fmt: skip
    try:
        return kernel(
            x, w13, w2, weights, ids, activation=as_activation(activation.value),
            global_num_experts=count, expert_map=places, quant_config=config,
        )  # fmt: skip
    finally:
        _figures.set(None)


TRITON_MULTIPLE = 16
"""Triton compiles a kernel anew where a number that was a multiple of this one is none."""


def kernel_tokens(
    w13: tuple[int, int, int], w2: tuple[int, int, int], chosen: int, least: int, most: int
) -> list[int]:
    """Numbers of tokens that stand for all compiled forms of `fused_experts`, ascending.

    vLLM chooses a kernel's tiles by the number of tokens, and Triton compiles each choice when it
    is first used, which takes a good part of a second.

    Uses: `fused_moe.try_get_optimal_moe_config`.

    Args:
        w13: shape of gates and ups, [E, 2 · inner, hidden].
        w2: shape of downs, [E, hidden, inner].
        chosen: experts of a token.
        least: tokens of a step.
        most: tokens of a step.

    """
    from vllm.model_executor.layers.fused_moe import fused_moe

    choose = original(fused_moe, "try_get_optimal_moe_config")
    found: dict[tuple[Any, ...], int] = {}
    for tokens in range(least, most + 1):
        tiles = choose(w13, w2, chosen, None, tokens)
        form = (*sorted(tiles.items()), tokens * chosen % TRITON_MULTIPLE == 0)
        found.setdefault(form, tokens)
    return sorted(found.values())


_figures: ContextVar[Any] = ContextVar("_figures", default=None)
"""Figures of the activation that the kernel is called with; None in calls of vLLM's own."""


@functools.cache
def _kernel() -> tuple[Any, Any, Any, Any]:
    from vllm.model_executor.layers.fused_moe import activation, config, fused_moe

    replace(fused_moe, "apply_moe_activation", _with_figures)
    return (
        original(fused_moe, "fused_experts"),
        original(activation, "MoEActivation"),
        original(config, "biased_moe_quant_config"),
        original(activation, "ApplyMoEActivationConfig"),
    )


def _with_figures(stock: Any) -> Any:
    def apply_moe_activation(activation: Any, output: Any, input: Any, **how: Any) -> Any:
        figures = _figures.get()
        if figures is not None:
            how["activation_config"] = figures
        return stock(activation, output, input, **how)

    return apply_moe_activation

"""vLLM's kernel for routed experts on a GPU, called with weights that no layer of vLLM's holds."""

from __future__ import annotations

import functools
import math
from contextvars import ContextVar
from typing import Any

from ray_hetero.compat.patching import original, replace


def fused_experts(
    x: Any,
    w13: Any,
    w2: Any,
    weights: Any,
    ids: Any,
    *,
    activation: str,
    alpha: float,
    beta: float,
    limit: float,
    up_limit: float,
    count: int,
    places: Any = None,
    w13_bias: Any = None,
    w2_bias: Any = None,
) -> Any:
    """Sums [M, hidden] over the experts of each token, of those that are here.

    Replaces: `fused_moe.apply_moe_activation`, which the function calls between its products.
    Uses: `fused_moe.fused_experts`, `config.biased_moe_quant_config`, `activation.MoEActivation`,
    `activation.ApplyMoEActivationConfig`.
    Why: the function drops the figures of activations, which only its classes hand on.
    Can go when: `fused_experts` takes them.

    Args:
        x: [M, hidden], bf16, contiguous.
        w13: [E, 2 · inner, hidden], bf16, gate and up as the activation wants them.
        w2: [E, hidden, inner], bf16.
        weights: [M, chosen], float32.
        ids: [M, chosen], none of them negative.
        activation: the value of vLLM's `MoEActivation`.
        alpha: factor of the gate in its sigmoid.
        beta: what is added to up.
        limit: of the gate; infinite for none.
        up_limit: of up.
        count: experts of the layer.
        places: [count], int32: which of E each one is, -1 for one that is not here; None where E
            is all of them.
        w13_bias: [E, 2 · inner], bf16, or None.
        w2_bias: [E, hidden], bf16, or None.

    """
    kernel, as_activation, as_config, as_figures = _kernel()
    config = None if w13_bias is None else as_config(w13_bias, w2_bias)
    _figures.set(as_figures(
        clamp_limit=None if math.isinf(limit) else limit, alpha=alpha, beta=beta,
        activation_situ_beta=limit,
        activation_situ_linear_beta=None if math.isinf(up_limit) else up_limit,
    ))  # fmt: skip
    try:
        return kernel(
            x, w13, w2, weights, ids, activation=as_activation(activation),
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

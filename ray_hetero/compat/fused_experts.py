"""vLLM's kernel for routed experts on a GPU, called with weights that no layer of vLLM's holds."""

from __future__ import annotations

import functools
from typing import Any

from ray_hetero.compat.patching import original


def fused_experts(
    x: Any,
    w13: Any,
    w2: Any,
    weights: Any,
    ids: Any,
    *,
    activation: str,
    count: int,
    places: Any = None,
    w13_bias: Any = None,
    w2_bias: Any = None,
) -> Any:
    """Sums [M, hidden] over the experts of each token, of those that are here.

    Uses: `fused_moe.fused_experts`, `config.biased_moe_quant_config`,
    `activation.MoEActivation`.

    Args:
        x: [M, hidden], bf16, contiguous.
        w13: [E, 2 · inner, hidden], bf16, gate and up as the activation wants them.
        w2: [E, hidden, inner], bf16.
        weights: [M, chosen], float32.
        ids: [M, chosen], none of them negative.
        activation: the value of vLLM's `MoEActivation`.
        count: experts of the layer.
        places: [count], int32: which of E each one is, -1 for one that is not here; None where E
            is all of them.
        w13_bias: [E, 2 · inner], bf16, or None.
        w2_bias: [E, hidden], bf16, or None.

    """
    kernel, as_activation, as_config = _kernel()
    config = None if w13_bias is None else as_config(w13_bias, w2_bias)
    return kernel(
        x, w13, w2, weights, ids, activation=as_activation(activation), global_num_experts=count,
        expert_map=places, quant_config=config,
    )  # fmt: skip


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


@functools.cache
def _kernel() -> tuple[Any, Any, Any]:
    from vllm.model_executor.layers.fused_moe import activation, config, fused_moe

    return (
        original(fused_moe, "fused_experts"),
        original(activation, "MoEActivation"),
        original(config, "biased_moe_quant_config"),
    )

"""Up to how many tokens a decode step stays on the cores where a GPU computes large steps.

The cores compute a decode step in one call, whose time grows with its tokens once multiplying takes
longer than reading the weights.  Over a GPU's link the weights take the same time whatever the
number of tokens.  Which is less for the largest step that the call takes differs between hosts, so
that it is measured: products of a few layers, one after the other, so that no cache holds them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from ray_hetero.kernels.gpu_prefill import GpuPrefill
from ray_hetero.kernels.layer_parts import Linear
from ray_hetero.kernels.streaming_linear import StreamingLinear
from ray_hetero.log import logger

MEASURED_LAYERS = 4
"""Of an 8B model they have more bytes than a socket's third-level cache."""
ROUNDS = 3
"""Of which the fastest counts; in the first one the GPU builds its kernels."""


def settle(
    kernel: StreamingLinear, gpu: GpuPrefill, from_tokens: int, layers: Sequence[Sequence[Linear]]
) -> None:
    """Leave steps of so many tokens and more to the GPU where its link is faster than the cores.

    Args:
        kernel: of this rank, without prompts on a GPU yet; its `step_tokens` is set.
        gpu: has the weights.
        from_tokens: of a step, from which the GPU computes linear layers.
        layers: the linear layers of each decoder layer.

    """
    tokens = kernel.step_tokens
    some = [
        linear
        for layer in layers[:MEASURED_LAYERS]
        for linear in layer
        if gpu.suits(linear.weight.data, tokens)
    ]
    if from_tokens > tokens or not some:
        return
    inputs = {linear.weight.shape[1] for linear in some}
    given = {size: torch.randn(tokens, size).bfloat16() for size in inputs}

    def on_cores(linear: Linear) -> None:
        kernel.compute(given[linear.weight.shape[1]], linear.weight, linear.bias)

    def over_link(linear: Linear) -> None:
        gpu.linear(given[linear.weight.shape[1]], linear.weight.data, linear.bias)

    cores, link = (_seconds(how, some) for how in (on_cores, over_link))
    if link < cores:
        kernel.step_tokens = max(kernel.few_tokens, from_tokens - 1)
    logger.info(
        "decode steps of up to %d tokens are computed by the cores: products of %d take them "
        "%.1f ms, and the GPU over its link %.1f ms",
        kernel.step_tokens,
        tokens,
        1e3 * cores,
        1e3 * link,
    )


def _seconds(compute: Callable[[Linear], None], linears: Sequence[Linear]) -> float:
    taken = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        for linear in linears:
            compute(linear)
        taken.append(time.perf_counter() - began)
    return min(taken)

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

from ray_hetero.kernels.layers.layer_parts import Linear
from ray_hetero.kernels.linear.streaming_linear import StreamingLinear
from ray_hetero.kernels.prompts.gpu_prefill import GpuPrefill
from ray_hetero.log import logger

MEASURED_LAYERS = 4
"""Layers measured; of an 8B model they have more bytes than a socket's third-level cache."""
ROUNDS = 3
"""Rounds, of which the fastest counts; in the first one the GPU builds its kernels."""


def settle(
    kernel: StreamingLinear, gpu: GpuPrefill, from_tokens: int, layers: Sequence[Sequence[Linear]]
) -> None:
    """Leave steps of so many tokens and more to the GPU where its link is faster than the cores.

    Args:
        kernel: of this rank; its `step_tokens` is set.
        gpu: has the weights.
        from_tokens: of a step, from which the GPU computes linear layers.
        layers: the linear layers of each decoder layer.

    """
    some = [one for one in first(layers) if gpu.suits(one.weight.data, kernel.step_tokens)]
    if some and is_open(kernel, from_tokens, gpu.tokens):
        choose(kernel, from_tokens, on_cores(kernel, some), over_link(kernel, gpu, some))


def is_open(kernel: StreamingLinear, from_tokens: int, tokens: int) -> bool:
    """Whether both could compute the largest step that the cores compute in one call.

    Args:
        kernel: of this rank.
        from_tokens: of a step, from which the GPU computes it.
        tokens: of a step, up to which the GPU has room.

    """
    return from_tokens <= kernel.step_tokens <= tokens


def first(layers: Sequence[Sequence[Linear]]) -> list[Linear]:
    """The linear layers that are measured: those of the first decoder layers."""
    return [linear for layer in layers[:MEASURED_LAYERS] for linear in layer]


def on_cores(kernel: StreamingLinear, linears: Sequence[Linear]) -> float:
    """Seconds that this rank's cores take for the largest step's products of linear layers."""
    return _seconds(
        lambda x, linear: kernel.on_cores(x, linear.weight, linear.bias),
        kernel.step_tokens,
        linears,
    )


def over_link(kernel: StreamingLinear, gpu: GpuPrefill, linears: Sequence[Linear]) -> float:
    """Seconds that a GPU takes for the same, with weights that it reads over its link."""
    return _seconds(
        lambda x, linear: gpu.linear(x, linear.weight.data, linear.bias),
        kernel.step_tokens,
        linears,
    )


def choose(kernel: StreamingLinear, from_tokens: int, cores: float, link: float) -> None:
    """Set the kernel's `step_tokens` by what was measured, and say so.

    Args:
        kernel: of this rank.
        from_tokens: of a step, from which the GPU computes it.
        cores: seconds of `on_cores`; in a group those of its slowest rank.
        link: seconds of `over_link`; in a group for all ranks' parts of the same layers.

    """
    tokens = kernel.step_tokens
    if link < cores:
        kernel.step_tokens = max(kernel.few_tokens, from_tokens - 1)
    logger.info(
        "decode steps of up to %d tokens are computed by the cores: products of %d tokens take "
        "%.1f ms on the cores, and %.1f ms on the GPU over its link",
        kernel.step_tokens,
        tokens,
        1e3 * cores,
        1e3 * link,
    )


def _seconds(
    compute: Callable[[torch.Tensor, Linear], object], tokens: int, linears: Sequence[Linear]
) -> float:
    inputs = {linear.weight.shape[1] for linear in linears}
    given = {size: torch.randn(tokens, size).bfloat16() for size in inputs}
    taken = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        for linear in linears:
            compute(given[linear.weight.shape[1]], linear)
        taken.append(time.perf_counter() - began)
    return min(taken)

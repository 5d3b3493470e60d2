"""Up to how many tokens a step stays on the cores where a GPU computes large steps.

The cores compute a decode step in one call, whose time grows with its tokens once multiplying takes
longer than reading the weights.  Over a GPU's link the weights take the same time whatever the
number of tokens.  Which is less for the largest step that the call takes differs between hosts:
products of a few layers are measured, one after the other, so that no cache holds them.

Where the link takes clearly longer, prompts of more tokens than that are faster on the cores too,
up to a number that follows from the same two times.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from ray_hetero.kernels.layers.layer_parts import Linear
from ray_hetero.kernels.linear.streaming_linear import StreamingLinear
from ray_hetero.log import logger
from ray_hetero.offload.prefill.offload_gpu import OffloadGpu

MEASURED_LAYERS = 4
"""Layers measured; of an 8B model they have more bytes than a socket's third-level cache."""
ROUNDS = 3
"""Rounds, of which the fastest counts; in the first one the GPU builds its kernels."""
SLOW = 1.25
"""Factor on the time of the cores from which the link is slow.  Where both take about as long,
which of them is faster differs from start to start, and neither costs much."""
WHOLE_STEP = 1.5
"""Factor on the link's time of products for what a decode step takes there as a whole: keys and
values of its requests cross the link too, each layer's before its attention.  On an H200 a step of
128 requests, whose products had been measured to take 110 ms over the link and 114 ms on the cores
of two ranks, took 158 ms."""
CONFIRMED_S = 1.0
"""Seconds in which a link that seems slow is measured again, at least once: another program that
uses it for a moment would decide for as long as the engine runs."""
MULTIPLE = 32
"""Divisor of the number of tokens from which a GPU with a slow link computes a step."""


def settle(
    kernel: StreamingLinear, gpu: OffloadGpu, layers: Sequence[Sequence[Linear]], *,
    is_auto: bool = False, has_steps: bool = True,
) -> None:  # fmt: skip
    """Leave steps to whichever is faster, the GPU with its link or the cores.

    Args:
        kernel: of this rank.  Where the link is faster, the `native_tokens` of its limits are
            lowered; where it is slow, `gpu_from` is raised.
        gpu: computes steps of many tokens.
        layers: the linear layers of each decoder layer.
        is_auto: whether a slow link raises `gpu_from`.
        has_steps: whether the cores alone compute decode steps of these layers in one call.

    """
    least, tokens = kernel.limits.gpu_from, kernel.limits.native_tokens
    some = [one for one in first(layers) if gpu.suits(one.weight.data, tokens)]
    if least is None or not (some and is_open(kernel, least, gpu.tokens)):
        return
    if not (has_steps or is_auto):
        return
    cores = on_cores(kernel, some)
    link = over_link(kernel, gpu, some)
    if is_auto:
        link = confirmed(kernel, gpu, some, cores, link)
        many = raised(kernel, gpu, least, cores, link)
        kernel.limits = replace(kernel.limits, gpu_from=many)
    if has_steps:
        choose(kernel, least, cores, link)


def is_open(kernel: StreamingLinear, from_tokens: int, tokens: int) -> bool:
    """Whether both could compute the largest step that the cores compute in one call.

    Args:
        kernel: of this rank.
        from_tokens: of a step, from which the GPU computes it.
        tokens: of a step, up to which the GPU has room.

    """
    return from_tokens <= kernel.limits.native_tokens <= tokens


def first(layers: Sequence[Sequence[Linear]]) -> list[Linear]:
    """The linear layers that are measured: those of the first decoder layers."""
    return [linear for layer in layers[:MEASURED_LAYERS] for linear in layer]


def on_cores(kernel: StreamingLinear, linears: Sequence[Linear]) -> float:
    """Seconds that this rank's cores take for the largest step's products of linear layers."""
    return _seconds(
        lambda x, linear: kernel.on_cores(x, linear.weight, linear.bias),
        kernel.limits.native_tokens,
        linears,
    )


def over_link(
    kernel: StreamingLinear, gpu: OffloadGpu, linears: Sequence[Linear], rounds: int = ROUNDS
) -> float:
    """Seconds that a GPU takes for the same, with weights that it reads over its link."""
    return _seconds(
        lambda x, linear: gpu.linear(x, linear.weight.data, linear.bias),
        kernel.limits.native_tokens,
        linears,
        rounds,
    )


def confirmed(
    kernel: StreamingLinear, gpu: OffloadGpu, linears: Sequence[Linear], cores: float, link: float
) -> float:
    """Seconds of `over_link`, measured again for a while where the link seems slow.

    Args:
        kernel: of this rank.
        gpu: has the weights.
        linears: that were measured.
        cores: seconds of `on_cores`; in a group those of its slowest rank.
        link: seconds of `over_link`.

    """
    until = time.perf_counter() + CONFIRMED_S
    while link > SLOW * cores:
        link = min(link, over_link(kernel, gpu, linears, 1))
        if time.perf_counter() >= until:
            break
    return link


def raised(
    kernel: StreamingLinear, gpu: OffloadGpu, from_tokens: int, cores: float, link: float
) -> int:
    """Tokens of a step from which the GPU computes it; says so where a slow link raises them.

    The cores multiply for so many times longer as there are more tokens, and the link takes the
    same time.  For fewer tokens than were measured, reading the weights takes the cores time too.

    Args:
        kernel: of this rank, with the `native_tokens` that were measured.
        gpu: has room for its `tokens` of a step.
        from_tokens: of a step, from which the GPU computes it where its link is not slow.
        cores: as of `choose`.
        link: the same.

    """
    tokens = kernel.limits.native_tokens
    if link <= SLOW * cores:
        return from_tokens
    least = math.ceil(tokens * link / cores / MULTIPLE) * MULTIPLE
    logger.warning(
        "the GPU's link is slow beside these cores: products of %d tokens take %.1f ms on the "
        "cores, and %.1f ms on the GPU over its link, so that %s. If the link should be faster, "
        "look at its width and speed (nvidia-smi -q, lspci -vv). cpu.prefill_on_gpu_tokens sets "
        "another number, and cpu.prefill_on_gpu: false frees the GPU's memory",
        tokens,
        1e3 * cores,
        1e3 * link,
        f"prompts of fewer than {least} tokens stay on the cores"
        if least <= gpu.tokens
        else f"all prompts stay on the cores: the GPU would be faster from {least} tokens on, and "
        f"a step has {gpu.tokens} at most",
    )
    return least


def choose(kernel: StreamingLinear, from_tokens: int, cores: float, link: float) -> None:
    """Set the `native_tokens` of the kernel's limits by what was measured, and say so.

    Args:
        kernel: of this rank.
        from_tokens: of a step, from which the GPU computes it.
        cores: seconds of `on_cores`; in a group those of its slowest rank.
        link: seconds of `over_link`; in a group for all ranks' parts of the same layers.

    """
    tokens = kernel.limits.native_tokens
    if WHOLE_STEP * link < cores:
        fewer = max(kernel.few_tokens, from_tokens - 1)
        kernel.limits = replace(kernel.limits, native_tokens=fewer)
    logger.info(
        "decode steps of up to %d tokens are computed by the cores: products of %d tokens take "
        "%.1f ms on the cores, and %.1f ms on the GPU over its link",
        kernel.limits.native_tokens,
        tokens,
        1e3 * cores,
        1e3 * link,
    )


def _seconds(
    compute: Callable[[torch.Tensor, Linear], object], tokens: int, linears: Sequence[Linear],
    rounds: int = ROUNDS,
) -> float:  # fmt: skip
    inputs = {linear.weight.shape[1] for linear in linears}
    # Only the first rank of a group measures the link, and all are to sample the same tokens later.
    own = torch.Generator().manual_seed(0)
    given = {size: torch.randn(tokens, size, generator=own).bfloat16() for size in inputs}
    taken = []
    for _ in range(rounds):
        began = time.perf_counter()
        for linear in linears:
            compute(given[linear.weight.shape[1]], linear)
        taken.append(time.perf_counter() - began)
    return min(taken)

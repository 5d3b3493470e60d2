"""Steps of many tokens whose experts a stage's GPU reads over its link, in place of handing tokens
over to the expert ranks that hold them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from placement.units import GIB
from ray_hetero.config import ExpertsConfig
from ray_hetero.distributed.expert_memory import RemoteLayer
from ray_hetero.distributed.expert_offers import Offer
from ray_hetero.errors import UnsupportedError
from ray_hetero.kernels import layer_tokens
from ray_hetero.kernels.expert_rates import CoreRates, random_tokens
from ray_hetero.kernels.gpu_experts import GpuExperts
from ray_hetero.kernels.linked_experts import LinkedSlice
from ray_hetero.log import logger

MEASURED_TOKENS = 1024
"""Of the layer that the GPU is measured with."""
ROUNDS = 3
"""Of measuring, after one that builds kernels; the median counts."""


class ExpertLink:
    """What computes experts of large steps on this rank's GPU.

    Args:
        experts: where.
        tokens: least tokens of a step.

    """

    def __init__(self, experts: GpuExperts, tokens: int) -> None:
        self._experts = experts
        self._is_gpu = experts.device.type == "cuda"
        self.tokens = tokens

    def takes(self, tokens: int, layer: int) -> bool:
        """Whether a layer of a step is computed here, not on the expert ranks.

        Steps that are captured into CUDA graphs are not: a graph would read all experts, and could
        not leave out what came before.
        """
        if tokens < self.tokens or layer not in self._experts:
            return False
        return not (self._is_gpu and torch.cuda.is_current_stream_capturing())

    def begin(self, ids: torch.Tensor, layer: int) -> None:
        """Have the first experts of a layer come; see `GpuExperts.begin`."""
        self._experts.begin(ids, layer)

    def sums(
        self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, layer: int
    ) -> torch.Tensor:
        """Sums [M, hidden] of a layer; see `GpuExperts.sums`."""
        layer_tokens.count_experts(len(x))
        return self._experts.sums(x, weights, ids, layer)


def made(
    config: ExpertsConfig,
    device: torch.device,
    layers: Sequence[RemoteLayer],
    offers: Sequence[Offer],
    *,
    dtype: torch.dtype,
    tokens: int,
) -> ExpertLink | None:
    """The link of a stage's first rank to its experts; None where the cores compute all tokens.

    Args:
        config: whether to, from how many tokens on, and with how much memory of the GPU.
        device: the GPU; for tests the CPU.
        layers: of the stage.
        offers: of the expert ranks, in the order of their numbers.
        dtype: of tokens.
        tokens: most of a step.

    Raises:
        UnsupportedError: it was asked for, and cannot be had.

    """
    if not config.prefill_on_gpu or not layers:
        return None
    rates = _rates(offers)
    try:
        slices = _slices(layers, offers, dtype)
        chosen = max(layer.chosen for layer in layers)
        experts = GpuExperts(device, slices, chosen, config.prefill_gpu_gib)
    except UnsupportedError as error:
        problem = f"experts of prompts are computed by the cores of expert ranks alone: {error}"
        if config.prefill_on_gpu is True:
            raise UnsupportedError(f"{problem}. Set experts.prefill_on_gpu to false.") from None
        logger.warning("%s%s (experts.prefill_on_gpu)", problem, _cost(rates))
        return None
    number = next(n for n, one in enumerate(slices) if one is not None)
    seconds = _measured(experts, device, layers[number], slices[number], number, tokens)
    least: int | None
    if config.prefill_on_gpu_tokens != "auto":
        least = config.prefill_on_gpu_tokens
    elif rates is None:
        least = None
    else:
        least = rates.crossing(seconds, tokens)
    measured = (
        f"a layer takes it {1000 * seconds:.1f} ms for {min(MEASURED_TOKENS, tokens)} tokens"
        f"{_cost(rates)}"
    )
    if least is None:
        logger.info(
            "experts of prompts are computed by the cores of expert ranks, which are faster in "
            "steps of up to %d tokens than the GPU over its link: %s (experts.prefill_on_gpu)",
            tokens,
            measured,
        )
        return None
    logger.info(
        "experts of steps of %d tokens and more, but for those in CUDA graphs, are computed by the "
        "GPU: %.1f GiB of them can be read over its link, %d experts at a time, %.2f GiB of its "
        "memory are taken (experts.prefill_on_gpu); %s",
        least,
        experts.nbytes / GIB,
        experts.experts,
        experts.gpu_bytes / GIB,
        measured,
    )
    return ExpertLink(experts, least)


def _slices(
    layers: Sequence[RemoteLayer], offers: Sequence[Offer], dtype: torch.dtype
) -> list[tuple[LinkedSlice, ...] | None]:
    """Of each layer those of all expert ranks; None where one of them has none to read.

    Raises:
        UnsupportedError: no layer can be read.

    """
    if dtype != torch.bfloat16:
        raise UnsupportedError(f"tokens are {dtype}, expected torch.bfloat16")
    found: list[tuple[LinkedSlice, ...] | None] = []
    for layer in layers:
        there = [offer.slices[layer.name] for offer in offers if layer.name in offer.slices]
        found.append(tuple(there) if len(there) == len(offers) else None)
    if not any(found):
        raise UnsupportedError(
            "none of them lies in memory that the GPU can read, in a format of this project's "
            "kernels (cpu.linear_kernel)"
        )
    return found


def _rates(offers: Sequence[Offer]) -> CoreRates | None:
    rates = [offer.rates for offer in offers if offer.rates is not None]
    return CoreRates.of_all(rates) if rates and len(rates) == len(offers) else None


def _cost(rates: CoreRates | None) -> str:
    """What the cores take, for the log."""
    if rates is None:
        return ""
    tokens, seconds = rates.points[-1]
    return f"; the cores take {1000 * seconds:.1f} ms a layer for {tokens} tokens"


def _measured(
    experts: GpuExperts,
    device: torch.device,
    layer: RemoteLayer,
    slices: Sequence[LinkedSlice] | None,
    number: int,
    tokens: int,
) -> float:
    """Seconds of a layer for tokens that choose evenly; builds the kernels too."""
    assert slices is not None
    given = random_tokens(min(MEASURED_TOKENS, tokens), layer.hidden, slices[0].count, layer.chosen)
    x, weights, ids = (tensor.to(device) for tensor in given)

    def run() -> None:
        experts.begin(ids, number)
        experts.sums(x, weights, ids, number)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return _median(run)


def _median(run: Callable[[], None]) -> float:
    run()
    taken = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        run()
        taken.append(time.perf_counter() - began)
    return sorted(taken)[len(taken) // 2]

"""Steps of many tokens whose experts a stage's GPU reads over its link, in place of handing tokens
over to the expert ranks that hold them, or some of whose experts, while the expert ranks compute
the others.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence

import torch

from placement.plan.devices import Links
from placement.units import GIB
from ray_hetero.config import ExpertsConfig
from ray_hetero.distributed.expert_channel import ExpertChannel
from ray_hetero.distributed.expert_memory import MOST_TOKENS, RemoteLayer
from ray_hetero.distributed.expert_offers import Offer
from ray_hetero.distributed.split_experts import OtherExperts
from ray_hetero.errors import UnsupportedError
from ray_hetero.kernels.experts.expert_rates import CoreRates, random_tokens
from ray_hetero.kernels.layers import layer_tokens
from ray_hetero.log import logger
from ray_hetero.offload.experts.expert_shares import ExpertShares
from ray_hetero.offload.experts.gpu_experts import GpuExperts
from ray_hetero.offload.experts.linked_experts import LinkedSlice
from ray_hetero.planning.prefill_memory import BF16_BYTES

MEASURED_TOKENS = 1024
"""Tokens of a step of the layers that the GPU is measured with."""
MEASURED_LAYERS = 3
"""Most layers of a measurement: each one's first pieces come while the one before is computed."""
ROUNDS = 3
"""Rounds of a measurement, after one that builds kernels; the median counts."""


class ExpertLink:
    """Experts of large steps on this rank's GPU: all of a layer or its first ones.

    Args:
        experts: where.
        shares: how many of a layer, by the number of tokens of a step.
        channel: to the expert ranks, which compute the others.

    """

    def __init__(self, experts: GpuExperts, shares: ExpertShares, channel: ExpertChannel) -> None:
        self._experts = experts
        self._others = OtherExperts(experts.device, channel)
        self._is_gpu = experts.device.type == "cuda"
        self.shares = shares

    def experts_here(self, tokens: int, layer: int) -> int:
        """How many experts of a layer of a step are computed here, its first ones.

        None of steps that are captured into CUDA graphs: a graph would read all experts, and could
        not leave out what came before.
        """
        if layer not in self._experts:
            return 0
        here = self.shares.experts(tokens, self._experts.count(layer))
        is_captured = here and self._is_gpu and torch.cuda.is_current_stream_capturing()
        return 0 if is_captured else here

    def begin(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, layer: int) -> None:
        """Hand tokens over for the experts that are not computed here, and have others come.

        Args:
            x: [M, hidden]; like the others unchanged until `sums` of the same.
            weights: [M, chosen].
            ids: [M, chosen]; a negative one is none.
            layer: its number.

        """
        here = self.experts_here(len(x), layer)
        if here < self._experts.count(layer):
            self._others.begin(x, weights, ids, layer, here)
        self._experts.begin(ids, layer, here)

    def sums(
        self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, layer: int
    ) -> torch.Tensor:
        """Sums [M, hidden] of a layer that was begun; see `GpuExperts.sums`."""
        layer_tokens.count_experts(len(x))
        here = self.experts_here(len(x), layer)
        others = None
        if here < self._experts.count(layer):
            others = functools.partial(self._others.sums, x, weights, layer)
        return self._experts.sums(x, weights, ids, layer, here, others)


def made(
    config: ExpertsConfig,
    device: torch.device,
    layers: Sequence[RemoteLayer],
    offers: Sequence[Offer],
    channel: ExpertChannel,
    *,
    dtype: torch.dtype,
    tokens: int,
) -> ExpertLink | None:
    """The link of a stage's first rank to its experts; None where the cores compute all tokens.

    Args:
        config: whether to, from how many tokens on, how much, and with how much memory of the GPU.
        device: the GPU; for tests the CPU.
        layers: of the stage.
        offers: of the expert ranks, in the order of their numbers.
        channel: to them.
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
    seconds = _measured(experts, layers, tokens)
    shares = _shares(config, experts, layers, rates, seconds, len(offers), tokens)
    _say(shares, experts, seconds, rates, tokens)
    if shares is None:
        return None
    _build_kernels(experts, layers, shares, tokens)
    return ExpertLink(experts, shares, channel)


def _say(
    shares: ExpertShares | None,
    experts: GpuExperts,
    seconds: float,
    rates: CoreRates | None,
    tokens: int,
) -> None:
    """Write into the log who computes what, and what that follows from."""
    measured = (
        f"a layer takes it {1000 * seconds:.1f} ms for {min(MEASURED_TOKENS, tokens)} tokens"
        f"{_cost(rates)}"
    )
    if shares is None:
        logger.info(
            "experts of prompts are computed by the cores of expert ranks, because in steps of up "
            "to %d tokens they are faster than the GPU over its link: %s (experts.prefill_on_gpu)",
            tokens,
            measured,
        )
        return
    logger.info(
        "experts of steps of %d tokens and more, except in CUDA graphs, are computed by the GPU%s: "
        "it can read %.1f GiB of them over its link, %d experts at a time, and uses %.2f GiB of "
        "its own memory (experts.prefill_on_gpu); %s",
        shares.tokens,
        _split(shares, tokens),
        experts.nbytes / GIB,
        experts.experts,
        experts.gpu_bytes / GIB,
        measured,
    )


def _split(shares: ExpertShares, tokens: int) -> str:
    """Description of a split, for the log."""
    if not shares.has_splits:
        return ""
    sizes = sorted({shares.tokens, max(shares.tokens, min(MEASURED_TOKENS, tokens)), tokens})
    return f", together with the cores ({shares.described(sizes)})"


def _shares(
    config: ExpertsConfig,
    experts: GpuExperts,
    layers: Sequence[RemoteLayer],
    rates: CoreRates | None,
    seconds: float,
    ranks: int,
    tokens: int,
) -> ExpertShares | None:
    """How many experts of a layer the GPU computes; None where it computes none of any step."""
    layer = layers[experts.layers[0]]
    count = experts.count(experts.layers[0])
    asked, least = None, config.prefill_on_gpu_tokens
    if config.prefill_gpu_share != "auto":
        asked = max(1, round(config.prefill_gpu_share * count))
    if least != "auto":
        return ExpertShares(count, ((least, asked or count),))
    if rates is None:
        return None
    link = Links().handover

    def handover(given: int) -> float:
        times = -(-given // MOST_TOKENS)
        row_bytes = layer.hidden * BF16_BYTES
        return times * link.latency_s + given * row_bytes * (1 + ranks) / link.bandwidth

    return ExpertShares.found(rates, handover, seconds, count=count, most=tokens, asked=asked)


def _slices(
    layers: Sequence[RemoteLayer], offers: Sequence[Offer], dtype: torch.dtype
) -> list[tuple[LinkedSlice, ...] | None]:
    """Slices of all expert ranks by layer; None where one of them has none to read.

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
            "the GPU can read none of them: they are not in shared memory, or not in a format of "
            "this project's kernels (cpu.linear_kernel)"
        )
    return found


def _rates(offers: Sequence[Offer]) -> CoreRates | None:
    rates = [offer.rates for offer in offers if offer.rates is not None]
    return CoreRates.of_all(rates) if rates and len(rates) == len(offers) else None


def _cost(rates: CoreRates | None) -> str:
    """Description of the cores' time, for the log."""
    if rates is None:
        return ""
    tokens, seconds = rates.points[-1]
    return f"; the cores take {1000 * seconds:.1f} ms a layer for {tokens} tokens"


def _build_kernels(
    experts: GpuExperts, layers: Sequence[RemoteLayer], shares: ExpertShares, tokens: int
) -> None:
    """Compute a layer in steps of all sizes that have a kernel of their own.

    Else the first prompt of such a size waits for a compiler.
    """
    number = experts.layers[-1]
    chosen = layers[number].chosen
    for size in experts.kernel_tokens(number, chosen, shares.tokens, tokens):
        x, weights, ids = _tokens_of(experts, layers, number, size)
        here = shares.experts(size, experts.count(number))
        experts.begin(ids, number, here)
        experts.sums(x, weights, ids, number, here)
    _finish(experts.device)


def _tokens_of(
    experts: GpuExperts, layers: Sequence[RemoteLayer], number: int, tokens: int
) -> tuple[torch.Tensor, ...]:
    """Tokens, weights and ids of a layer, chosen evenly, where the experts are computed."""
    layer = layers[number]
    given = random_tokens(tokens, layer.hidden, experts.count(number), layer.chosen)
    return tuple(tensor.to(experts.device) for tensor in given)


def _finish(device: torch.device) -> None:
    """Wait for all that has been ordered."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _measured(experts: GpuExperts, layers: Sequence[RemoteLayer], tokens: int) -> float:
    """Seconds of a layer for tokens that choose evenly; builds the kernels too."""
    # The last ones: behind them nothing is read ahead, whose time would count as theirs.
    numbers = experts.layers[-MEASURED_LAYERS:]
    count = min(MEASURED_TOKENS, tokens)
    given = [(number, _tokens_of(experts, layers, number, count)) for number in numbers]

    def run() -> None:
        for number, (x, weights, ids) in given:
            experts.begin(ids, number)
            experts.sums(x, weights, ids, number)
        _finish(experts.device)

    return _median(run) / len(numbers)


def _median(run: Callable[[], None]) -> float:
    run()
    taken = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        run()
        taken.append(time.perf_counter() - began)
    return sorted(taken)[len(taken) // 2]

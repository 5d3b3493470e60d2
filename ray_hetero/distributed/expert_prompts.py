"""Steps of many tokens whose experts a stage's GPUs read over their links, in place of handing
tokens over to the expert ranks that hold them, or some of whose experts, while the expert ranks
compute the others.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

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
from ray_hetero.kernels.linear.rank_sums import gathering
from ray_hetero.log import logger
from ray_hetero.offload.experts.expert_pieces import WHOLE, Part
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


@dataclass(frozen=True)
class Readers:
    """The GPUs of a stage, each of which reads a part of the experts."""

    part: Part
    """Part of this rank."""
    gather: Callable[[Any], list[Any]]
    """Collective of all ranks of the stage: gives their values by rank."""

    @classmethod
    def of(cls, group: Any, rank: int, size: int) -> Readers:
        """All ranks of a stage.

        Args:
            group: of torch.distributed, over Gloo.
            rank: this one's number in the group.
            size: of the group.

        """
        return cls(Part(rank, size), gathering(group, size))


ALONE = Readers(WHOLE, lambda value: [value])
"""A stage whose first GPU reads all experts."""


class ExpertLink:
    """Experts of large steps on the GPUs of this rank's stage: all of a layer or some.

    Args:
        experts: those that this rank's GPU reads.
        shares: how many of a layer all GPUs compute, by the number of tokens of a step.
        channel: to the expert ranks, which compute the others; None in ranks that hand nothing
            over.

    """

    def __init__(
        self, experts: GpuExperts, shares: ExpertShares, channel: ExpertChannel | None
    ) -> None:
        self._experts = experts
        self._others = None if channel is None else OtherExperts(experts.device, channel)
        self._is_gpu = experts.device.type == "cuda"
        self._is_here: dict[tuple[int, int], torch.Tensor] = {}
        self.shares = shares

    def experts_here(self, tokens: int, layer: int) -> int:
        """How many experts of a layer of a step the stage's GPUs compute; the same on all of them.

        None of steps that are captured into CUDA graphs: a graph would read all experts, and could
        not leave out what came before.
        """
        if layer not in self._experts:
            return 0
        here = self.shares.experts(tokens, self._experts.count(layer))
        is_captured = here and self._is_gpu and torch.cuda.is_current_stream_capturing()
        return 0 if is_captured else here

    def begin(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, layer: int) -> None:
        """Hand tokens over for the experts that no GPU computes, and have the others' weights come.

        Args:
            x: [M, hidden]; like the others unchanged until `sums` of the same.
            weights: [M, chosen].
            ids: [M, chosen]; a negative one is none.
            layer: its number.

        """
        here, count = self.experts_here(len(x), layer), self._experts.count(layer)
        if self._others is not None and here < count:
            self._others.begin(x, weights, ids, layer, self._table(here, count))
        self._experts.begin(ids, layer, here)

    def sums(
        self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, layer: int
    ) -> torch.Tensor:
        """Sums [M, hidden] of a layer that was begun, of which the stage adds up those of its
        ranks; see `GpuExperts.sums`.
        """
        here = self.experts_here(len(x), layer)
        others = None
        if self._others is not None:
            layer_tokens.count_experts(len(x))
            if here < self._experts.count(layer):
                others = functools.partial(self._others.sums, x, weights, layer)
        return self._experts.sums(x, weights, ids, layer, here, others)

    def _table(self, here: int, count: int) -> torch.Tensor:
        """Whether a GPU computes each expert of a layer of so many."""
        if (here, count) not in self._is_here:
            table = torch.zeros(count, dtype=torch.bool)
            table[self._experts.part.of_all(here, count)] = True
            self._is_here[here, count] = table.to(self._experts.device)
        return self._is_here[here, count]


def made(
    config: ExpertsConfig,
    device: torch.device,
    layers: Sequence[RemoteLayer],
    offers: Sequence[Offer],
    channel: ExpertChannel | None,
    *,
    dtype: torch.dtype,
    tokens: int,
    readers: Readers = ALONE,
) -> ExpertLink | None:
    """The link of a rank to its stage's experts; None where it reads none.  All ranks call it.

    Args:
        config: whether to, from how many tokens on, how much, and with how much memory of the GPU.
        device: the GPU; for tests the CPU.
        layers: of the stage.
        offers: of the expert ranks, in the order of their numbers.
        channel: to them, in the stage's first rank.
        dtype: of tokens.
        tokens: most of a step.
        readers: the ranks that divide the experts among them.

    Raises:
        UnsupportedError: it was asked for, and cannot be had.

    """
    if not config.prefill_on_gpu or not layers:
        return None
    rates, is_first = _rates(offers), channel is not None or readers is ALONE
    experts: GpuExperts | None = None
    problem = ""
    try:
        experts = _read_here(config, device, layers, offers, dtype, readers.part)
    except UnsupportedError as error:
        problem = str(error)
    problems = readers.gather(problem)
    if any(problems) and not is_first:
        return None
    if any(problems) and experts is not None:
        # What another lacks may be memory of its GPU, which this one has.
        experts = None
        _say_who_cannot(problems)
        return made(config, device, layers, offers, channel, dtype=dtype, tokens=tokens)
    if experts is None:
        problem = f"experts of prompts are computed by the cores of expert ranks alone: {problem}"
        if config.prefill_on_gpu is True:
            raise UnsupportedError(f"{problem}. Set experts.prefill_on_gpu to false.")
        logger.warning("%s%s (experts.prefill_on_gpu)", problem, _cost(rates))
        return None
    # All at once, as in a prompt: they share the memory of the host.
    readers.gather(None)
    seconds = max(readers.gather(_measured(experts, layers, tokens)))
    shares = _shares(config, experts, layers, rates, seconds, len(offers), tokens)
    if is_first:
        _say(shares, experts, seconds, rates, tokens)
    if shares is None:
        return None
    _build_kernels(experts, layers, shares, tokens)
    return ExpertLink(experts, shares, channel)


def _read_here(
    config: ExpertsConfig,
    device: torch.device,
    layers: Sequence[RemoteLayer],
    offers: Sequence[Offer],
    dtype: torch.dtype,
    part: Part,
) -> GpuExperts:
    """The experts that this rank's GPU reads; `UnsupportedError` as for `GpuExperts`."""
    slices, chosen = readable_slices(layers, offers, dtype), max(layer.chosen for layer in layers)
    return GpuExperts(device, slices, chosen, config.prefill_gpu_gib, part)


def _say_who_cannot(problems: Sequence[str]) -> None:
    """Write into the log which rank of the stage reads no experts, in the first one."""
    rank = next(number for number, one in enumerate(problems) if one)
    logger.warning(
        "the first GPU reads the experts of prompts for all GPUs of its stage, because rank %d "
        "of the stage cannot: %s (experts.prefill_on_gpu)",
        rank,
        problems[rank],
    )


def _say(
    shares: ExpertShares | None,
    experts: GpuExperts,
    seconds: float,
    rates: CoreRates | None,
    tokens: int,
) -> None:
    """Write into the log who computes what, and what that follows from."""
    gpus = experts.part.size
    measured = (
        f"a layer takes {'it' if gpus == 1 else 'them'} {1000 * seconds:.1f} ms for "
        f"{min(MEASURED_TOKENS, tokens)} tokens{_cost(rates)}"
    )
    if shares is None:
        logger.info(
            "experts of prompts are computed by the cores of expert ranks, because in steps of up "
            "to %d tokens they are faster than %s: %s (experts.prefill_on_gpu)",
            tokens,
            "the GPU over its link" if gpus == 1 else f"{gpus} GPUs over their links",
            measured,
        )
        return
    logger.info(
        "experts of steps of %d tokens and more, except in CUDA graphs, are computed by %s%s: %s "
        "can read %.1f GiB of them over its link, %d experts at a time, and uses %.2f GiB of "
        "its own memory (experts.prefill_on_gpu); %s",
        shares.tokens,
        "the GPU" if gpus == 1 else f"the {gpus} GPUs of the stage",
        _split(shares, tokens),
        "it" if gpus == 1 else "each",
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
    """How many experts of a layer the GPUs compute; None where they compute none of any step."""
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


def readable_slices(
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

"""Routed experts of a stage that expert ranks compute.

Two operators stand for a layer's experts: one hands the tokens over, one waits for the sums, and
what the layer computes by itself is ordered between the two.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from vllm.distributed.parallel_state import get_tp_group
from vllm.platforms import current_platform
from vllm.utils.torch_utils import direct_register_custom_op

from placement.model.shape import remote_layers
from ray_hetero.compat.models import remote_experts
from ray_hetero.distributed import expert_offers, expert_prompts, stage_slots
from ray_hetero.distributed.expert_channel import ExpertChannel, HostSignals
from ray_hetero.distributed.expert_meeting import ExpertMeeting
from ray_hetero.distributed.expert_memory import Geometry, RemoteLayer
from ray_hetero.distributed.expert_offers import Offer
from ray_hetero.distributed.expert_prompts import ExpertLink, Readers
from ray_hetero.log import logger
from ray_hetero.offload.experts.expert_slots import ExpertSlots
from ray_hetero.world import RankSpec

_library = torch.library.Library("ray_hetero", "FRAGMENT")
_channels: list[ExpertChannel] = []
"""Channel of this process: one in the first rank of a stage, once it is connected."""
_links: list[ExpertLink] = []
"""Link of this process: one where its GPU computes experts of large steps, otherwise none."""
_slots: list[ExpertSlots] = []
"""Slots of this process: those of its GPU for experts of small steps, if it has some."""


def _hand_over(
    x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, layer: int
) -> torch.Tensor:
    if link := _link_of(x, layer):
        link.begin(x, weights, ids, layer)
    elif x.shape[0]:
        for slots in _slots_of(x, layer):
            ids = slots.told(ids, layer)
        for channel in _channels:
            channel.begin(x, weights, ids, layer)
    return x.new_empty(0)


def _take(
    x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, handed: torch.Tensor, layer: int
) -> torch.Tensor:
    if not x.shape[0]:
        return torch.empty_like(x)
    if link := _link_of(x, layer):
        for channel in _channels:
            channel.check()
        return link.sums(x, weights, ids, layer)
    # Before the wait for the others, which the sockets compute meanwhile.
    here = [slots.sums(x, weights, ids, layer) for slots in _slots_of(x, layer)]
    for channel in _channels:
        return sum(here, start=channel.sums(x, weights, ids, layer))
    return torch.zeros_like(x)  # the stage's first rank has the sums


def _link_of(x: torch.Tensor, layer: int) -> ExpertLink | None:
    """The link that has a part in a layer of these tokens, if one does."""
    return next((link for link in _links if link.experts_here(x.shape[0], layer)), None)


def _slots_of(x: torch.Tensor, layer: int) -> list[ExpertSlots]:
    """The slots in which a layer of these tokens may find experts, if there are any."""
    tokens = x.shape[0]
    return [
        slots
        for slots in _slots
        # What is handed over in pieces is handed over as it was chosen.
        if slots.holds(tokens, layer) and all(tokens <= one.capacity for one in _channels)
    ]


def _nothing_yet(
    x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, layer: int
) -> torch.Tensor:
    return x.new_empty(0)


def _like_tokens(
    x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, handed: torch.Tensor, layer: int
) -> torch.Tensor:
    return torch.empty_like(x)


direct_register_custom_op(
    "hand_experts_over",
    _hand_over,
    fake_impl=_nothing_yet,
    target_lib=_library,
    dispatch_key=current_platform.dispatch_key,
)
direct_register_custom_op(
    "take_expert_sums",
    _take,
    fake_impl=_like_tokens,
    target_lib=_library,
    dispatch_key=current_platform.dispatch_key,
)


def are_remote(remote: int, layers: int) -> Callable[[str], bool]:
    """Test by name whether a layer of vLLM's has its experts on expert ranks.

    A drafter's layers, which are numbered behind the model's, have not.

    Args:
        remote: of how many layers, see `remote_layers`.
        layers: decoder layers of the model.

    """
    numbers = remote_layers(layers, remote)

    def is_remote(name: str) -> bool:
        number = next((int(part) for part in name.split(".") if part.isdecimal()), None)
        return number is not None and number in numbers

    return is_remote


class RemoteExperts:
    """The experts of this rank's stage that others compute; made before its model is loaded.

    The stage's first rank hands tokens over, and has all sums of the expert ranks.  In large steps
    every GPU of the stage may compute some experts itself, and their sums are added up.

    Args:
        rank: this one.
        layers: decoder layers of the model.
        dtype: of tokens.

    """

    def __init__(self, rank: RankSpec, layers: int, dtype: torch.dtype) -> None:
        self._world = rank.world
        self._seat = rank.seat
        self._config = rank.engine.config
        self._tokens = rank.shared.max_num_batched_tokens
        self._gpu = rank.gpu
        self._dtype = dtype
        self._layers: list[RemoteLayer] = []
        self._channel: ExpertChannel | None = None
        self._meeting: ExpertMeeting | None = None
        seat = rank.seat
        if seat.tensor_rank == 0 or self._config.experts.prefill_on_gpu:
            self._meeting = ExpertMeeting(rank.meeting, seat.stage, seat.tensor_rank)
        remote_experts.hand_experts_over(are_remote(rank.world.expert_layers, layers), self._take)

    @property
    def problem(self) -> Exception | None:
        """Error that has ended the handover; results of later steps are invalid."""
        return None if self._channel is None else self._channel.problem

    def begin_step(self, tokens: int, every: int) -> None:
        """Learn how many tokens the step has, before it is ordered; see `ExpertChannel`."""
        if self._channel is not None:
            self._channel.begin_step(tokens, every)
        for slots in _slots:
            slots.begin_step(tokens)

    @property
    def copied(self) -> int:
        """Experts that were copied into slots of this rank's GPU."""
        return sum(slots.copied for slots in _slots)

    def connect(self) -> None:
        """Wait for the expert ranks, now that the stage's layers are known.

        Raises:
            StartupError: an expert rank is late, or has ended.

        """
        if self._meeting is None:
            return
        names = [self._world.describe(seat.rank) for seat in self._world.experts]
        if self._seat.tensor_rank > 0:
            self._read(names)
            return
        geometry = Geometry.of(
            self._layers, ranks=len(names), tokens=self._tokens, dtype=self._dtype
        )
        memory, connections = self._meeting.accept(
            geometry, self._layers, names, self._config.startup.load_timeout_s
        )
        # Before the channel's watch looks whether anything comes, which nothing does from then on.
        offers = expert_offers.taken(connections, names, self._config.startup.load_timeout_s)
        signals: Any = HostSignals
        if current_platform.is_cuda():
            from ray_hetero.distributed.gpu_signals import GpuSignals

            signals = GpuSignals
        limit_s = self._config.exchange.timeout_s
        self._channel = ExpertChannel(memory, self._layers, connections, names, limit_s, signals)
        _channels[:] = [self._channel]
        self._link_up(offers)
        logger.info(
            "experts of %d layers are computed by %s", len(self._layers), " and ".join(names)
        )

    def _read(self, names: Sequence[str]) -> None:
        """Wait for the expert ranks' offers to read, in a rank that hands no tokens over.

        Raises:
            StartupError: an expert rank is late, or has ended.

        """
        assert self._meeting is not None, "it listens"
        limit_s = self._config.startup.load_timeout_s
        connections = self._meeting.accept_offers(names, limit_s)
        with contextlib.ExitStack() as stack:
            for connection in connections:
                stack.enter_context(connection)
            offers = expert_offers.taken(connections, names, limit_s)
        self._link_up(offers)

    def _link_up(self, offers: Sequence[Offer]) -> None:
        """Compute experts of large steps on the GPUs of the stage where that is possible.

        Raises:
            UnsupportedError: it was asked for, and cannot be had.

        """
        is_gpu = current_platform.is_cuda()
        device = (
            torch.device("cuda", torch.cuda.current_device()) if is_gpu else torch.device("cpu")
        )
        size = len(self._world.layout.stages[self._seat.stage])
        readers = expert_prompts.ALONE
        if size > 1:
            readers = Readers.of(get_tp_group().cpu_group, self._seat.tensor_rank, size)
        link = expert_prompts.made(
            self._config.experts, device, self._layers, offers, self._channel,
            dtype=self._dtype, tokens=self._tokens, readers=readers,
        )  # fmt: skip
        _links[:] = [] if link is None else [link]
        slots = stage_slots.made(
            self._config.experts, device, self._layers, offers, self._channel, self._gpu,
            dtype=self._dtype, ranks=size,
        )  # fmt: skip
        _slots[:] = [] if slots is None else [slots]

    def close(self) -> None:
        """Let the expert ranks go."""
        if self._channel is not None:
            self._channel.close()

    def _take(self, layer: Any) -> remote_experts.Compute:
        number = len(self._layers)
        self._layers.append(RemoteLayer(layer.layer_name, layer.hidden_size, layer.top_k))
        return _compute_of(number) if self._meeting is not None else _compute_nothing


def _compute_of(layer: int) -> remote_experts.Compute:
    def compute(
        x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, meanwhile: Callable[[], None]
    ) -> torch.Tensor:
        handed = torch.ops.ray_hetero.hand_experts_over(x, weights, ids, layer)
        meanwhile()
        sums: torch.Tensor = torch.ops.ray_hetero.take_expert_sums(x, weights, ids, handed, layer)
        return sums

    return compute


def _compute_nothing(
    x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, meanwhile: Callable[[], None]
) -> torch.Tensor:
    meanwhile()
    return torch.zeros_like(x)

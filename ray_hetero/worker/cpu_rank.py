"""A CPU rank, put together in one place: kernels, GPU for prompts, prefetching and stage output.

`RankActor` makes it before vLLM loads the model, which then takes this project's kernels, and calls
`loaded` once the weights are there.  `RankWorker` calls `step` for each step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.parallel_state import get_tp_group

from placement.plan.memory import has_whole_embedding
from ray_hetero.compat.models import cpu_linear, lora
from ray_hetero.compat.worker import cpu_worker, kv_cache, spec_decode
from ray_hetero.distributed import shared_sums
from ray_hetero.kernels.layers.layer_tokens import LayerTokens
from ray_hetero.kernels.linear.rank_sums import RankSums
from ray_hetero.kernels.step_route import Reason, StepLimits, StepRoute
from ray_hetero.log import logger
from ray_hetero.offload.group.joining import joined
from ray_hetero.offload.linear_layers import LinearLayers
from ray_hetero.runtime.shared_pages import kept_memory
from ray_hetero.worker.speculation import models_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from placement.cluster.layout import Layout
    from ray_hetero.offload.prefill.stage_output import StageOutput
    from ray_hetero.world import RankSpec


class CpuRank:
    """Everything that a CPU rank computes with, besides vLLM's worker.

    Args:
        rank: whose process this is.
        vllm_config: of the rank; the model is not loaded yet.
        gpu: that could compute this rank's prompts; None where there is none.

    Raises:
        UnsupportedError: the configuration asks for kernels or a GPU that this host lacks.

    """

    def __init__(self, rank: RankSpec, vllm_config: VllmConfig, gpu: torch.device | None) -> None:
        seat, world = rank.seat, rank.world
        if seat.socket is not None and len(seat.socket.numa_nodes) > 1:
            cpu_worker.bind_memory_to(seat.socket.numa_nodes)
        self._rank = rank
        self._vllm_config = vllm_config
        self._layers = LinearLayers(
            rank.engine.config.cpu,
            gpu,
            rank.shared.max_num_batched_tokens,
            rank.spare,
            is_shared=world.has_socket_group(seat),
            sends_alone=world.layout.sends_alone(seat.stage),
            dtype=vllm_config.model_config.dtype,
            place=rank.place,
        )
        if vllm_config.lora_config is not None:
            lora.leave_tokens_without_adapter()
        self._has_whole_embedding = keep_embeddings(vllm_config, world.layout, seat.stage)

    @property
    def output(self) -> StageOutput | None:
        """Memory of a GPU in which the stage leaves results for the next one; None where it leaves
        none there, and until the weights are loaded."""
        return self._layers.output

    def loaded(self, runner: Any) -> None:
        """Put the layers together, now that all weights are there; all ranks of a group call it.

        Args:
            runner: vLLM's, with its model and, on the ranks that have one, its drafter.

        Raises:
            UnsupportedError: as of `LinearLayers.loaded`.
            RuntimeError: another rank of the group has ended, or is late.

        """
        layers = self._layers
        sums = self._sums()
        join = None if sums is None else partial(joined, get_tp_group().cpu_group, sums)
        drafter = spec_decode.draft_model(runner)
        made = layers.loaded(runner.get_model(), sums, join, drafter)
        if layers.has_group_prompts and self._rank.seat.tensor_rank:
            kv_cache.place_in(kept_memory)
        # Compiled code is kept by what the configuration says.
        self._vllm_config.additional_config |= {
            "ray_hetero_layers": made,
            "ray_hetero_whole_embedding": self._has_whole_embedding,
        }

    def _sums(self) -> RankSums | None:
        """Sums with the other ranks of a group of CPU ranks of one host; None for other groups."""
        group = get_tp_group()
        if group.world_size == 1 or group.over_host is not None:
            return None
        return shared_sums.joined(
            group.cpu_group,
            group.ranks,
            self._layers.native,
            self._layers.sum_terms(self._vllm_config.model_config.get_hidden_size()),
            self._rank.engine.config.exchange.timeout_s,
        )

    def route(self, counts: Collection[int]) -> StepRoute:
        """The route of a step.

        Args:
            counts: tokens of each request.

        """
        kernel = self._layers.kernel
        return StepRoute.of(counts, StepLimits() if kernel is None else kernel.limits)

    @contextmanager
    def step(self, scheduler_output: Any, route: StepRoute) -> Iterator[None]:
        """Prefetch weights for a step, and keep its route for the layers while it is computed.

        Args:
            scheduler_output: vLLM's of the step.
            route: of the step.

        Raises:
            RuntimeError: as of `Prefetcher.begin_step`.
            TimeoutError: the same.

        """
        if self._layers.prefetcher is not None:
            self._layers.prefetcher.begin_step(scheduler_output, route)
        kernel = self._layers.kernel
        if kernel is None:
            yield
            return
        kernel.route = route
        try:
            yield
        finally:
            kernel.route = None

    def reason(self, route: StepRoute, computed: LayerTokens) -> Reason | None:
        """The reason for which a step was computed where it was; None with vLLM's own kernels.

        Args:
            route: of the step.
            computed: by the layers in this step.

        """
        if self._layers.kernel is None or not route.tokens:
            return None
        return computed.instead or route.reason


def keep_embeddings(vllm_config: VllmConfig, layout: Layout, stage: int) -> bool:
    """Make vLLM create embedding and output matrix in the form that a CPU rank needs.

    Args:
        vllm_config: of the rank, whose weights are not loaded yet.
        layout: of the engine.
        stage: of the rank.

    Returns:
        Whether the rank holds the input embedding whole, although others are in its group.

    """
    model, models = vllm_config.model_config, models_of(vllm_config)
    is_last = stage == len(layout.stages) - 1
    is_tied = any(getattr(one.hf_text_config, "tie_word_embeddings", True) for one in models)
    cpu_linear.keep_embeddings_once(has_tied_output=is_tied and is_last)
    is_whole = has_whole_embedding(
        layout.stages[stage],
        is_first=stage == 0,
        is_last=is_last,
        is_shared=is_tied or len(models) > 1,
    )
    if is_whole:
        # Each rank adds all that an adapter adds to an embedding, to whole rows in any case.
        cpu_linear.hold_embedding_whole(model.get_vocab_size(), model.get_hidden_size())
        logger.info("each rank of this tensor-parallel group holds the input embedding whole")
    return is_whole

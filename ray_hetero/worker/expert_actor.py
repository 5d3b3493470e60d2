"""The process of an expert rank: a Ray actor that holds experts, and is no rank of vLLM's.

Life: created in its socket's bundle with its environment → `prepare` builds its configuration →
`start` loads its slices of the experts and connects to the stages → `run` computes until a stage
ends or it is killed.
"""

from __future__ import annotations

from ray_hetero.worker import resting_collector  # before all that it would look through

# isort: split
import copy
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch

from placement.units import MIB
from ray_hetero.compat.worker import layer_partition
from ray_hetero.distributed.expert_meeting import is_ready, reach, reach_reader
from ray_hetero.distributed.expert_offers import give
from ray_hetero.distributed.expert_service import ExpertService
from ray_hetero.distributed.stage_experts import are_remote
from ray_hetero.log import logger
from ray_hetero.observability.metrics import RayMetrics, labels_of
from ray_hetero.observability.route_trace import RouteWriter, TracedLayer
from ray_hetero.observability.slot_forecast import SlotForecast, described
from ray_hetero.observability.status_board import RankReport, RankReporter
from ray_hetero.observability.step_clock import REPORT_SECONDS, StepTotals
from ray_hetero.runtime.core_binding import lead_from_first_core
from ray_hetero.worker.expert_model import core_rates, load_experts, shared_pages, slot_rates
from ray_hetero.worker.process_setup import secure, settle
from ray_hetero.worker.rank_config import Fingerprint
from ray_hetero.world import RankSpec

if TYPE_CHECKING:
    from vllm.config import VllmConfig

resting_collector.wake()


class ExpertActor:
    """Ray actor class of an expert rank; scheduled into the bundle that stands for its socket."""

    def __init__(self, rank: RankSpec, secrets: Mapping[str, str]) -> None:
        self._rank = rank
        self._service: ExpertService | None = None
        self._writing = threading.Lock()
        self._said = StepTotals()
        self._said_at = time.monotonic()
        settle(rank, secrets)

    def prepare(self) -> Fingerprint:
        """Build this process's configuration, and say where it runs."""
        self._claim = secure(self._rank)
        self._vllm_config = _single_rank_config(self._rank)
        return Fingerprint(self._rank.seat.rank, {})

    def start(self) -> None:
        """Load this rank's slices, and connect to every stage.

        Raises:
            UnsupportedError: the model has no experts, or vLLM no kernel for them.
            StartupError: a stage's rank is late, or has ended.

        """
        from vllm.config import set_current_vllm_config

        rank, config = self._rank, self._rank.engine.config
        number, ranks = rank.seat.tensor_rank, len(rank.world.experts)
        model_config = self._vllm_config.model_config
        hidden_layers = model_config.get_total_num_hidden_layers()
        is_remote = are_remote(rank.world.expert_layers, hidden_layers)
        # The driver's environment has those of the stages.
        layer_partition.set_partition((hidden_layers,))
        with set_current_vllm_config(self._vllm_config):
            _make_groups_of_one()
            layers = load_experts(self._vllm_config, config, is_remote, number, ranks)
        pages = shared_pages(layers)
        rates = core_rates(layers, rank.shared.max_num_batched_tokens) if pages else None
        self._service = ExpertService(layers, number)
        self._rates = slot_rates(layers, ranks, rank.gpu)
        assert rank.seat.socket is not None
        for stage, kinds in enumerate(rank.world.layout.stages):
            reached = reach(
                rank.meeting,
                stage,
                number,
                rank.seat.socket.numa_nodes,
                config.startup.load_timeout_s,
            )
            self._service.add(reached)
            is_ready(reached)
            offer = (reached.layers, pages, rates, config.startup.load_timeout_s)
            give(reached.connection, *offer)
            if config.experts.prefill_on_gpu:
                for reader in range(1, len(kinds)):
                    with reach_reader(
                        rank.meeting, stage, reader, number, config.startup.load_timeout_s
                    ) as connection:
                        give(connection, *offer)

    def run(self) -> None:
        """Compute experts until a rank of a stage ends.

        Raises:
            torch.distributed.DistNetworkError: it has.

        """
        assert self._service is not None
        lead_from_first_core(self._rank.threads)
        engine, seat = self._rank.shared.instance_id, self._rank.seat
        labels = labels_of(engine, seat.rank, None, "experts", seat.node_name)
        self._trace = self._begun_trace()
        with RankReporter(engine, self._report, RayMetrics(labels)):
            try:
                self._service.serve()
            finally:
                self._write_trace()

    def _begun_trace(self) -> RouteWriter | None:
        """Begin the file of the experts that tokens choose; None where none is asked for.

        Raises:
            ConfigError: it cannot be written.

        """
        experts = self._rank.engine.config.experts
        # All expert ranks see the same tokens.
        if not experts.trace or self._rank.seat.tensor_rank:
            return None
        assert self._service is not None
        layers = [TracedLayer(one.name, n, one.chosen) for one, n in self._service.layers]
        writer = RouteWriter(Path(experts.trace), layers, experts.trace_mib * MIB)
        self._service.keep_routes()
        return writer

    def _write_trace(self) -> None:
        assert self._service is not None
        # From the reporter's thread, and at the end from this one.
        with self._writing:
            if self._trace is None or self._trace.is_full:
                return
            self._trace.add(*self._service.take_routes(close=False))
            if self._trace.is_full:
                self._service.take_routes(close=True)

    def _report(self) -> RankReport:
        assert self._service is not None
        self._write_trace()
        found = self._service.totals
        slots = {name: value for name, value in found.items() if name.startswith("slot_")}
        totals = StepTotals(
            **slots,
            steps=int(found["steps"]),
            tokens=int(found["tokens"]),
            busy_s=found["computing_s"],
            waiting_s=found["waiting_s"],
            expert_layers=int(found["layers"]),
            experts_read=int(found["experts"]),
            expert_layer_tokens=int(found["layer_tokens"]),
        )
        self._say(totals)
        rank, resident_bytes = self._rank.seat.rank, psutil.Process().memory_info().rss
        slots_so_far = SlotForecast.of(totals, self._rates)
        return RankReport(rank, os.getpid(), resident_bytes, 0, totals, 0.0, slots_so_far)

    def _say(self, totals: StepTotals) -> None:
        """Write a line into the log every so often, while there are steps."""
        if time.monotonic() - self._said_at < REPORT_SECONDS:
            return
        new = totals - self._said
        if new.steps:
            logger.info("experts rank %d: %s", self._rank.seat.rank, new)
        # All expert ranks see the same tokens.
        if self._rank.seat.tensor_rank == 0 and (slots := SlotForecast.of(new, self._rates)):
            logger.info("experts rank %d: %s", self._rank.seat.rank, described(slots))
        self._said, self._said_at = totals, time.monotonic()

    def __repr__(self) -> str:
        # Ray puts this before each line of the rank's output that it shows to the driver.
        seat = self._rank.seat
        return f"rank {seat.rank} experts {seat.node_name}"


def _single_rank_config(rank: RankSpec) -> VllmConfig:
    """The engine's configuration as that of one CPU rank, which holds all layers.

    Raises:
        Whatever vLLM raises for options that its CPU platform does not take.

    """
    args = copy.copy(rank.engine.engine_args)
    args.distributed_executor_backend = None
    args.pipeline_parallel_size = args.tensor_parallel_size = args.data_parallel_size = 1
    args.dtype = rank.shared.dtype
    args.max_model_len = rank.shared.max_model_len
    args.seed = rank.shared.seed
    args.max_num_batched_tokens = rank.shared.max_num_batched_tokens
    args.max_num_seqs = rank.shared.max_num_seqs
    # Of what follows an expert rank has nothing, and CPUs not all.
    args.block_size = None
    args.kv_cache_dtype = "auto"
    args.kv_cache_memory_bytes = 1 << 30
    args.enforce_eager = True
    args.async_scheduling = False
    args.enable_lora = False
    args.speculative_config = args.kv_transfer_config = None
    args.additional_config = {}
    return args.create_engine_config()


def _make_groups_of_one() -> None:
    """The groups that vLLM's models ask for; nobody else is in them."""
    from vllm.distributed.parallel_state import (
        ensure_model_parallel_initialized,
        init_distributed_environment,
    )

    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    init_distributed_environment(1, 0, "env://", 0, "gloo")
    ensure_model_parallel_initialized(1, 1)

"""The process of an expert rank: a Ray actor that holds experts, and is no rank of vLLM's.

Life: created in its socket's bundle with its environment → `prepare` claims its socket → `start`
loads its slices of the experts and connects to the stages → `run` computes until a stage ends or it
is killed.  vLLM, whose import takes most of such a process's start, is imported for checkpoints
only that this package does not read by itself.
"""

from __future__ import annotations

from ray_hetero.worker import resting_collector  # before all that it would look through

# isort: split
import os
import pickle
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

from placement.model.config import UnknownModelError
from placement.units import MIB
from ray_hetero.distributed.expert_meeting import is_ready, reach, reach_reader
from ray_hetero.distributed.expert_offers import give
from ray_hetero.distributed.expert_service import ExpertService, HeldLayer
from ray_hetero.kernels.linear import streaming_linear
from ray_hetero.log import logger, show_without_vllm
from ray_hetero.observability.metrics import RayMetrics, labels_of
from ray_hetero.observability.route_trace import RouteWriter, TracedLayer
from ray_hetero.observability.slot_forecast import SlotForecast, described
from ray_hetero.observability.status_board import RankReport, RankReporter
from ray_hetero.observability.step_clock import REPORT_SECONDS, StepTotals
from ray_hetero.runtime.core_binding import lead_from_first_core
from ray_hetero.worker import placement_proof
from ray_hetero.worker.expert_files import load_from_files
from ray_hetero.worker.expert_model import core_rates, shared_pages, slot_rates
from ray_hetero.worker.expert_rows import Share
from ray_hetero.worker.process_setup import secure, settle
from ray_hetero.worker.rank_config import Fingerprint
from ray_hetero.world import RankSpec

resting_collector.wake()


class ExpertActor:
    """Ray actor class of an expert rank; scheduled into the bundle that stands for its socket.

    Args:
        rank: what it is to be; its engine's arguments are left out.
        secrets: variables that must not be in the actor's runtime environment, by name.
        engine_args: the engine's arguments, pickled.

    """

    def __init__(self, rank: RankSpec, secrets: Mapping[str, str], engine_args: bytes) -> None:
        self._rank = rank
        self._engine_args = engine_args
        self._service: ExpertService | None = None
        self._writing = threading.Lock()
        self._said = StepTotals()
        self._said_at = time.monotonic()
        show_without_vllm()
        settle(rank, secrets)

    def prepare(self) -> Fingerprint:
        """Claim the socket, and say where this process runs."""
        self._claim = secure(self._rank)
        return Fingerprint(self._rank.seat.rank, {})

    def start(self) -> None:
        """Load this rank's slices, and connect to every stage.

        Raises:
            UnsupportedError: the model has no experts, or vLLM no kernel for them.
            StartupError: a stage's rank is late, or has ended.

        """
        rank, config = self._rank, self._rank.engine.config
        number, ranks = rank.seat.tensor_rank, len(rank.world.experts)
        layers = self._loaded(Share(number, ranks))
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
        self._prove_placement()

    def _prove_placement(self) -> None:
        """Log where the experts' pages and this rank's threads are.

        Raises:
            RankError: more of them than allowed are on other NUMA nodes.

        """
        rank = self._rank
        assert rank.seat.socket is not None
        lead_from_first_core(rank.threads)
        # Experts are no tensors: the kernel's account of the process has their pages.
        proof = placement_proof.prove((), rank.seat.socket.numa_nodes, rank.threads)
        logger.info("experts rank %d: %s", rank.seat.rank, proof)
        placement_proof.check(proof, rank.engine.config.cpu.max_remote_memory_fraction)

    def _loaded(self, share: Share) -> dict[str, HeldLayer]:
        """This rank's slices of all remote experts by vLLM's name of their layer.

        Raises:
            UnsupportedError: the model has no experts, or nothing here computes them.

        """
        rank, config = self._rank, self._rank.engine.config
        if (source := rank.source) is not None:
            is_quantised = bool(source.tensors.scheme)
            kernel = streaming_linear.for_experts(config.cpu, is_quantised=is_quantised)
            try:
                if kernel is not None:
                    return load_from_files(source, config, kernel, rank.world.expert_layers, share)
            except UnknownModelError as error:
                logger.info("vLLM is to load the experts: %s", error)
        from ray_hetero.worker import vllm_experts

        args = pickle.loads(self._engine_args)  # noqa: S301
        return vllm_experts.load(rank, args, share.number, share.ranks)

    def run(self) -> None:
        """Compute experts until a rank of a stage ends.

        Raises:
            torch.distributed.DistNetworkError: it has.

        """
        assert self._service is not None
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

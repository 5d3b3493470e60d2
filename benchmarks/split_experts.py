"""A layer's experts split between a GPU that reads them over its link and an expert rank, which is
another process; linked_experts.py measures with this.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from expert_weights import Repeated, Shape, experts_of
from gpu_timing import milliseconds

from ray_hetero import _streaming_linear as native
from ray_hetero.config import ExpertsConfig
from ray_hetero.distributed import expert_offers, expert_prompts
from ray_hetero.distributed.expert_channel import ExpertChannel, HostSignals
from ray_hetero.distributed.expert_meeting import ExpertMeeting, is_ready, reach
from ray_hetero.distributed.expert_memory import Geometry, RemoteLayer
from ray_hetero.distributed.expert_offers import Offer
from ray_hetero.distributed.expert_prompts import ExpertLink
from ray_hetero.distributed.expert_service import ExpertService, HeldLayer
from ray_hetero.kernels.experts.expert_matrices import ExpertMatrices
from ray_hetero.kernels.experts.expert_rates import random_tokens
from ray_hetero.kernels.experts.expert_room import SharedRoom
from ray_hetero.kernels.experts.routed_experts import RoutedExperts
from ray_hetero.kernels.formats import FORMATS
from ray_hetero.offload.experts.expert_shares import ExpertShares
from ray_hetero.offload.experts.gpu_experts import GpuExperts
from ray_hetero.worker.expert_model import core_rates, shared_pages

LIMIT_S = 600.0


def made_layer(shape: Shape, kind: str) -> RoutedExperts:
    """A layer in memory that other processes can map."""
    gate_ups, downs = experts_of(shape)
    return RoutedExperts(
        ExpertMatrices(
            Repeated(gate_ups, shape.experts),  # type: ignore[arg-type]
            Repeated(downs, shape.experts),  # type: ignore[arg-type]
        ),
        native=native, level=native.levels()[-1], kind=FORMATS[kind], room=SharedRoom,
    )  # fmt: skip


def expert_rank(meeting: str, shape: Shape, kind: str, layers: int, cores: int, most: int) -> None:
    """Serve layers in a process of its own, until who hands tokens over ends."""
    torch.set_num_threads(cores)
    held = {}
    for number in range(layers):
        layer = made_layer(shape, kind)
        held[str(number)] = HeldLayer(
            shape.hidden, torch.bfloat16, layer, layer.call, layer, shape.chosen, shape.experts
        )
    pages, rates = shared_pages(held), core_rates(held, most)
    service = ExpertService(held, 0)
    reached = reach(meeting, 0, 0, (), LIMIT_S)
    service.add(reached)
    is_ready(reached)
    expert_offers.give(reached.connection, reached.layers, pages, rates, LIMIT_S)
    with contextlib.suppress(torch.distributed.DistNetworkError):
        service.serve()


@contextmanager
def connected(
    shape: Shape, kind: str, layers: int, cores: int, most: int, device: torch.device
) -> Iterator[tuple[ExpertChannel, list[RemoteLayer], Offer]]:
    """Such a process, what it offers, and the way to it."""
    meeting, names = uuid.uuid4().hex, ["the expert rank"]
    asked = [RemoteLayer(str(number), shape.hidden, shape.chosen) for number in range(layers)]
    listener = ExpertMeeting(meeting, 0)
    child = multiprocessing.get_context("spawn").Process(
        target=expert_rank, args=(meeting, shape, kind, layers, cores, most), daemon=True
    )
    child.start()
    channel = None
    try:
        geometry = Geometry.of(asked, ranks=1, tokens=most, dtype=torch.bfloat16)
        memory, connections = listener.accept(geometry, asked, names, LIMIT_S)
        (offer,) = expert_offers.taken(connections, names, LIMIT_S)
        signals: Any = HostSignals
        if device.type == "cuda":
            from ray_hetero.distributed.gpu_signals import GpuSignals

            signals = GpuSignals
        channel = ExpertChannel(memory, asked, connections, names, LIMIT_S, signals)
        yield channel, asked, offer
    finally:
        if channel is not None:
            channel.close()
        child.kill()
        child.join()


def measure(options: argparse.Namespace, kind: str, device: torch.device) -> None:
    """Measure one format with some shares of the experts on the GPU, and print it."""
    shape, tokens = options.shape, [int(one) for one in options.tokens.split(",")]
    # One core launches what the GPU does.
    cores = max(1, len(os.sched_getaffinity(0)) - 1)
    way = connected(shape, kind, options.layers, cores, max(tokens), device)
    with way as (channel, asked, offer):
        slices = [(offer.slices[layer.name],) for layer in asked]
        gpu = GpuExperts(device, slices, shape.chosen, options.gib)
        # Private names: what a stage does at its start.
        seconds = expert_prompts._measured(gpu, asked, max(tokens))
        config = ExpertsConfig()
        shares = expert_prompts._shares(config, gpu, asked, offer.rates, seconds, 1, max(tokens))
        about = {
            "kind": kind, "cores": cores, "link_layer_ms": round(1000 * seconds, 2),
            "cores_points": None if offer.rates is None else offer.rates.points,
            "shares": None if shares is None else shares.points,
        }  # fmt: skip
        print("SPLIT " + json.dumps(about), flush=True)
        for count in tokens:
            chosen = 0 if shares is None else shares.experts(count, shape.experts)
            compare(options, channel, gpu, count, chosen)
        if channel.problem is not None:
            raise channel.problem


def compare(
    options: argparse.Namespace, channel: ExpertChannel, gpu: GpuExperts, tokens: int, chosen: int
) -> None:
    """Measure steps of so many tokens with the shares that are given, and a chosen one."""
    shape = options.shape
    given = [
        one.to(gpu.device)
        for one in random_tokens(tokens, shape.hidden, shape.experts, shape.chosen)
    ]
    asked = {round(float(one) * shape.experts) for one in options.split.split(",")}
    for experts in sorted({chosen, *asked}):
        result = {
            "tokens": tokens, "experts_on_gpu": experts, "is_chosen": experts == chosen,
            "layer_ms": timed(options, channel, gpu, given, experts),
        }  # fmt: skip
        print("RESULT " + json.dumps(result), flush=True)


def timed(
    options: argparse.Namespace, channel: ExpertChannel, gpu: GpuExperts, given: Any, experts: int
) -> float:
    """Milliseconds a layer, so many of whose experts the GPU computes."""
    way: Any = channel
    if experts:
        way = ExpertLink(gpu, ExpertShares(options.shape.experts, ((1, experts),)), channel)

    def run() -> None:
        for layer in range(options.layers):
            way.begin(*given, layer)
            way.sums(*given, layer)

    return round(milliseconds(run, options.repeats) / options.layers, 2)

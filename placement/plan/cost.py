"""Time of a step on a stage, in picoseconds.

Decode reads every weight that a token of the batch needs and the KV cache of the batch's
contexts, so a layer costs bytes ÷ bandwidth, or its operations ÷ compute where these take longer.
On a socket, weights of few bits cost weights ÷ what its cores expand, where that takes longer.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace

from placement.host.row_costs import RowCosts
from placement.model.shape import ModelShape
from placement.model.tensors import Layer, Tensor
from placement.plan.devices import (
    NATIVE_STEP_TOKENS,
    DeviceFigures,
    Link,
    Links,
    StageDevices,
    group_link,
)
from placement.plan.expert_split import ExpertTimes, best_split, splits
from placement.plan.passes import Pass
from placement.plan.step_time import PICO, Step, pico

REDUCTIONS_PER_LAYER = 2
"""All-reduces of a tensor-parallel group per layer: after attention and after the MLP."""
TENSORS_PER_BOUNDARY = 2
"""Hidden states and residual."""
HANDOVER_TOKENS = 1024
"""Most tokens that are handed over to expert ranks at once; a step of more is handed over in
pieces, and each of them reads the experts again."""

LOGIT_S = 8e-9
"""Seconds that a socket takes for a logit when it draws a token: probabilities, noise for each and
the largest, one sequence after the other because torch makes the noise on one core.  Top-p would
sort them first, which takes several times as long; greedy decoding takes next to nothing."""

CODES_EXPANDED = 18e9
"""Weights a second that a GPU makes bf16 of codes and scales, ahead of a product; half of an 8B
model in FP8 and in 4 bits on an H200 (docs/gpu-host/2026-11-23-expert-ranks.md)."""


def distinct_experts(experts: int, active: int, tokens: int) -> float:
    """How many experts of a layer a batch of tokens wakes on average, chosen evenly."""
    return experts * (1 - (1 - active / experts) ** tokens)


def layer_step(
    shape: ModelShape, layer: Layer, stage: StageDevices, run: Pass, links: Links
) -> Step:
    """Time of one layer on a stage: its slowest rank, the all-reduces, and remote experts; or that
    of the GPU that computes it for the stage.
    """
    if (gpu := computing_gpu(stage, run)) is not None:
        return _layer_over_link(shape, layer, stage, gpu, run)
    slowest = max(
        (_layer_on_rank(shape, layer, rank.figures, stage.size, run) for rank in stage.ranks),
        key=lambda step: step.total,
    )
    remote = _remote_experts(shape, layer, stage, run, links) if layer.remote else Step()
    return slowest + remote + Step(reduce=_reduce(shape, stage, run, links))


def computing_gpu(stage: StageDevices, run: Pass) -> DeviceFigures | None:
    """The GPU that computes a pass for a stage of CPU ranks, if one does."""
    gpu = stage.prompt_gpu
    if gpu is None or not run.is_prompt or run.tokens < gpu.from_tokens:
        return None
    return gpu.figures


def _layer_over_link(
    shape: ModelShape, layer: Layer, stage: StageDevices, gpu: DeviceFigures, run: Pass
) -> Step:
    """Time of one layer that a GPU computes for all CPU ranks of a stage.

    Their weights, and keys and values of earlier passes, cross its link while it computes; new ones
    go the other way at the same time.  Weights are written in 16 bits and read again, which takes
    longer where they are codes with scales.
    """
    assert gpu.host_link is not None
    stored = _read(shape, layer.tensors, 1, run, stage.ranks[0].figures)
    multiplied = sum(tensor.rank_weights(1) for tensor in layer.tensors)
    coded = sum(t.rank_weights(1) for t in layer.tensors if not t.is_16_bit_matrix)
    flops, kv = 2 * run.tokens * multiplied, 0.0
    if layer.kv is not None:
        cached = run.sequences * layer.kv.rank_read(1, run.cached) if run.cached else 0
        kv = cached / gpu.host_link
        flops += run.pairs(layer.kv) * layer.kv.flops_per_pair
    weights = stored / gpu.host_link
    moved = stored + 2 * shape.dtype_bytes * multiplied
    computing = flops / gpu.compute + moved / gpu.read_bandwidth + coded / CODES_EXPANDED
    return Step(pico(weights), pico(kv), pico(max(0.0, computing - weights - kv)))


def _remote_experts(
    shape: ModelShape, layer: Layer, stage: StageDevices, run: Pass, links: Links
) -> Step:
    """Time of a layer's experts on expert ranks, each of which has a slice of every expert; in
    prompts that of the GPU which reads all or some of them over its link, where that is shorter.
    """
    ranks = len(stage.experts)
    assert ranks, "somebody holds the experts that the stage does not"
    slices = Layer(layer.index, layer.remote, None)
    pieces, rest = divmod(run.tokens, HANDOVER_TOKENS)
    parts = [(pieces, HANDOVER_TOKENS), (1, rest)] if pieces else [(1, rest)]
    slowest = max(
        sum(
            times
            * _layer_on_rank(shape, slices, one.figures, ranks, replace(run, tokens=part)).total
            for times, part in parts
            if part
        )
        for one in stage.experts
    )
    rows = run.tokens * shape.hidden_size * shape.dtype_bytes
    host_links = [rank.figures.host_link for rank in stage.ranks if rank.figures.host_link]
    bandwidth = min([links.handover.bandwidth, *host_links])
    seconds = links.handover.latency_s + rows * (1 + ranks) / bandwidth
    handed = Step(experts=slowest, handover=pico(seconds))
    if not (run.is_prompt and stage.expert_buffer_bytes and host_links):
        return handed
    stored = sum(_read(shape, layer.remote, ranks, run, one.figures) for one in stage.experts)
    flops = sum(2 * run.tokens * _used(shape, t) * t.rank_weights(1) for t in layer.remote)
    # Each GPU reads a part over its own link, all of them from the same memory, and multiplies with
    # pieces while the next ones come.
    memory = sum(one.figures.read_bandwidth for one in stage.experts)
    gpus = len(stage.ranks)
    read = min(gpus * min(host_links), memory)
    linked = max(stored / read, flops / (gpus * stage.ranks[0].figures.compute))
    times, count = ExpertTimes(slowest / PICO, seconds, linked), shape.experts
    here = best_split(times, splits(count), count)
    if here == 0:
        return handed
    if here == count:
        return Step(experts=pico(linked))
    return Step(experts=pico(times.seconds(here / count) - seconds), handover=pico(seconds))


def _layer_on_rank(
    shape: ModelShape, layer: Layer, figures: DeviceFigures, size: int, run: Pass
) -> Step:
    weights = _reading(shape, layer.tensors, size, run, figures)
    known = _row_costs(figures, run)
    measured = () if known is None else tuple(t for t in layer.tensors if t.is_16_bit_matrix)
    others = tuple(tensor for tensor in layer.tensors if tensor not in measured)
    flops = sum(2 * run.tokens * _used(shape, t) * t.rank_weights(size) for t in others)
    kv = 0.0
    if layer.kv is not None:
        cached = layer.kv.rank_read(size, run.context, run.drafts)
        kv = run.sequences * cached / figures.reached_bandwidth
        flops += run.pairs(layer.kv) * layer.kv.flops_per_pair / size
    read = _reading(shape, others, size, run, figures)
    compute = max(0.0, flops / figures.compute - read - kv)
    if figures.kind == "cpu":
        # Half of an 8B model on a socket takes 39.4 ms for one token, 41.9 for 8 and 50.7 for 32
        # (docs/gpu-host/2026-11-22-two-h200-decode-step.md): those behind the first are not hidden
        # behind reading.
        compute = max(compute, (1 - 1 / run.tokens) * flops / figures.compute)
    if known is not None:
        compute += sum(
            _reading(shape, (tensor,), size, run, figures)
            * (known.of(_rows(shape, tensor, run)) - 1)
            for tensor in measured
        )
    fixed = figures.layer_latency_s
    if figures.is_launching:
        fixed = max(0.0, fixed - weights - kv - compute)
    return Step(pico(weights), pico(kv), pico(compute), fixed=pico(fixed))


def _read(
    shape: ModelShape, tensors: tuple[Tensor, ...], size: int, run: Pass, figures: DeviceFigures
) -> float:
    """Bytes that a rank reads of tensors."""
    return sum(
        tensor.rank_bytes(size) * _held(tensor, figures) * _awake(shape, tensor, run)
        for tensor in tensors
    )


def _reading(
    shape: ModelShape, tensors: tuple[Tensor, ...], size: int, run: Pass, figures: DeviceFigures
) -> float:
    """Seconds in which a rank reads tensors for one row, and expands weights of few bits."""
    read: dict[str, float] = defaultdict(float)
    expanded: dict[str, float] = defaultdict(float)
    for tensor in tensors:
        share, awake = _held(tensor, figures), _awake(shape, tensor, run)
        rate = figures.expanded.get(int(tensor.bits * share), math.inf)
        # Scales are read with the codes that they belong to.
        read[tensor.role] += tensor.rank_bytes(size) * share * awake / figures.reached_bandwidth
        expanded[tensor.role] += tensor.rank_weights(size) * awake / rate
    return sum(max(seconds, expanded[role]) for role, seconds in read.items())


def _held(tensor: Tensor, figures: DeviceFigures) -> float:
    """Share of a tensor's bytes that a rank holds."""
    return figures.read_share if tensor.is_16_bit_matrix else 1.0


def _awake(shape: ModelShape, tensor: Tensor, run: Pass) -> float:
    """Share of a tensor that a pass reads: of the experts, those that its tokens choose."""
    if tensor.role != "expert" or not shape.experts:
        return 1.0
    return distinct_experts(shape.experts, shape.active_experts, run.tokens) / shape.experts


def _row_costs(figures: DeviceFigures, run: Pass) -> RowCosts | None:
    """Costs of rows in a decode step; None where operations tell them."""
    is_known = not run.is_prompt and run.tokens <= NATIVE_STEP_TOKENS
    return figures.row_costs if is_known else None


def _rows(shape: ModelShape, tensor: Tensor, run: Pass) -> float:
    """Rows that a tensor of a layer is multiplied with; of an expert that is awake, on average."""
    if tensor.role != "expert":
        return run.tokens
    awake = distinct_experts(shape.experts, shape.active_experts, run.tokens)
    return max(1.0, run.tokens * shape.active_experts / awake)


def _used(shape: ModelShape, tensor: Tensor) -> float:
    return shape.active_experts / shape.experts if tensor.role == "expert" else 1


def _reduce(shape: ModelShape, stage: StageDevices, run: Pass, links: Links) -> int:
    if stage.size == 1:
        return 0
    link = group_link(stage, links, run.tokens)
    payload = run.tokens * shape.hidden_size * shape.dtype_bytes
    moved = 2 * (stage.size - 1) / stage.size * payload
    return REDUCTIONS_PER_LAYER * pico(link.latency_s + moved / link.bandwidth)


def fixed_step(shape: ModelShape, stage: StageDevices, run: Pass) -> Step:
    """Time of a step on a stage beside its layers, output and exchange.

    That is its slowest rank, and the way of a prompt's tokens to the GPU that computes it and back.
    """
    step = Step(fixed=max(pico(rank.figures.step_latency_s) for rank in stage.ranks))
    if (gpu := computing_gpu(stage, run)) is None:
        return step
    assert gpu.host_link is not None
    payload = run.tokens * shape.hidden_size * shape.dtype_bytes * TENSORS_PER_BOUNDARY
    return step + Step(send=pico(2 * payload / gpu.host_link))


def output_step(shape: ModelShape, stage: StageDevices, run: Pass) -> Step:
    """Time of the last norm, the output matrix and drawing tokens, on the last stage."""
    size = stage.size
    is_on_sockets = any(rank.kind == "cpu" for rank in stage.ranks)
    seconds = max(_output_on_rank(shape, rank.figures, size, run) for rank in stage.ranks)
    return Step(
        output=pico(seconds),
        sampling=pico(LOGIT_S * run.outputs * shape.vocab_size) if is_on_sockets else 0,
    )


def _output_on_rank(shape: ModelShape, figures: DeviceFigures, size: int, run: Pass) -> float:
    matrix = shape.output_matrix
    reading = _reading(shape, matrix, size, run, figures)
    known = _row_costs(figures, run)
    if known is not None and all(tensor.is_16_bit_matrix for tensor in matrix):
        return reading * known.of(run.outputs)
    flops = 2 * run.outputs * sum(tensor.rank_weights(size) for tensor in matrix)
    return max(reading, flops / figures.compute)


def send_step(
    shape: ModelShape, sender: StageDevices, receiver: StageDevices, link: Link, run: Pass
) -> Step:
    """Time of handing activations from one stage to the next, copies to and from GPUs included."""
    payload = run.tokens * shape.hidden_size * shape.dtype_bytes * TENSORS_PER_BOUNDARY
    seconds = link.latency_s + payload / link.bandwidth
    if link.name != "NCCL":
        for stage in (sender, receiver):
            links = [rank.figures.host_link for rank in stage.ranks if rank.figures.host_link]
            seconds += payload / stage.size / min(links) if links else 0.0
    return Step(send=pico(seconds))

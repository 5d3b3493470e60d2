"""What a step costs on a stage, in picoseconds, and what a stage's ranks hold, in bytes.

Decode reads every weight that a token of the batch needs and the KV cache of the batch's
contexts, so a layer costs bytes ÷ bandwidth, or its operations ÷ compute where these take longer.
Times are whole picoseconds: sums over layers are then exact, and equal splits really tie.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

from placement.host.row_costs import RowCosts
from placement.model.shape import ModelShape
from placement.model.tensors import KvCache, Layer, Tensor
from placement.plan.devices import (
    NATIVE_STEP_TOKENS,
    DeviceFigures,
    Link,
    Links,
    StageDevices,
    group_link,
)
from placement.plan.expert_split import ExpertTimes, best_split, splits

PICO = 10**12
REDUCTIONS_PER_LAYER = 2
"""All-reduces of a tensor-parallel group per layer: after attention and after the MLP."""
TENSORS_PER_BOUNDARY = 2
"""Hidden states and residual."""
HANDOVER_TOKENS = 1024
"""Most tokens that are handed over to expert ranks at once; a step of more is handed over in
pieces, and each of them reads the experts again."""

SAMPLED_BYTES = 2 + 4 * 4
"""Bytes of a logit while tokens are sampled: in the model's dtype, then float32 logits, their
working copy for top-k and top-p, probabilities and noise (vLLM's `Sampler` and
`TopKTopPSampler`)."""

LOGIT_S = 8e-9
"""Seconds that a socket takes for a logit when it draws a token: probabilities, noise for each and
the largest, one sequence after the other because torch makes the noise on one core.  Top-p would
sort them first, which takes several times as long; greedy decoding takes next to nothing."""

CODES_EXPANDED = 18e9
"""Weights a second that a GPU makes bf16 of codes and scales, ahead of a product; half of an 8B
model in FP8 and in 4 bits on an H200 (docs/gpu-host/2026-11-23-expert-ranks.md)."""


@dataclass(frozen=True)
class Workload:
    """What the engine is asked to hold and to be fast at."""

    batch: int
    """Sequences in one decode step."""
    context: int
    """Tokens that each of them has when the step is priced."""
    max_sequences: int
    """Sequences of `max_model_len` tokens that the KV cache must hold at the same time."""
    max_model_len: int
    max_batched_tokens: int = 2048
    """Prompt tokens in one step: sets the activations."""
    kv_block: int = 16
    """Tokens in one KV block."""
    max_num_seqs: int = 0
    """Most sequences of a step: sets the memory of the sampler."""


@dataclass(frozen=True)
class Step:
    """Time of one step on one stage by its parts, in picoseconds."""

    weights: int = 0
    kv: int = 0
    compute: int = 0
    """What operations take beyond the time of the reads, on a socket for all tokens but one."""
    output: int = 0
    """Output matrix on the last stage."""
    sampling: int = 0
    """Drawing a token of each sequence, where the last stage is on sockets."""
    reduce: int = 0
    """All-reduces inside the tensor-parallel group."""
    fixed: int = 0
    """Launches and barriers."""
    draft: int = 0
    """A drafter's own steps, on the last stage."""
    send: int = 0
    """Activations to the next stage."""
    experts: int = 0
    """Experts that expert ranks compute, while the stage waits."""
    handover: int = 0
    """Tokens to expert ranks, and their sums back."""

    @property
    def total(self) -> int:
        """All parts."""
        return sum(getattr(self, part.name) for part in fields(self))

    @property
    def seconds(self) -> float:
        """All parts, in seconds."""
        return self.total / PICO

    def parts(self) -> dict[str, float]:
        """Seconds by part, in the order they are declared."""
        return {part.name: getattr(self, part.name) / PICO for part in fields(self)}

    def __add__(self, other: Step) -> Step:
        return Step(*(getattr(self, p.name) + getattr(other, p.name) for p in fields(self)))

    def __mul__(self, times: int) -> Step:
        return Step(*(getattr(self, p.name) * times for p in fields(self)))


def total_step(steps: Iterable[Step]) -> Step:
    """Sum of steps, part by part."""
    return sum(steps, Step())


def distinct_experts(experts: int, active: int, tokens: int) -> float:
    """How many experts of a layer a batch of tokens wakes on average, chosen evenly."""
    return experts * (1 - (1 - active / experts) ** tokens)


def _pico(seconds: float) -> int:
    return math.ceil(seconds * PICO)


@dataclass(frozen=True)
class Pass:
    """One forward pass."""

    tokens: int
    """Tokens that pass, all sequences together."""
    sequences: int
    context: int
    """Tokens that a query looks at."""
    outputs: int
    """Tokens that the output matrix is multiplied with."""
    cached: int = 0
    """Tokens of each sequence that passes before have computed."""

    @property
    def is_prompt(self) -> bool:
        """Whether most of its tokens are read only."""
        return self.tokens > self.outputs

    def pairs(self, kv: KvCache) -> int:
        """(query, key) pairs of attention."""
        return self.tokens * kv.seen(self.context)

    def kv_tokens(self, kv: KvCache) -> int:
        """Tokens whose keys and values are read."""
        return self.sequences * kv.seen(self.context)


def decode_pass(batch: int, context: int, drafts: int = 0) -> Pass:
    """One token, and drafts to verify, for each of `batch` sequences of `context` tokens."""
    tokens = batch * (1 + drafts)
    return Pass(tokens, batch, context, tokens)


def prefill_pass(tokens: int, cached: int = 0) -> Pass:
    """One prompt in one pass; a token of it looks at half of them on average.

    Args:
        tokens: of the pass.
        cached: of the prompt, computed in passes before, which all of them look at.

    """
    return Pass(tokens, 1, cached + max(1, tokens // 2), 1, cached)


def prefill_passes(tokens: int, chunk: int) -> tuple[tuple[int, Pass], ...]:
    """One prompt in passes of at most `chunk` tokens: how often each kind of pass.

    All whole chunks are priced as their mean.
    """
    number, rest = divmod(tokens, chunk)
    whole = (number, prefill_pass(chunk, (number - 1) * chunk // 2)) if number else None
    last = (1, prefill_pass(rest, number * chunk)) if rest else None
    return tuple(one for one in (whole, last) if one is not None)


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
    lent = stage.prompt_gpu
    is_lent = lent is not None and run.is_prompt and run.tokens >= lent.from_tokens
    return lent.figures if lent is not None and is_lent else None


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
        cached = run.sequences * layer.kv.seen(run.cached) if run.cached else 0
        kv = cached * layer.kv.rank_bytes(1) / gpu.host_link
        flops += run.pairs(layer.kv) * layer.kv.flops_per_pair
    weights = stored / gpu.host_link
    moved = stored + 2 * shape.dtype_bytes * multiplied
    computing = flops / gpu.compute + moved / gpu.read_bandwidth + coded / CODES_EXPANDED
    return Step(_pico(weights), _pico(kv), _pico(max(0.0, computing - weights - kv)))


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
    handed = Step(experts=slowest, handover=_pico(seconds))
    if not (run.is_prompt and stage.expert_buffer_bytes and host_links):
        return handed
    stored = sum(_read(shape, layer.remote, ranks, run, one.figures) for one in stage.experts)
    flops = sum(2 * run.tokens * _used(shape, t) * t.rank_weights(1) for t in layer.remote)
    gpu = stage.ranks[0].figures
    # Pieces are multiplied with while the next ones come.
    linked = max(stored / min(host_links), flops / gpu.compute)
    times, count = ExpertTimes(slowest / PICO, seconds, linked), shape.experts
    here = best_split(times, splits(count), count)
    if here == 0:
        return handed
    if here == count:
        return Step(experts=_pico(linked))
    return Step(experts=_pico(times.seconds(here / count) - seconds), handover=_pico(seconds))


def _layer_on_rank(
    shape: ModelShape, layer: Layer, figures: DeviceFigures, size: int, run: Pass
) -> Step:
    weights = _read(shape, layer.tensors, size, run, figures) / figures.read_bandwidth
    known = _row_costs(figures, run)
    measured = () if known is None else tuple(t for t in layer.tensors if t.is_16_bit_matrix)
    others = tuple(tensor for tensor in layer.tensors if tensor not in measured)
    flops = sum(2 * run.tokens * _used(shape, t) * t.rank_weights(size) for t in others)
    kv = 0.0
    if layer.kv is not None:
        kv = run.kv_tokens(layer.kv) * layer.kv.rank_bytes(size) / figures.read_bandwidth
        flops += run.pairs(layer.kv) * layer.kv.flops_per_pair / size
    read = _read(shape, others, size, run, figures) / figures.read_bandwidth
    compute = max(0.0, flops / figures.compute - read - kv)
    if figures.kind == "cpu":
        # Half of an 8B model on a socket takes 39.4 ms for one token, 41.9 for 8 and 50.7 for 32
        # (docs/gpu-host/2026-11-22-two-h200-decode-step.md): those behind the first are not hidden
        # behind reading.
        compute = max(compute, (1 - 1 / run.tokens) * flops / figures.compute)
    if known is not None:
        compute += sum(
            _read(shape, (tensor,), size, run, figures)
            / figures.read_bandwidth
            * (known.of(_rows(shape, tensor, run)) - 1)
            for tensor in measured
        )
    fixed = figures.layer_latency_s
    if figures.is_launching:
        fixed = max(0.0, fixed - weights - kv - compute)
    return Step(_pico(weights), _pico(kv), _pico(compute), fixed=_pico(fixed))


def _read(
    shape: ModelShape, tensors: tuple[Tensor, ...], size: int, run: Pass, figures: DeviceFigures
) -> float:
    awake = 1.0
    if shape.experts:
        distinct = distinct_experts(shape.experts, shape.active_experts, run.tokens)
        awake = distinct / shape.experts

    def share(tensor: Tensor) -> float:
        held = figures.read_share if tensor.is_16_bit_matrix else 1
        return held * awake if tensor.role == "expert" else held

    return sum(tensor.rank_bytes(size) * share(tensor) for tensor in tensors)


def _row_costs(figures: DeviceFigures, run: Pass) -> RowCosts | None:
    """What rows cost in a decode step; None where it is to be told by operations."""
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
    return REDUCTIONS_PER_LAYER * _pico(link.latency_s + moved / link.bandwidth)


def fixed_step(shape: ModelShape, stage: StageDevices, run: Pass) -> Step:
    """What a step costs on a stage beside its layers, output and exchange.

    That is its slowest rank, and the way of a prompt's tokens to the GPU that computes it and back.
    """
    step = Step(fixed=max(_pico(rank.figures.step_latency_s) for rank in stage.ranks))
    if (gpu := computing_gpu(stage, run)) is None:
        return step
    assert gpu.host_link is not None
    payload = run.tokens * shape.hidden_size * shape.dtype_bytes * TENSORS_PER_BOUNDARY
    return step + Step(send=_pico(2 * payload / gpu.host_link))


def output_step(shape: ModelShape, stage: StageDevices, run: Pass) -> Step:
    """Time of the last norm, the output matrix and drawing tokens, on the last stage."""
    size = stage.size
    is_on_sockets = any(rank.kind == "cpu" for rank in stage.ranks)
    seconds = max(_output_on_rank(shape, rank.figures, size, run) for rank in stage.ranks)
    return Step(
        output=_pico(seconds),
        sampling=_pico(LOGIT_S * run.outputs * shape.vocab_size) if is_on_sockets else 0,
    )


def _output_on_rank(shape: ModelShape, figures: DeviceFigures, size: int, run: Pass) -> float:
    matrix = shape.output_matrix
    reading = _read(shape, matrix, size, run, figures) / figures.read_bandwidth
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
    return Step(send=_pico(seconds))


@dataclass(frozen=True)
class Memory:
    """Bytes that one rank holds."""

    weights: int
    kv: int
    activations: int
    runtime: int = 0

    @property
    def beside_kv(self) -> int:
        """All but the KV cache."""
        return self.weights + self.activations + self.runtime

    @property
    def total(self) -> int:
        """All of them."""
        return self.beside_kv + self.kv


def kv_bytes(layer: Layer, size: int, tokens: int, sequences: int, chunk: int) -> int:
    """KV bytes that a rank keeps of one layer for some sequences of `tokens` tokens each."""
    if layer.kv is None:
        return 0
    return layer.kv.rank_bytes(size) * sequences * layer.kv.kept(tokens, chunk)


def layer_weights(layer: Layer, size: int) -> int:
    """Weight bytes that a rank keeps of one layer."""
    return sum(tensor.rank_bytes(size) for tensor in layer.tensors)


def around_weights(shape: ModelShape, size: int, *, first: bool, last: bool) -> int:
    """Weight bytes that a rank keeps outside the layers."""
    return sum(tensor.rank_bytes(size) for tensor in shape.around(first=first, last=last))


def activation_bytes(shape: ModelShape, size: int, work: Workload, *, last: bool) -> int:
    """Peak of what a forward pass of `max_batched_tokens` tokens needs beside weights and KV.

    Hidden states, residual and one work copy; the widest of MLP (gate, up and their product) and
    attention (queries, keys, values, output); on the last stage what sampling the most sequences
    of a step takes, which vLLM tries before it sizes the KV cache.
    """
    attention = (2 * shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    widest = max(3 * shape.intermediate_size, attention) // size
    passing = work.max_batched_tokens * shape.dtype_bytes * (4 * shape.hidden_size + widest)
    sampled = max(work.batch, work.max_sequences, work.max_num_seqs)
    logits = SAMPLED_BYTES * sampled * shape.vocab_size
    return max(passing, logits) if last else passing


def asked_tokens(work: Workload) -> int:
    """Tokens of one sequence that the KV cache must have room for."""
    longest = max(work.max_model_len, work.context)
    return -(-longest // work.kv_block) * work.kv_block


def asked_sequences(work: Workload) -> int:
    """Sequences of `asked_tokens` tokens that must have room, enough for the priced batch too."""
    priced = -(-work.batch * work.context // asked_tokens(work))
    return max(work.max_sequences, priced)

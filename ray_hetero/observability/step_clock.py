"""Time of a rank in each step: computing, or waiting for the stage before it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

from ray_hetero.distributed.exchanged import Exchanged
from ray_hetero.kernels.layers.layer_tokens import LayerTokens
from ray_hetero.kernels.step_route import Reason

if TYPE_CHECKING:
    from ray_hetero.distributed.stage_boundary import StageBoundary

REPORT_SECONDS = 30.0


@dataclass
class StepTotals:
    """Sums over a rank's steps; seconds and bytes."""

    steps: int = 0
    tokens: int = 0
    busy_s: float = 0.0
    """Seconds of computing: inside the worker's calls, less waiting and exchange."""
    waiting_s: float = 0.0
    """Seconds of waiting until the previous stage had computed, and of a first stage, until the
    last one had sampled the tokens of the step before; of an expert rank, between two
    layers of steps: what a stage computes meanwhile, and the handover."""
    exchange_s: float = 0.0
    """Seconds of exchanging tensors between stages, to and from this one."""
    received_bytes: int = 0
    sent_bytes: int = 0
    priced_steps: int = 0
    """Steps of as many tokens as the one that the plan has priced."""
    priced_s: float = 0.0
    """Part of `busy_s` that `priced_steps` took."""
    verifying_steps: int = 0
    """Steps in which at least one request had draft tokens."""
    verifying_tokens: int = 0
    """Part of `tokens` that `verifying_steps` computed: the drafts and one a request."""
    verifying_s: float = 0.0
    """Part of `busy_s` that `verifying_steps` took."""
    native_layer_tokens: int = 0
    """Tokens times decoder layers that native calls of decode steps have computed."""
    gpu_layer_tokens: int = 0
    """Tokens times decoder layers that a GPU has computed for this CPU rank."""
    operator_layer_tokens: int = 0
    """Tokens times decoder layers that were computed operator by operator, of those that can be
    computed in the other two ways."""
    expert_layers: int = 0
    """Layers whose experts an expert rank has computed."""
    experts_read: int = 0
    """Experts that these have read, each once a layer."""
    expert_layer_tokens: int = 0
    """Tokens times layers whose experts an expert rank has computed, all or some of them."""
    linked_expert_tokens: int = 0
    """Tokens times layers whose experts this GPU rank has computed itself, all or some of them,
    from the memory of expert ranks."""
    slot_steps: int = 0
    """Steps of an expert rank for which slots were counted: those of few tokens, drafts that are
    verified not among them."""
    slot_layers: int = 0
    """Layers of these steps."""
    slot_experts: int = 0
    """Experts that these have read, each once a layer; not those that only drafts have chosen."""
    slot_computing_s: float = 0.0
    """Part of `busy_s` that these steps took."""
    slot_waiting_s: float = 0.0
    """Part of `waiting_s` that these steps took."""
    slot_hits_5: int = 0
    """Part of `slot_experts` that slots for 5 % of each layer's experts would have held."""
    slot_hits_10: int = 0
    slot_hits_25: int = 0
    slot_copies_5: int = 0
    """Experts that would have been copied into slots for 5 % of each layer's experts."""
    slot_copies_10: int = 0
    slot_copies_25: int = 0
    slot_held: int = 0
    """Part of `slot_experts` that a GPU has computed from its slots."""
    slot_copied: int = 0
    """Experts that this GPU rank has copied into its slots."""
    left_out_mlp_tokens: int = 0
    """Tokens that this GPU rank has left out of the model's last MLP: nothing reads their rows."""
    columns_waited_s: float = 0.0
    """Part of `busy_s` in which this CPU rank has waited for columns of MLPs of the GPU."""

    decoding_steps: int = 0
    """Steps of this CPU rank by the reason of their route (kernels/step_route.py); so are the
    following."""
    prompts_steps: int = 0
    many_requests_steps: int = 0
    few_tokens_steps: int = 0
    no_gpu_steps: int = 0
    no_room_steps: int = 0
    adapters_steps: int = 0
    mostly_decoding_steps: int = 0
    unknown_attention_steps: int = 0

    def count_route(self, reason: Reason) -> None:
        """Count a step by the reason for which it was computed where it was."""
        name = f"{reason}_steps"
        setattr(self, name, getattr(self, name) + 1)

    @property
    def by_reason(self) -> dict[Reason, int]:
        """Steps of this CPU rank by the reason of their route, the most frequent first."""
        found = {one: int(getattr(self, f"{one}_steps")) for one in Reason}
        return {one: found[one] for one in sorted(found, key=lambda one: -found[one]) if found[one]}

    def count(self, computed: LayerTokens) -> None:
        """Add the layers that one step has computed."""
        self.native_layer_tokens += computed.native
        self.gpu_layer_tokens += computed.on_gpu
        self.operator_layer_tokens += computed.by_operators
        self.linked_expert_tokens += computed.experts_on_gpu
        self.left_out_mlp_tokens += computed.left_out
        self.columns_waited_s += computed.columns_waited_s

    def __sub__(self, earlier: StepTotals) -> StepTotals:
        """Totals since an earlier moment."""
        names = (field.name for field in fields(self))
        return StepTotals(**{name: getattr(self, name) - getattr(earlier, name) for name in names})

    def __str__(self) -> str:
        if not self.steps:
            return "no steps"
        busy, waiting, exchange = (
            1000 * seconds / self.steps
            for seconds in (self.busy_s, self.waiting_s, self.exchange_s)
        )
        if self.expert_layers:
            return (
                f"{self.steps} steps of {self.tokens / self.steps:.1f} tokens: {busy:.2f} ms "
                f"computing experts of {self.expert_layers / self.steps:.1f} layers, "
                f"{self.experts_read / self.expert_layers:.1f} experts read a layer, {waiting:.2f} "
                "ms waiting between layers a step"
            )
        received, sent = (n / self.steps / 1024 for n in (self.received_bytes, self.sent_bytes))
        return (
            f"{self.steps} steps of {self.tokens / self.steps:.1f} tokens: "
            f"{busy:.2f} ms busy{self._of_columns()}, "
            f"{waiting:.2f} ms waiting for the previous stage, {exchange:.2f} ms exchange, "
            f"{received:.1f} KiB received, {sent:.1f} KiB sent a step"
            f"{self._of_verifying()}"
        )

    def _of_columns(self) -> str:
        """Line about the cores' wait for the GPU's columns; none where they did not wait."""
        if not self.columns_waited_s:
            return ""
        each = 1000 * self.columns_waited_s / self.steps
        return f" ({each:.2f} ms of it waiting for the GPU's columns)"

    def _of_verifying(self) -> str:
        """Line about steps with drafts, beside those without; none where there were none."""
        count, others = self.verifying_steps, self.steps - self.verifying_steps
        if not count:
            return ""
        each = 1000 * self.verifying_s / count
        other = 1000 * (self.busy_s - self.verifying_s) / others if others else 0.0
        beside = f", {other:.2f} ms the others" if others else ""
        return (
            f"; {count} of them verified drafts: {self.verifying_tokens / count:.1f} tokens, "
            f"{each:.2f} ms busy{beside}"
        )


@dataclass(frozen=True)
class PredictedStep:
    """The decode step that the plan has priced, on one rank's stage."""

    ms: float
    tokens: int
    """One for each sequence."""
    context: int
    """Tokens of each of them so far."""

    def against(self, totals: StepTotals) -> str:
        """Predicted beside measured; nothing where no such step was run."""
        if not totals.priced_steps:
            return ""
        measured = 1000 * totals.priced_s / totals.priced_steps
        return (
            f"; steps of {self.tokens} tokens: {measured:.2f} ms busy, {self.ms:.2f} ms predicted "
            f"(at context {self.context}), measured / predicted = {measured / self.ms:.2f}"
        )


class StepClock:
    """Adds up a rank's steps and reports them every so often.

    Args:
        report: takes one line.
        interval_s: seconds between reports while there are steps.
        predicted: what the plan expects of this rank; None where it expects nothing.

    """

    def __init__(
        self,
        report: Callable[[str], None],
        interval_s: float = REPORT_SECONDS,
        predicted: PredictedStep | None = None,
    ) -> None:
        self._report = report
        self._interval_s = interval_s
        self._predicted = predicted
        self._is_priced = False
        self._is_verifying = False
        self._last = time.monotonic()
        self._began: float | None = None
        self._ended = time.perf_counter()
        self._reported = StepTotals()
        self.totals = StepTotals()
        """Sums of all steps since the start."""

    def begin(self) -> float:
        """A call of the worker begins; answers the time, in seconds."""
        self._began = time.perf_counter()
        return self._began

    @property
    def in_step_s(self) -> float:
        """How long the running call of the worker has taken so far; 0 between calls."""
        # Read once: another thread may ask while a call ends.
        began = self._began
        return 0.0 if began is None else time.perf_counter() - began

    def add(
        self,
        seconds: float,
        tokens: int,
        boundary: StageBoundary | None,
        *,
        waited_s: float = 0.0,
        is_verifying: bool = False,
    ) -> None:
        """Count one call of the worker, now ended; a step is counted by its tokens.

        Args:
            seconds: that the call took.
            tokens: of the step; 0 for a call that belongs to the step before it.
            boundary: what the rank exchanges tensors through.
            waited_s: part of `seconds` in which the rank waited for tokens of the step before.
            is_verifying: whether some of the step's tokens are drafts.

        """
        self._began = None
        exchanged = boundary.take() if boundary is not None else Exchanged()
        self._add_late(seconds, boundary)
        waiting_s = exchanged.waiting_s + waited_s
        busy = seconds - waiting_s - exchanged.exchange_s
        totals = self.totals
        totals.steps += tokens > 0
        totals.tokens += tokens
        totals.busy_s += busy
        totals.waiting_s += waiting_s
        totals.exchange_s += exchanged.exchange_s
        totals.received_bytes += exchanged.received_bytes
        totals.sent_bytes += exchanged.sent_bytes
        if tokens:
            self._is_priced = self._predicted is not None and tokens == self._predicted.tokens
            self._is_verifying = is_verifying
        # A call without tokens (sampling) belongs to the step before it.
        if self._is_priced:
            totals.priced_steps += tokens > 0
            totals.priced_s += busy
        if self._is_verifying:
            totals.verifying_steps += tokens > 0
            totals.verifying_tokens += tokens
            totals.verifying_s += busy
        self._ended = time.perf_counter()
        if time.monotonic() - self._last > self._interval_s:
            self._report_new_steps()

    def _add_late(self, seconds: float, boundary: StageBoundary | None) -> None:
        """Count what a GPU went on computing, to send it, after the last call had returned."""
        if boundary is None:
            return
        began = time.perf_counter() - seconds
        late = max(0.0, min(boundary.computed_at, began) - self._ended)
        self.totals.busy_s += late
        if self._is_priced:
            self.totals.priced_s += late
        if self._is_verifying:
            self.totals.verifying_s += late

    def _report_new_steps(self) -> None:
        new = self.totals - self._reported
        if new.steps:
            compared = self._predicted.against(new) if self._predicted is not None else ""
            passed = time.monotonic() - self._last
            share = 100 * new.busy_s / passed
            self._report(f"{new}; busy {share:.0f} % of {passed:.1f} s{compared}")
            self._reported = replace(self.totals)
            self._last = time.monotonic()

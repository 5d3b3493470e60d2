"""Steps as vLLM's engine has them: scheduled, looked up in an embedding, computed, and sent.

The layers are those of one rank (`Engine`) or of the ranks of a group (`GroupEngine`), with the
pretended GPU; see paged_steps.py and group_steps.py for what is expected.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from embeddings import EmbeddedSteps, embedding, model_of
from group_steps import GroupSteps
from paged_steps import Conversation
from stage_outputs import offered, pretended_memory, results
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

from ray_hetero.kernels.linear.streaming_linear import StreamingLinear
from ray_hetero.kernels.step_route import StepRoute
from ray_hetero.offload.prefetch import Prefetcher
from ray_hetero.offload.prefill import kv_transfer
from ray_hetero.offload.prefill.embedded_prompts import look_up_for

LARGE = 192
"""Tokens of a step that cannot be a decode step."""
Part = tuple[Conversation, int, int]
"""A request, its first token of a step and the one behind its last."""


class SentSteps:
    """Steps whose results stay on the GPU, and the next stage, which reads them there.

    Args:
        layers: of the first rank, whose results are sent.

    """

    def __init__(self, layers: Any) -> None:
        self.output, self._seen = offered(layers, waits=True)

    def results(self, x: Any, total: Any) -> tuple[Any, Any]:
        """Both results of a step, wherever they are, once nothing of it is left to do.

        Args:
            x: what the layers return, [tokens, N].
            total: the same.

        """
        if self.output.holds({"hidden_states": x, "residual": total}):
            words, number = self._seen.words, self.output.number
            assert words is not None
            self.output.settle()
            words.wait(number)
            x, total = (one.clone() for one in results(self._seen, len(x)))
            words.say(number)
        return x, total


def scheduled(
    tokens: dict[Conversation, torch.Tensor], *parts: Part, known: int = 0
) -> SchedulerOutput:
    """A step of vLLM's scheduler, in which each request is a new one, but so many of the first."""
    made = SchedulerOutput.make_empty()
    names = [str(number) for number in range(len(parts))]
    made.num_scheduled_tokens = {
        name: end - begin for name, (_, begin, end) in zip(names, parts, strict=True)
    }
    made.total_num_scheduled_tokens = sum(made.num_scheduled_tokens.values())
    made.scheduled_cached_reqs = CachedRequestData.make_empty()
    made.scheduled_cached_reqs.req_ids = names[:known]
    made.scheduled_new_reqs = [
        NewRequestData(
            name, tokens[request].tolist(), [], SamplingParams(), None, ([],), begin, None
        )
        for name, (request, begin, _) in [*zip(names, parts, strict=True)][known:]
    ]
    return made


def ended() -> SchedulerOutput:
    """The step without tokens by which ranks learn that no request is left."""
    made = SchedulerOutput.make_empty()
    made.finished_req_ids = {str(number) for number in range(LARGE)}
    return made


def begin_step(step: SchedulerOutput, ahead: Prefetcher, *kernels: StreamingLinear) -> None:
    """Begin a step on the ranks of a group, the first of which has the GPU."""
    for kernel in kernels:
        kernel.route = StepRoute.of(step.num_scheduled_tokens.values(), kernel.limits)
    route = kernels[0].route
    assert route is not None
    ahead.begin_step(step, route)


class Engine:
    """Steps of one rank that vLLM schedules, looks up and has computed.

    Args:
        monkeypatch: replaces the memory of GPUs, and what vLLM gives layers.
        given: more arguments of `EmbeddedSteps.made`.

    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **given: Any) -> None:
        pretended_memory(monkeypatch)
        # The next layer's keys and values wait until those of the one before are written.
        monkeypatch.setattr(kv_transfer, "HOST_BUFFERS", 1)
        self.embedded = EmbeddedSteps.made(monkeypatch, **given)
        self.steps, self.layers = self.embedded.steps, self.embedded.steps.made
        self.gpu = self.layers.gpu
        self.sent = SentSteps(self.layers)
        first = None if self.layers.shared is None else self.layers
        self._ahead = Prefetcher(self.gpu, first)
        # What the model does with rows, and what is sent, is known after two steps.
        for _ in range(2):
            request = self.request(LARGE)
            self.step((request, 0, LARGE))
            self.steps.free(request)

    @property
    def block(self) -> int:
        """Tokens of a block of the cache."""
        return self.steps.block

    def request(
        self, tokens: int, after: Conversation | None = None, shared: int = 0
    ) -> Conversation:
        """A request of so many tokens, the first blocks of it those of another one."""
        return self.embedded.request(tokens, after=after, shared=shared)

    def free(self, request: Conversation) -> None:
        """Let others have the blocks of a request, which has them no more."""
        self.steps.free(request)

    def schedule(self, *parts: Part, known: int = 0) -> None:
        """Have a step scheduled; `known` as of `scheduled`."""
        begin_step(scheduled(self.embedded.tokens, *parts, known=known), self._ahead,
                   self.steps.kernel)  # fmt: skip

    def idle(self) -> None:
        """Let the rank learn that no request is left."""
        begin_step(ended(), self._ahead, self.steps.kernel)

    def computed(self, *parts: Part) -> tuple[Any, Any]:
        """Compute a step; both results."""
        positions, hidden = self.steps.begin(parts)
        return self.sent.results(*self.layers(positions, hidden, None))

    def compute(self, *parts: Part) -> None:
        """Compute a step, and compare it."""
        self.steps.compare(*self.computed(*parts), parts)

    def step(self, *parts: Part) -> None:
        """Have a step scheduled and computed."""
        self.schedule(*parts)
        self.compute(*parts)


class GroupEngine:
    """The same of the ranks of a group, the first of which has the GPU.

    Args:
        monkeypatch: as of `Engine`.
        given: more arguments of `GroupSteps`.

    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **given: Any) -> None:
        pretended_memory(monkeypatch)
        monkeypatch.setattr(kv_transfer, "HOST_BUFFERS", 1)
        self._monkeypatch = monkeypatch
        self.group = GroupSteps(monkeypatch, **{"count": 2, "most": 512, **given})
        self.table = embedding()
        self.tokens: dict[Conversation, torch.Tensor] = {}
        self._tables = []
        for rank, (prompts, *_) in zip(self.group.ranks, self.group.join(), strict=True):
            own = embedding()
            own.weight = self.table.weight
            look_up_for(rank.kernel, prompts.gpu, model_of(own))
            self._tables.append(own)
        self.first = self.group.ranks[0].made
        self.gpu = self.first.gpu
        self.sent = SentSteps(self.first)
        decodes = None if self.first.shared is None else self.first
        self._ahead = Prefetcher(self.gpu, decodes)
        for _ in range(2):
            request = self.request(LARGE)
            self.step((request, 0, LARGE))
            self.free(request)

    @property
    def block(self) -> int:
        """Tokens of a block of the cache."""
        return self.group.block

    def request(
        self, tokens: int, after: Conversation | None = None, shared: int = 0
    ) -> Conversation:
        """As of `Engine`."""
        made = self.group.request(tokens, after, shared)
        self.tokens[made] = own = torch.randint(len(self.table.weight), (tokens,))
        if after is not None:
            own[: shared * self.block] = self.tokens[after][: shared * self.block]
        made.inputs.copy_(self.table.weight[own])
        return made

    def free(self, request: Conversation) -> None:
        """As of `Engine`."""
        self.group.free(request)

    def schedule(self, *parts: Part, known: int = 0) -> None:
        """As of `Engine`."""
        begin_step(scheduled(self.tokens, *parts, known=known), self._ahead,
                   *(rank.kernel for rank in self.group.ranks))  # fmt: skip

    def idle(self) -> None:
        """As of `Engine`."""
        begin_step(ended(), self._ahead, *(rank.kernel for rank in self.group.ranks))

    def computed(self, *parts: Part) -> tuple[Any, Any]:
        """As of `Engine`."""
        asked = torch.cat([self.tokens[one][begin:end] for one, begin, end in parts])
        found: list[tuple[Any, Any]] = []
        with self._monkeypatch.context() as patched:
            for place, (rank, table) in enumerate(zip(self.group.ranks, self._tables, strict=True)):

                def call(
                    positions: Any, hidden: Any, residual: Any, made: Any = rank.made,
                    table: Any = table, is_first: bool = not place,
                ) -> Any:  # fmt: skip
                    x, total = made(positions, table(asked), residual)
                    if is_first:
                        found.append(self.sent.results(x, total))
                    return x, total

                patched.setattr(rank, "made", call)
            for one in self.group.step(*parts):
                if isinstance(one, Exception):
                    raise one
        return found[0]

    def compute(self, *parts: Part) -> None:
        """As of `Engine`."""
        self.group.compare(*self.computed(*parts), parts)

    def step(self, *parts: Part) -> None:
        """As of `Engine`."""
        self.schedule(*parts)
        self.compute(*parts)

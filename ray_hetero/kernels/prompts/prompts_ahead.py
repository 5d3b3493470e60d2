"""What prompts need on its way to a GPU before the step that computes them reaches its layers.

vLLM prepares a step for some milliseconds in which the link to the GPU would have nothing to do:
the rows of an embedding come meanwhile, and weights.  Of a step with nothing but long new prompts
all is known that the GPU needs, and it begins with the layers (gpu_layers.py).  Before a step that
only decodes, weights come back whose place a prompt has taken (columns_on_gpu.py); the link is left
to these where such a step is expected behind a prompt.  And an engine without requests computes a
prompt next, whatever it has decoded before: what that begins with can be on the GPU when it comes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from ray_hetero.kernels.layers.step_rows import DECODING_TOKENS, PROMPT_TOKENS

if TYPE_CHECKING:
    from ray_hetero.kernels.prompts.gpu_prefill import GpuPrefill

READING_TOKENS = 4096
"""Most tokens of a step's prompts for which a GPU reads for longer than it computes.  Their weights
are asked for before their embeddings, and nothing is gained by beginning with the layers: on an
H100 128 to 1,024 tokens took 0.98 to 1.03 of the time, and 8,192 took 0.97."""


class ComputesPrompts(Protocol):
    """What computes prompts of a rank."""

    from_tokens: int
    """Least tokens of a step that a GPU computes."""

    @property
    def gpu(self) -> GpuPrefill | None:
        """The GPU; None where another rank of the group has it."""


class Decodes(Protocol):
    """What computes decode steps, with a part for a GPU."""

    def shares(self, tokens: int) -> bool:
        """Whether the GPU has a part of a step of so many tokens."""

    def fetch_ahead(self, tokens: int) -> None:
        """Have weights of the GPU's part of a step of so many tokens come."""


_offered: dict[GpuPrefill, ComputesPrompts] = {}
"""Layers or products of prompts, once for each GPU: runs of layers may have one in common."""


_begins: list[Callable[[Sequence[int]], bool]] = []
"""Beginning of the layers that get the rows of the embedding, if some layers do."""
_first: list[Decodes] = []
"""Layers that are called first, if there are such layers."""


def use(
    prompts: Iterable[ComputesPrompts], begin: Callable[[Sequence[int]], bool] | None = None,
    first: Decodes | None = None,
) -> None:  # fmt: skip
    """Have what computes this process's prompts read their weights ahead.

    Args:
        prompts: layers, or products.
        begin: begins with the layers of a step of new prompts whose rows of the embedding are on
            the GPU, given the tokens of each; says whether it has.
        first: layers that are called first.

    """
    _begins[:] = [] if begin is None else [begin]
    _first[:] = [] if first is None else [first]
    _offered.clear()
    _offered.update((one.gpu, one) for one in prompts if one.gpu is not None)


class PromptsAhead:
    """Learns of each step, in their order, before it is prepared."""

    def __init__(self) -> None:
        self._requests: dict[str, bool] = {}
        """Whether each request decodes behind its prompt."""
        self._unfinished: dict[str, int] = {}
        """Tokens that are still to come of the prompts of some of these."""
        self._had_prompts = self._came_again = False
        """Whether the last step had prompts, and the one behind the last such step before."""

    def begin_step(self, scheduler_output: Any) -> None:
        """Have weights and rows of the embedding come if the step has prompts that a GPU computes.

        Weights come too if no request is left.

        vLLM's engine runs a step without tokens once its last request has ended.

        Args:
            scheduler_output: the step's.

        Raises:
            RuntimeError: what CUDA says, but that memory has run out: the next call of what the GPU
                computes learns of that, and does without it.
            TimeoutError: the GPU takes too long.

        """
        self._note(scheduler_output)
        counts = scheduler_output.num_scheduled_tokens.values()
        tokens = sum(count for count in counts if count > DECODING_TOKENS)
        prompts_follow = self._prompts_follow(has_prompts=tokens > 0)
        for gpu, one in _offered.items():
            with gpu.leaving_shortage():
                if gpu.is_settled:
                    gpu.order_of_prompts.begin(goes_round=prompts_follow)
                if tokens >= one.from_tokens and gpu.is_settled:
                    found = _only_new_tokens(scheduler_output)
                    if found is not None:
                        gpu.memory.embedded.expect(found, gpu.computing)
                        new = _new_prompts(scheduler_output) if tokens > READING_TOKENS else []
                        if new and any(begin(new) for begin in _begins):
                            continue  # what the layers need is on its way
                if one.from_tokens <= tokens <= READING_TOKENS or not self._requests:
                    gpu.read_ahead()
        if counts and not tokens and not scheduler_output.scheduled_new_reqs:
            for first in _first:
                first.fetch_ahead(scheduler_output.total_num_scheduled_tokens)

    def _note(self, scheduler_output: Any) -> None:
        """Note which requests there are, and how much of their prompts is still to come."""
        for name in scheduler_output.finished_req_ids:
            self._requests.pop(name, None)
            self._unfinished.pop(name, None)
        for one in scheduler_output.scheduled_new_reqs:
            asked = one.sampling_params
            self._requests[one.req_id] = asked is not None and asked.max_tokens != 1
            self._unfinished[one.req_id] = len(one.prompt_token_ids or ()) - one.num_computed_tokens
        for name in list(self._unfinished):
            self._unfinished[name] -= scheduler_output.num_scheduled_tokens.get(name, 0)
            if self._unfinished[name] <= 0:
                del self._unfinished[name]

    def _prompts_follow(self, *, has_prompts: bool) -> bool:
        """Whether prompts are expected behind a step, or decode steps that need no weights.

        Behind prompts that are longer than the step the rest of them comes, behind others what came
        there the last time.
        """
        if self._had_prompts:
            self._came_again = has_prompts
        self._had_prompts = has_prompts
        decoding = sum(self._requests.values())
        if not (has_prompts and decoding) or self._unfinished or self._came_again:
            return True
        return not any(first.shares(decoding) for first in _first)


def _new_prompts(scheduler_output: Any) -> list[int]:
    """Tokens of each request of a step of new ones.

    None if some are cached, or may be decoded, or if the layers take no request for a prompt.
    """
    new = scheduler_output.scheduled_new_reqs
    counts = [scheduler_output.num_scheduled_tokens[one.req_id] for one in new]
    is_cached = any(one.num_computed_tokens for one in new)
    if is_cached or min(counts) <= DECODING_TOKENS or max(counts) < PROMPT_TOKENS:
        return []
    return counts


def _only_new_tokens(scheduler_output: Any) -> torch.Tensor | None:
    """Tokens of a step as vLLM usually orders them, int64; None where it has others than prompts'.

    Whoever uses them compares them with those of the step.
    """
    counts = scheduler_output.num_scheduled_tokens
    # By way of NumPy, which reads a list in a fraction of torch's time.
    found = []
    for one in scheduler_output.scheduled_new_reqs:
        begin = one.num_computed_tokens
        own = (one.prompt_token_ids or ())[begin : begin + counts[one.req_id]]
        found.append(np.array(own, dtype=np.int64))
    total = scheduler_output.total_num_scheduled_tokens
    if sum(map(len, found)) != total:
        return None
    return torch.from_numpy(np.concatenate(found))

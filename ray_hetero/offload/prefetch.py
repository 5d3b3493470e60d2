"""Weights on their way to a GPU before the step that needs them reaches its layers.

vLLM prepares a step for some milliseconds in which the link to the GPU would have nothing to do:
the first weights of prompts come meanwhile.  Before a step that only decodes, weights come back
whose place a prompt has taken (mlp_columns.py).  And an engine without requests computes a
prompt next, whatever it has decoded before: what that begins with can be on the GPU when it comes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

from ray_hetero.kernels.layers.step_rows import DECODING_TOKENS

if TYPE_CHECKING:
    from ray_hetero.offload.prefill.offload_gpu import OffloadGpu


class ComputesPrompts(Protocol):
    """Layers or products that compute prompts of a rank."""

    from_tokens: int
    """Least tokens of a step that a GPU computes."""

    @property
    def gpu(self) -> OffloadGpu | None:
        """The GPU; None where another rank of the group has it."""


class Decodes(Protocol):
    """Layers that compute decode steps, with a part for a GPU."""

    def fetch_ahead(self, tokens: int) -> None:
        """Prefetch weights of the GPU's part of a step of so many tokens."""


_offered: dict[OffloadGpu, ComputesPrompts] = {}
"""Layers or products of prompts, once for each GPU: runs of layers may have one in common."""


_first: list[Decodes] = []
"""Layers that are called first, if there are such layers."""


def use(prompts: Iterable[ComputesPrompts], first: Decodes | None = None) -> None:
    """Register the layers or products of prompts, which then read their weights ahead.

    Args:
        prompts: layers, or products.
        first: layers that are called first.

    """
    _first[:] = [] if first is None else [first]
    _offered.clear()
    _offered.update((one.gpu, one) for one in prompts if one.gpu is not None)


class Prefetcher:
    """Learns of each step, in their order, before it is prepared."""

    def __init__(self) -> None:
        self._requests: set[str] = set()

    def begin_step(self, scheduler_output: Any) -> None:
        """Prefetch weights if the step has prompts that a GPU computes.

        Weights come too if no request is left.

        vLLM's engine runs a step without tokens once its last request has ended.

        Args:
            scheduler_output: the step's.

        Raises:
            RuntimeError: what CUDA says, but that memory has run out: the next call of what the GPU
                computes learns of that, and does without it.
            TimeoutError: the GPU takes too long.

        """
        self._requests -= set(scheduler_output.finished_req_ids)
        self._requests |= {one.req_id for one in scheduler_output.scheduled_new_reqs}
        counts = scheduler_output.num_scheduled_tokens.values()
        tokens = sum(count for count in counts if count > DECODING_TOKENS)
        for gpu, one in _offered.items():
            with gpu.leaving_shortage():
                if tokens >= one.from_tokens or not self._requests:
                    gpu.read_ahead()
        if counts and not tokens and not scheduler_output.scheduled_new_reqs:
            for first in _first:
                first.fetch_ahead(scheduler_output.total_num_scheduled_tokens)

"""Weights on their way to a GPU before the step that needs them reaches its layers.

vLLM prepares a step for some milliseconds in which the link to the GPU would have nothing to do:
the first weights of prompts come meanwhile.  Before a step that only decodes, weights come back
whose place a prompt has taken (mlp_columns.py).  And an engine without requests computes a
prompt next, whatever it has decoded before: what that begins with can be on the GPU when it comes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray_hetero.kernels.layers.decoder_layers import DecoderLayers
    from ray_hetero.kernels.step_route import StepRoute
    from ray_hetero.offload.prefill.offload_gpu import OffloadGpu


class Prefetcher:
    """Learns of each step, in their order, before it is prepared.

    Args:
        gpu: computes this rank's prompts; None where none does, or another rank of the group has
            it.
        first: layers that are called first, if there are such layers.

    """

    def __init__(self, gpu: OffloadGpu | None, first: DecoderLayers | None = None) -> None:
        self._gpu, self._first = gpu, first
        self._requests: set[str] = set()

    def begin_step(self, scheduler_output: Any, route: StepRoute) -> None:
        """Prefetch weights if the step has prompts that a GPU computes.

        Weights come too if no request is left.

        vLLM's engine runs a step without tokens once its last request has ended.

        Args:
            scheduler_output: the step's.
            route: of the step.

        Raises:
            RuntimeError: what CUDA says, but that memory has run out: the next call of what the GPU
                computes learns of that, and does without it.
            TimeoutError: the GPU takes too long.

        """
        self._requests -= set(scheduler_output.finished_req_ids)
        self._requests |= {one.req_id for one in scheduler_output.scheduled_new_reqs}
        if self._gpu is not None:
            with self._gpu.leaving_shortage():
                if route.reads_ahead or not self._requests:
                    self._gpu.read_ahead()
        only_decodes = route.is_decoding and not scheduler_output.scheduled_new_reqs
        if self._first is not None and route.tokens and only_decodes:
            self._first.fetch_ahead(route.tokens)

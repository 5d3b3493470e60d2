"""Requests shared out among the batches of a pipeline.

vLLM's scheduler puts every request that is not in flight into the next batch.  Requests that have
been in one batch so stay together, and a pipeline's stages take turns although it would take a
batch for each.  Here a step of nothing but decoding takes its share of the requests and leaves the
others to the batch behind it.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

CLASS = f"{__name__}.SharingScheduler"
"""Name of the class that `scheduler_cls` of vLLM's configuration is set to."""


class SharingScheduler(Scheduler):  # type: ignore[misc]
    """vLLM's scheduler, with smaller batches while there are no prompts to read.

    Replaces: nothing; is named by `scheduler_cls` where more than one batch is in flight.
    Why: vLLM's own puts every request that is not in flight into the next batch.
    Can go when: it shares requests out among the batches of a pipeline.
    """

    max_num_scheduled_tokens: int

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Schedule a step as vLLM does, of a share of the requests."""
        most = self.max_num_scheduled_tokens
        self.max_num_scheduled_tokens = min(most, self._share() or most)
        try:
            return super().schedule(*args, **kwargs)
        finally:
            self.max_num_scheduled_tokens = most

    def _share(self) -> int | None:
        """Tokens of one batch, one for each of its requests; None while there are prompts."""
        if self.waiting or any(one.num_computed_tokens < one.num_prompt_tokens
                               for one in self.running):  # fmt: skip
            return None
        return -(-len(self.running) // int(self.vllm_config.max_concurrent_batches))

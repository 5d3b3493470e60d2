"""Steps of more tokens while no request decodes.

Experts that a GPU reads over its link are read once a step, so that a prompt of several steps has
them come several times.  Steps are kept short for the sake of requests that decode beside them;
with none of these, a step may have as many tokens as the ranks have room for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from ray_hetero.compat.worker.late_tokens import SCHEDULER

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs


class _LongPrompts:
    """A scheduler whose steps are as long as the ranks have room for while no request decodes.

    `max_num_batched_tokens` of vLLM's configuration is the room of the ranks, and
    `max_num_scheduled_tokens` the limit of a step beside requests that decode.
    """

    max_num_scheduled_tokens: int
    running: list[Any]
    scheduler_config: Any

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Schedule a step as vLLM does."""
        least = self.max_num_scheduled_tokens
        if all(one.is_prefill_chunk for one in self.running):
            self.max_num_scheduled_tokens = self.scheduler_config.max_num_batched_tokens
        try:
            return super().schedule(*args, **kwargs)  # type: ignore[misc]
        finally:
            self.max_num_scheduled_tokens = least


class LongPromptScheduler(_LongPrompts, Scheduler):  # type: ignore[misc]
    """vLLM's scheduler, with longer steps while no request decodes.

    Replaces: nothing; is named by `scheduler_cls` where experts.prefill_step_tokens is set.
    Uses: `Scheduler.running`, `Scheduler.max_num_scheduled_tokens`, `Request.is_prefill_chunk`.
    Why: vLLM's own has one limit for steps with and without requests that decode.
    Can go when: vLLM has a limit for steps of prompts alone.
    """


class AsyncLongPromptScheduler(_LongPrompts, AsyncScheduler):  # type: ignore[misc]
    """vLLM's asynchronous scheduler, with longer steps while no request decodes.

    Replaces: nothing; is named by `scheduler_cls` where experts.prefill_step_tokens is set.
    Why: vLLM's own has one limit for steps with and without requests that decode.
    Can go when: vLLM has a limit for steps of prompts alone.
    """


CLASSES = tuple(
    f"{__name__}.{one.__name__}" for one in (LongPromptScheduler, AsyncLongPromptScheduler)
)
"""Names of the classes that `scheduler_cls` of vLLM's configuration is set to."""
DEFAULT_TOKENS = 8192
"""Tokens of a step beside requests that decode, where --max-num-batched-tokens is not given."""


def make_room(engine_args: EngineArgs, tokens: int) -> None:
    """Give the ranks of an engine room for steps of so many tokens.

    Args:
        engine_args: of the engine, before vLLM builds its configuration.
        tokens: of a step while no request decodes; beside requests that do, the limit is
            --max-num-scheduled-tokens, or else --max-num-batched-tokens as it was given.

    """
    asked = engine_args.max_num_scheduled_tokens or engine_args.max_num_batched_tokens
    engine_args.max_num_scheduled_tokens = asked or min(DEFAULT_TOKENS, tokens)
    engine_args.max_num_batched_tokens = tokens


def schedule_long_prompts(vllm_config: VllmConfig) -> bool:
    """Name the scheduler that uses this room, before the engine makes it.

    Returns:
        whether that has been done: not where the user, or the pipeline, has another scheduler.

    """
    config = vllm_config.scheduler_config
    if config.scheduler_cls not in (None, SCHEDULER):
        return False
    is_ahead = config.async_scheduling or config.scheduler_cls == SCHEDULER
    config.scheduler_cls = CLASSES[is_ahead]
    return True

"""Steps of more tokens while no request decodes.

Experts that a GPU reads over its link are read once a step, so that a prompt of several steps has
them come several times.  Steps are kept short for the sake of requests that decode beside them;
with none of these, a step may have as many tokens as the ranks have room for.
"""

from __future__ import annotations

import itertools
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
    waiting: Any
    scheduler_config: Any

    @property
    def idle_step_tokens(self) -> int:
        """Tokens of a step that begins while no request is running."""
        return int(self.scheduler_config.max_num_batched_tokens)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Schedule a step as vLLM does."""
        least = self.max_num_scheduled_tokens
        if self._takes_all_room():
            self.max_num_scheduled_tokens = self.idle_step_tokens
        try:
            return super().schedule(*args, **kwargs)  # type: ignore[misc]
        finally:
            self.max_num_scheduled_tokens = least

    def _takes_all_room(self) -> bool:
        if not all(one.is_prefill_chunk for one in self.running):
            return self._has_item_to_be_taken_whole()
        # vLLM makes the logits of all these tokens at once, 26 GB for 32,768 of 200,000 words.
        return not any(
            map(_wants_logits_of_its_prompt, itertools.chain(self.running, self.waiting))
        )

    def _has_item_to_be_taken_whole(self) -> bool:
        """Whether the next prompt has an image that a step beside decoding has no room for.

        It would wait until no request decodes, and all behind it.
        """
        if not self.scheduler_config.disable_chunked_mm_input:
            return False
        first = itertools.islice(self.waiting, 1)
        prompts = [one for one in self.running if one.is_prefill_chunk]
        return any(
            item.mm_position.length > self.max_num_scheduled_tokens
            and item.mm_position.offset + item.mm_position.length > one.num_computed_tokens
            for one in (*prompts, *first)
            for item in one.mm_features
        )


def _wants_logits_of_its_prompt(request: Any) -> bool:
    sampling = request.sampling_params
    return sampling is not None and sampling.prompt_logprobs is not None


class LongPromptScheduler(_LongPrompts, Scheduler):  # type: ignore[misc]
    """vLLM's scheduler, with longer steps while no request decodes.

    Replaces: nothing; is named by `scheduler_cls` where experts.prefill_step_tokens is set.
    Uses: `Scheduler.running`, `Scheduler.waiting`, `Scheduler.max_num_scheduled_tokens`,
    `Request.is_prefill_chunk`, `Request.num_computed_tokens`, `Request.mm_features`,
    `Request.sampling_params`.
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


def steps_conflict(vllm_config: VllmConfig) -> str | None:
    """Say why an engine cannot have two limits of a step; None if it can."""
    config, model = vllm_config.scheduler_config, vllm_config.model_config
    limit, most = config.max_num_scheduled_tokens, model.max_model_len
    if limit < config.max_num_seqs:
        # Of more requests that have begun in one long step, some would never decode.
        return (
            f"steps beside requests that decode have up to {limit} tokens "
            f"(--max-num-batched-tokens), fewer than requests may run at once "
            f"({config.max_num_seqs}). Type: --max-num-seqs {limit}"
        )
    if not config.enable_chunked_prefill and model.runner_type == "generate" and limit < most:
        # A prompt of more would wait until nobody decodes, and all others behind it.
        return (
            f"without chunked prefill a prompt of up to {most} tokens (--max-model-len) is one "
            f"step, and steps beside requests that decode have up to {limit}. Leave "
            f"--no-enable-chunked-prefill out, or type: --max-num-batched-tokens {most}"
        )
    return None


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

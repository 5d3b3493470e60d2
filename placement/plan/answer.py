"""The answer of a plan in a few lines: speed, first token, memory."""

from __future__ import annotations

from collections.abc import Iterator

from placement.cluster.layout import Layout
from placement.plan.plan import Plan
from placement.plan.stage_plan import Split
from placement.words import duration, plural, size


def answer(plan: Plan) -> Iterator[tuple[str, str]]:
    """Answer that a reader wants to know first: a heading and a sentence for each line."""
    split, work = plan.split, plan.split.work
    yield "Speed", _speed(plan)
    yield "Layout", _layout(plan)
    yield "First token", f"{_first_token(plan)}{_on_gpu(split)}"
    room = split.kv_tokens / work.max_model_len
    yield (
        "Memory",
        f"{size(plan.shape.weight_bytes)} of weights; KV cache for "
        f"{plural(split.kv_tokens, 'token')}, room for {room:,.1f} "
        f"sequence{'' if f'{room:.1f}' == '1.0' else 's'} of {work.max_model_len:,}"
        f"{_room(plan)}",
    )
    if plan.family is not None:
        yield "Tested", plan.family


def _first_token(plan: Plan) -> str:
    """For one prompt, or for those of all users who were asked for, arriving at once."""
    split = plan.split
    prompt = f"a prompt of {plural(split.work.context, 'token')}"
    alone = f"{duration(split.prefill_s)} after {prompt}"
    if len(plan.users) != 1 or plan.users[0].users == 1:
        return alone
    (users,) = plan.users
    return (
        f"{duration(users.first_token_s)} for the last of {plural(users.users, 'user')} who send "
        f"{prompt} at once, {duration(split.prefill_s)} for one alone"
    )


def _room(plan: Plan) -> str:
    """Room for users of a context that was asked for."""
    work = plan.split.work
    if len(plan.users) != 1 or work.context == work.max_model_len:
        return ""
    return f", {plan.users[0].room:,.1f} of {work.context:,}"


def _layout(plan: Plan) -> str:
    split = plan.split
    kinds = tuple(tuple(rank.device.kind for rank in stage.ranks) for stage in split.stages)
    words = Layout(kinds).words
    if plan.experts:
        layers = plural(plan.experts[0].layers, "layer")
        words += f", experts of {layers} on {plural(len(plan.experts), 'socket')}"
    if len(split.stages) > 1:
        partition = ",".join(map(str, split.layers))
        words += f"; layers {partition} (VLLM_PP_LAYER_PARTITION={partition})"
    return words


def _speed(plan: Plan) -> str:
    split, work = plan.split, plan.split.work
    drafted = plan.speculation
    total, one = split.tokens_per_s, 1 / split.step_s
    if drafted is not None:
        # The split's step is one with drafts, which not every step has.
        one = drafted.asked.tokens / drafted.asked.step_s
        total *= one * split.step_s
    each = f" with {work.context:,} tokens of context"
    step = f"{duration(split.step_s)} a token{each}"
    if work.batch > 1:
        step = f"{duration(split.step_s)} a step{each} each"
    if drafted is not None:
        step = (
            f"a step that verifies {plural(drafted.asked.drafts, 'draft')} a request takes "
            f"{duration(split.step_s)}{each}"
        )
    if split.objective == "throughput":
        stages = "each stage" if len(split.stages) > 1 else "the stage"
        step += f"; a batch is in {stages}, the slowest takes {duration(split.slowest_s)}"
    if work.batch == 1 and split.objective == "latency":
        return f"{total:,.1f} tokens/s for one sequence: {step}"
    return (
        f"{total:,.1f} tokens/s in all, {one:,.1f} for each of {plural(work.batch, 'sequence')}"
        f"{' of a batch' if split.objective == 'throughput' else ''}: {step}"
    )


def _on_gpu(split: Split) -> str:
    """Line about the passes that a GPU computes for CPU ranks."""
    gpus = [one.devices.prompt_gpu for one in split.stages if one.devices.prompt_gpu is not None]
    if not gpus:
        return ""
    return f"; a GPU computes passes of {gpus[0].from_tokens} tokens or more for CPU stages"

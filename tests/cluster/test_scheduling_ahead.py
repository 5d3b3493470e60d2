"""Steps that are scheduled before the tokens of the one before are known: a CPU rank, and a rank
that pretends to be on a GPU and samples.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from any_request import any_request, seeds
from engines import (
    IN_THIS_PROCESS,
    TOTALS,
    Json,
    Model,
    batch,
    engine,
    hetero,
    metrics,
    prompts,
    run_engines,
    tokens,
)
from leftovers import Scene

pytestmark = pytest.mark.timeout(1800)

LAYOUT = [["cpu"], ["gpu"]]
RAY: Json = {
    "num_cpus": 2, "num_gpus": 1, "object_store_memory": 100 << 20, "include_dashboard": False
}  # fmt: skip
PRETENDED = {"RAY_HETERO_PRETEND_GPU": "1"}
# What is sampled depends on the tokens before it, which the rank that samples has to know.
PENALISED: Json = {"repetition_penalty": 1.3, "frequency_penalty": 0.4}
# Some of these end many answers early, of which one more token has been computed by then.
ENDED: Json = {"stop_token_ids": list(range(8, 640, 9)), "max_tokens": 48}
REQUESTS = 24
"""Of each seed."""
LEAVING = 0.25
"""Share of those whose clients leave before the end."""


def any_requests(seed: int) -> Json:
    """A batch of requests that a seed gives, of which some are aborted."""
    draw = random.Random(seed)
    given = [any_request(draw) for _ in range(REQUESTS)]
    for one in given:
        if draw.random() < LEAVING:
            one["leave_after"] = draw.randrange(1, 12)
    return {"requests": given}


@pytest.fixture(scope="module")
def answers(
    scene: Scene, logs: Path, model: Model
) -> tuple[list[list[Json]], list[list[Json]], list[list[Json]]]:
    """Of stock vLLM, of an engine with room for few requests at a time, and of one that is told
    not to schedule ahead.
    """
    checkpoint = model("llama", "f32")
    asked = [batch(prompts()), batch(prompts(), **PENALISED), batch(prompts(), **ENDED)]
    drawn = [any_requests(seed) for seed in seeds(3)]
    ours = engine(
        checkpoint, dtype="float32", max_num_batched_tokens=64, max_num_seqs=12,
        disable_log_stats=False, num_gpu_blocks_override=14, **hetero(layout=LAYOUT),
    )  # fmt: skip
    seen = [*asked, metrics("vllm:num_preemptions"), TOTALS, *drawn]
    stock, ahead, behind = run_engines(
        scene,
        logs / "ahead",
        [
            (engine(checkpoint, dtype="float32"), [*asked, *drawn]),
            (ours, seen),
            ({**ours, "async_scheduling": False}, seen),
        ],
        ray=RAY,
        extra=PRETENDED | IN_THIS_PROCESS,
    )
    return stock, ahead, behind


@pytest.mark.parametrize("which", range(3))
def test_tokens_are_those_of_stock(which: int, answers: tuple[list[list[Json]], ...]) -> None:
    stock, *ours = (tokens(found[which]) for found in answers)
    assert ours[0] == stock
    assert ours[1] == stock


def test_requests_were_set_back_and_ended_early(answers: tuple[list[list[Json]], ...]) -> None:
    _, ahead, behind = answers
    for found in (ahead, behind):
        assert sum(entry["vllm:num_preemptions"] for entry in found[3]) > 0
    lengths = [len(one) for one in tokens(ahead[2])]
    assert min(lengths) < 48


def test_the_first_stage_waits_for_tokens_where_it_is_told_to(
    answers: tuple[list[list[Json]], ...],
) -> None:
    _, ahead, behind = answers
    first, _ = ahead[4]
    assert first["waiting_s"] > 0
    first, _ = behind[4]
    assert first["waiting_s"] == 0


@pytest.mark.parametrize("seed", seeds(3))
def test_any_request_is_answered_as_by_stock(
    seed: int, answers: tuple[list[list[Json]], ...]
) -> None:
    place = seed - seeds(3).start
    requests = any_requests(seed)["requests"]
    stock, *ours = answers[0][3 + place], answers[1][5 + place], answers[2][5 + place]
    wrong = []
    for number, one in enumerate(requests):
        wanted, reason = stock[number]["tokens"][0], stock[number]["reason"]
        for found in ours:
            tokens, ended = found[number]["tokens"][0], found[number]["reason"]
            # A client that leaves may have had a token more or less by then.
            is_alike = tokens == wanted and ended == reason
            has_left = ended is None and one.get("leave_after", REQUESTS) <= len(tokens)
            if not (is_alike or (has_left and tokens[: len(wanted)] == wanted[: len(tokens)])):
                wrong.append((number, one, (tokens, ended), (wanted, reason)))
    assert not wrong, f"seed {seed}"
    # Not a test if all are alike, or none is aborted.
    assert len({one["reason"] for one in stock}) == 3
    assert len({tuple(one["tokens"][0]) for one in stock}) > REQUESTS // 2

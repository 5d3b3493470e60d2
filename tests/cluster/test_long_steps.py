"""Steps of more tokens while no request decodes (experts.prefill_step_tokens), beside all else.

Requests leave, are preempted, have cached prefixes, priorities, drafts and grammars.  Images
and adapters are in test_expert_ranks; vLLM's example of a connector takes no prompts in chunks.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest
from any_request import any_request, seeds
from engines import (
    HERE,
    IN_THIS_PROCESS,
    START_SECONDS,
    Json,
    Model,
    batch,
    engine,
    hetero,
    long_prompt,
    metrics,
    prompts,
    run_engines,
    start,
    tokens,
)
from leftovers import Scene

pytestmark = [pytest.mark.timeout(1800), pytest.mark.slow]

RAY: Json = {
    "num_cpus": 2, "num_gpus": 1, "object_store_memory": 100 << 20, "include_dashboard": False
}  # fmt: skip
PRETENDED = {"RAY_HETERO_PRETEND_GPU": "1"}
LIMIT, ROOM = 64, 512
REQUESTS = 24
"""Of each seed."""
LONG = (90, 130, 200, 257, 300)
"""Tokens of prompts of several steps beside requests that decode."""
NGRAMS: Json = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}


def mixed(seed: int) -> Json:
    """Requests that a seed gives: some leave behind a token, or in the middle of their prompt."""
    draw = random.Random(seed)
    given = []
    for _ in range(REQUESTS):
        one = any_request(draw) | {"priority": draw.randrange(3)}
        if draw.random() < 0.4:
            one["prompt"] = long_prompt(draw.choice(LONG))
        left = draw.random()
        if left < 0.15:
            one["leave_after"] = draw.randrange(1, 12)
        elif left < 0.35:
            one["leave_at_step"] = draw.randrange(6)
        if draw.random() < 0.15:
            one["sampling"]["prompt_logprobs"] = 1
        given.append(one)
    return {"requests": given}


def greedy(seed: int) -> Json:
    """Long prompts at once, which repeat themselves, so that drafts are right; some leave."""
    draw = random.Random(seed)
    given = []
    for number in range(12):
        head = prompts(4)[1][: draw.choice((20, 64, 65))] * 6
        one: Json = {
            "prompt": head[: draw.choice(LONG)], "priority": number % 2,
            "sampling": {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True},
        }  # fmt: skip
        if number % 4 == 3:
            one["leave_at_step"] = draw.randrange(8)
        given.append(one)
    return {"requests": given}


CHOSEN: Json = {
    "requests": [
        {
            "prompt": long_prompt(length), "choices": ["yes", "no, never", "perhaps"],
            "sampling": {"temperature": 0.0, "max_tokens": 24},
        }
        for length in LONG
    ]
}  # fmt: skip


@pytest.fixture(scope="module")
def answers(scene: Scene, logs: Path, model: Model) -> list[list[list[Json]]]:
    """Of stock vLLM, of an engine with little room for KV blocks, and of one that drafts."""
    path = model("mixtral", "f32")
    drawn = [mixed(seed) for seed in seeds(3)]
    common = {"dtype": "float32", "scheduling_policy": "priority", "skip_tokenizer_init": False}
    ours = engine(
        path, max_num_batched_tokens=LIMIT, max_num_seqs=12, disable_log_stats=False,
        **common,
        **hetero(
            layout=[["gpu"]], experts={"ranks": 1, "prefill_step_tokens": ROOM},
            cpu={"ranks_per_socket": 1},
        ),
    )  # fmt: skip
    again = [batch([long_prompt(300)], max_tokens=4)] * 2
    asked = [*again, greedy(0), CHOSEN, *drawn]
    seen = [metrics("vllm:num_preemptions"), metrics("vllm:prefix_cache_hits"),
            metrics("vllm:spec_decode_num_accepted_tokens")]  # fmt: skip
    found = run_engines(
        scene,
        logs / "long-steps",
        [
            (engine(path, **common), asked),
            (ours | {"num_gpu_blocks_override": 14}, [*asked, *seen]),
            (ours | {"speculative_config": NGRAMS}, [*asked[:4], *seen]),
        ],
        ray=RAY,
        extra=PRETENDED | IN_THIS_PROCESS,
    )
    log = (logs / "long-steps" / "log").read_text()
    assert log.count(f"steps have up to {ROOM} tokens while no request decodes") == 2
    return found


@pytest.mark.parametrize("which", [1, 2], ids=["little room", "drafts"])
def test_prompts_answer_alike_with_and_without_cached_prefixes(
    which: int, answers: list[list[list[Json]]]
) -> None:
    stock, ours = answers[0], answers[which]
    assert [tokens(one) for one in ours[:2]] == [tokens(one) for one in stock[:2]]
    assert tokens(ours[3]) == tokens(stock[3])
    assert {one["reason"] for one in ours[3]} == {"stop"}


def alike(requests: list[Json], stock: list[Json], ours: list[Json]) -> list[int]:
    """Numbers of the requests that were answered in another way."""
    wrong = []
    for number, one in enumerate(requests):
        (wanted,), (found,) = stock[number]["tokens"], ours[number]["tokens"]
        has_left = "leave_at_step" in one or "leave_after" in one
        if has_left and (ours[number]["reason"] is None or stock[number]["reason"] is None):
            # It may have had some tokens more or less by then.
            short, other = sorted((wanted, found), key=len)
            is_alike = other[: len(short)] == short
        else:
            is_alike = (wanted, stock[number]["reason"]) == (found, ours[number]["reason"])
        if not is_alike:
            wrong.append(number)
    return wrong


@pytest.mark.parametrize("which", [1, 2], ids=["little room", "drafts"])
def test_several_long_prompts_at_once(which: int, answers: list[list[list[Json]]]) -> None:
    requests = greedy(0)["requests"]
    stock, ours = answers[0][2], answers[which][2]
    assert alike(requests, stock, ours) == []
    assert sum(one["reason"] == "length" for one in ours) >= 9


@pytest.mark.parametrize("seed", seeds(3))
def test_any_request_is_answered_as_by_stock(seed: int, answers: list[list[list[Json]]]) -> None:
    place = 4 + seed - seeds(3).start
    requests = mixed(seed)["requests"]
    assert alike(requests, answers[0][place], answers[1][place]) == []
    # Not a test if none leaves, or all do.
    assert 2 < sum(one["reason"] is None for one in answers[1][place]) < REQUESTS - 4


def test_there_were_preemptions_hits_and_drafts(answers: list[list[list[Json]]]) -> None:
    _, little, drafting = answers

    def total(found: list[list[Json]], name: str) -> float:
        return float(sum(one.get(name, 0) for some in found[-3:] for one in some))

    assert total(little, "vllm:num_preemptions") > 0
    assert total(little, "vllm:prefix_cache_hits") > 0
    assert total(drafting, "vllm:spec_decode_num_accepted_tokens") > 0


def test_clients_leave_while_a_long_step_is_computed(
    scene: Scene, logs: Path, model: Model
) -> None:
    """The engine's process hears of it whenever it does; the others get what they would have."""
    path, folder = model("mixtral", "f32"), logs / "leaving"
    given = [long_prompt(length)[shift:] for shift in range(4) for length in LONG]
    asked = batch(given, max_tokens=8)
    leaving = [1, 4, 5, 7, 9, 10, 13, 16, 19]
    ours = engine(
        path, dtype="float32", max_num_batched_tokens=LIMIT, max_num_seqs=12,
        **hetero(
            layout=[["gpu"]], experts={"ranks": 1, "prefill_step_tokens": ROOM},
            cpu={"ranks_per_socket": 1},
        ),
    )  # fmt: skip
    (expected,) = run_engines(scene, folder, [(engine(path, dtype="float32"), [asked])])
    request, answer = folder / "left-request.json", folder / "left-answer.json"
    request.write_text(json.dumps({"engine": ours, "batch": asked | {"leaving": leaving}}))
    command = [sys.executable, str(HERE / "async_process.py"), str(request), str(answer)]
    extra = PRETENDED | {"RAY_OVERRIDE_RESOURCES": '{"GPU": 1}'}
    child = start(scene, command, folder / "left-log", extra)
    assert child.wait(2 * START_SECONDS) == 0, child.tail()
    found = json.loads(answer.read_text())
    stay = [number for number in range(len(given)) if number not in leaving]
    assert [found[number] for number in stay] == [tokens(expected[0])[number] for number in stay]
    # Some may have had all of their answer by then.
    assert [found[number] for number in leaving].count([]) > 2

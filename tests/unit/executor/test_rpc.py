"""The engine's calls have limits, and end with what is known of a rank; without ranks."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest
from fake_ranks import DONE, FAILED, Answers, rank_set

from ray_hetero.config import HeteroConfig
from ray_hetero.errors import RankError
from ray_hetero.executor.rank_set import NOBODY
from ray_hetero.executor.rpc import GuardedExecutor
from ray_hetero.worker.driver_calls import TELL_TOKENS

STEP = SimpleNamespace(total_num_scheduled_tokens=5)
CONFIG = {"warmup": {"step_timeout_s": 7}, "serving": {"step_timeout_s": 3}}


class Guarded(GuardedExecutor):
    """An executor of ranks without processes."""

    def __init__(self, *ranks: Answers, restarts: int = 0, **config: Any) -> None:
        self._config = HeteroConfig.model_validate({**CONFIG, **config})
        self._guard(restarts)
        self.set = rank_set(*ranks, on_failure=self._on_failure, on_stopped=self._on_stopped)
        self._ranks = self.set
        self.output_rank = len(ranks) - 1
        self.kv_output_aggregator = self.ec_output_aggregator = None

    @property
    def asked(self) -> list[Any]:
        requests: Any = self.set._requests
        return requests.asked

    @property
    def failed(self) -> str | None:
        return self.set.failure.report


def test_an_answer_comes_back_and_a_step_is_waited_for_within_its_limit() -> None:
    last = Answers((DONE, "tokens"))
    executor = Guarded(Answers(), last)
    assert executor.execute_model(STEP) == "tokens"
    assert executor.asked == [("execute_model", (STEP,), {}, 1)]
    assert last.waits == [pytest.approx(3, abs=1)]
    assert not executor.is_failed


def test_ranks_are_told_what_was_sampled_before_the_engine_is() -> None:
    output = SimpleNamespace(req_ids=["a", "b", "c"], sampled_token_ids=[[4], [], [6]])
    # The second step comes to nothing: its tokens are told by nobody.
    executor = Guarded(Answers(), Answers((DONE, None), (DONE, output), (FAILED, "no room")))
    executor.execute_model(STEP, non_block=True)
    first = executor.sample_tokens(None, non_block=True)
    assert TELL_TOKENS not in [asked[0] for asked in executor.asked]
    executor._tells_tokens = True
    assert first.result() is output
    assert executor.asked[2] == (TELL_TOKENS, ({"a": [4], "c": [6]},), {}, NOBODY)
    with pytest.raises(RankError):
        executor.sample_tokens(None)
    assert [asked[0] for asked in executor.asked].count(TELL_TOKENS) == 1


def test_answers_are_taken_in_the_order_of_the_calls() -> None:
    executor = Guarded(Answers((DONE, "first"), (DONE, "second"), (DONE, "third")))
    first = executor.collective_rpc("a", non_block=True)
    assert executor.collective_rpc("b") == ["second"]
    assert first.result() == ["first"]
    assert executor.collective_rpc("c") == ["third"]


def test_an_aggregator_gets_the_outputs_of_all_ranks() -> None:
    executor = Guarded(Answers((DONE, 1)), Answers((DONE, 2)))
    adding = SimpleNamespace(aggregate=lambda outputs, output_rank: (sum(outputs), output_rank))
    found = executor.collective_rpc("a", unique_reply_rank=1, ec_output_aggregator=adding)
    assert found == (3, 1)
    assert executor.asked == [("a", (), {}, None)]


def test_a_function_is_sent_to_the_ranks() -> None:
    executor = Guarded(Answers((DONE, "rank 0")))
    assert executor.collective_rpc(lambda worker, more: worker + more, args=(2,)) == ["rank 0"]
    ((sent, args, _, _),) = executor.asked
    assert cloudpickle.loads(sent)(1, *args) == 3


def test_vllms_own_limit_holds_where_ours_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "77")
    last = Answers((DONE, "tokens"))
    executor = Guarded(last, serving={})
    executor.execute_model(STEP)
    assert last.waits == [pytest.approx(77, abs=1)]


def test_a_late_step_is_a_failure_that_is_named() -> None:
    executor = Guarded(Answers(), Answers((DONE, "tokens")))
    executor.execute_model(STEP)
    future = executor.sample_tokens(None, non_block=True)
    with pytest.raises(RankError, match=r"step 1 \(sample_tokens\) was not done in 3 s \(serving"):
        future.result()
    assert "serving.step_timeout_s" in str(executor.failed)
    with pytest.raises(RankError, match=r"step 1 \(sample_tokens\)"):
        executor.execute_model(STEP)


def test_every_other_call_has_a_limit_too_but_the_callers_own_is_the_callers() -> None:
    executor = Guarded(Answers())
    with pytest.raises(TimeoutError, match=r"^check_health was not done in 10 s$"):
        executor.collective_rpc("check_health", timeout=10)
    assert not executor.is_failed
    with pytest.raises(RankError, match=r"initialize_from_config was not done in 7 s \(warmup"):
        executor.collective_rpc("initialize_from_config", args=([],))


def test_a_rank_that_answers_a_step_with_an_error_has_failed() -> None:
    executor = Guarded(Answers(), Answers((FAILED, "no such kernel")))
    executor.set.verdict = lambda: None  # type: ignore[method-assign]
    with pytest.raises(RankError, match=r"step 1 \(execute_model of 5 tokens\).*no such kernel"):
        executor.execute_model(STEP)
    assert executor.is_failed


def test_the_error_of_another_call_is_the_callers() -> None:
    executor = Guarded(Answers((FAILED, "no such adapter")))
    with pytest.raises(RuntimeError, match="no such adapter"):
        executor.collective_rpc("add_lora", args=(None,))
    assert not executor.is_failed


def test_the_cause_is_waited_for_and_is_told_in_place_of_what_followed() -> None:
    executor = Guarded(Answers((FAILED, "Connection closed by peer")))
    told = threading.Timer(0.3, executor.set.fail, ("rank 0 died",))
    told.start()
    with pytest.raises(RankError, match=r"^rank 0 died$"):
        executor.execute_model(STEP)
    told.join()


def test_vllm_is_told_once_of_a_failure() -> None:
    executor, calls = Guarded(Answers()), []
    executor.register_failure_callback(lambda: calls.append("failed"))
    executor.set.fail("rank 0 died")
    executor.set.fail("rank 1 lost its peer")
    assert calls == ["failed"]
    assert executor.verdict() == "rank 0 died"


def test_new_ranks_are_asked_for_what_the_first_were_asked_on_the_way_up() -> None:
    rank = Answers((DONE, ["kv"]), (DONE, None), (DONE, "x"), (DONE, ["kv"]), (DONE, None))
    executor = Guarded(rank)
    executor.collective_rpc("get_kv_cache_spec")
    executor.collective_rpc("initialize_from_config", args=(["blocks"],))
    executor._is_set_up = True
    executor.collective_rpc("reset_mm_cache")
    executor._set_up_again()
    assert [(asked[0], asked[1]) for asked in executor.asked] == [
        ("get_kv_cache_spec", ()),
        ("initialize_from_config", (["blocks"],)),
        ("reset_mm_cache", ()),
        ("get_kv_cache_spec", ()),
        ("initialize_from_config", (["blocks"],)),
    ]

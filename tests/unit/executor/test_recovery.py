"""What becomes of the engine's requests and caches while its ranks start again; without ranks."""

from __future__ import annotations

import queue
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RaySystemError
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.v1.engine import FT_STATUS_CALL_ID, EngineCoreRequestType
from vllm.v1.fault_tolerance import fault_tolerant_wrapper
from vllm.v1.request import RequestStatus

from ray_hetero.compat.engine import engine_core
from ray_hetero.compat.engine.engine_args import SPEC_ATTRIBUTE
from ray_hetero.errors import StartupError
from ray_hetero.executor import recovery
from ray_hetero.executor.recovery import RankRecovery

ERROR = RuntimeError("Executor failed.")
REPORT = "rank 1 died"


class Executor:
    """Ranks that have died, and come up when they have been started so many times."""

    error: Exception = StartupError("rank 0: no answer")

    def __init__(self, restarts: int, good: int = 1, report: str | None = REPORT) -> None:
        self.restarts_left, self._good, self._report = restarts, good, report

    def verdict(self) -> str | None:
        return self._report

    def restart(self) -> None:
        self.restarts_left -= 1
        self._good -= 1
        if self._good:
            raise self.error


class Scheduler:
    """One request; caches that can be emptied."""

    def __init__(self) -> None:
        self.requests, self.emptied = [_request("running")], list[str]()

    def finish_requests(self, ids: None, status: RequestStatus) -> list[Any]:
        assert ids is None
        assert status is RequestStatus.FINISHED_ERROR
        ended, self.requests = self.requests, []
        return ended

    def reset_prefix_cache(self) -> bool:
        self.emptied.append("prefix")
        return not self.requests

    def reset_encoder_cache(self) -> None:
        self.emptied.append("encoder")


class Engine:
    """What the sentinel needs of vLLM's EngineCoreProc."""

    engine_index = 0

    def __init__(self, executor: Executor, args: type[EngineArgs]) -> None:
        spec = SimpleNamespace(engine_args=args.__new__(args))
        self.vllm_config = SimpleNamespace(**{SPEC_ATTRIBUTE: spec})
        self.model_executor, self.scheduler = executor, Scheduler()
        self.addresses = SimpleNamespace(outputs=["api server 0", "api server 1"])
        self.input_queue: queue.Queue[Any] = queue.Queue()
        self.output_queue: queue.Queue[Any] = queue.Queue()
        self.batch_queue: list[str] = ["a batch on its way"]
        self.errors: list[tuple[list[str], int]] = []
        self.is_running: Callable[[], bool] = lambda: True

    def _send_error_outputs_to_client(self, ids: list[str], client: int) -> None:
        self.errors.append((ids, client))

    def statuses(self, client: int) -> list[dict[str, Any]]:
        sent = [self.output_queue.get_nowait() for _ in range(self.output_queue.qsize())]
        assert all(o.utility_output.call_id == FT_STATUS_CALL_ID for _, o in sent)
        return [o.utility_output.result.result for index, o in sent if index == client]


def _request(name: str, client: int = 0) -> Any:
    return SimpleNamespace(request_id=name, client_index=client)


def _recover(
    executor: Executor,
    args: type[EngineArgs] = AsyncEngineArgs,
    is_running: Callable[[], bool] = lambda: True,
) -> Engine:
    engine = Engine(executor, args)
    engine.is_running = is_running
    for entry in (
        (EngineCoreRequestType.ADD, (_request("queued", client=1), 0)),
        (EngineCoreRequestType.ABORT, ["running"]),
        (EngineCoreRequestType.EXECUTOR_FAILED, b""),
    ):
        engine.input_queue.put(entry)
    limits = SimpleNamespace(engine_recovery_timeout_sec=1)
    RankRecovery(engine, SimpleNamespace(fault_tolerance_config=limits)).on_fault(ERROR)
    return engine


@pytest.fixture(autouse=True)
def exit_reason(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    left: list[str] = []
    monkeypatch.setattr(recovery.exit_reason, "leave", left.append)
    return left


class Clock:
    """Time that passes while somebody sleeps."""

    now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def monotonic(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("time.sleep", made.sleep)
    monkeypatch.setattr("time.monotonic", made.monotonic)
    return made


def test_all_requests_end_and_nothing_of_the_old_ranks_is_believed(exit_reason: list[str]) -> None:
    engine = _recover(Executor(restarts=2))
    assert sorted(engine.errors) == [(["queued"], 1), (["running"], 0)]
    assert engine.scheduler.emptied == ["prefix", "encoder"]
    assert engine.batch_queue == []
    # Only what has nothing to do with the ranks is still to be done.
    assert [kind for kind, _ in engine.input_queue.queue] == [EngineCoreRequestType.ABORT]
    assert exit_reason == []


def test_every_api_server_hears_what_is_wrong_and_when_it_is_over() -> None:
    for client in (0, 1):
        unhealthy, healthy = _recover(Executor(restarts=2)).statuses(client)
        assert unhealthy["status"] == "unhealthy"
        # Clients learn what they can do, and nothing of nodes, processes and exceptions.
        assert "retry" in unhealthy["fault_info"]
        assert REPORT not in unhealthy["fault_info"]
        assert healthy == {"id": 0, "status": "healthy"}


def test_an_offline_engine_is_not_sent_what_it_does_not_understand() -> None:
    assert _recover(Executor(restarts=2), EngineArgs).output_queue.empty()


def test_a_start_that_fails_is_tried_again_while_restarts_are_left(exit_reason: list[str]) -> None:
    executor = Executor(restarts=5, good=3)
    assert len(_recover(executor).statuses(0)) == 4
    assert executor.restarts_left == 2
    with pytest.raises(RuntimeError, match="Executor failed"):
        _recover(Executor(restarts=2, good=3))
    assert exit_reason == ["the ranks do not start again: rank 0: no answer"]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            RuntimeError("rank 1 (cpu) failed with: no"),
            "RuntimeError('rank 1 (cpu) failed with: no')",
        ),
        (OSError(28, "No space left on device"), "OSError(28, 'No space left on device')"),
        (TimeoutError("late"), "TimeoutError('late')"),
        (RaySystemError(ConnectionError("gone")), "RaySystemError"),
    ],
)
def test_whatever_a_start_fails_with_it_is_tried_again_and_told(
    error: Exception, said: str, exit_reason: list[str]
) -> None:
    executor = Executor(restarts=3, good=2)
    executor.error = error
    _recover(executor)
    assert (executor.restarts_left, exit_reason) == (1, [])
    executor = Executor(restarts=2, good=3)
    executor.error = error
    with pytest.raises(RuntimeError, match="Executor failed"):
        _recover(executor)
    assert executor.restarts_left == 0
    assert exit_reason[0].startswith("the ranks do not start again: ")
    assert said in exit_reason[0]


class FullDisk(Executor):
    """Ranks that do not come up as long as a disk is full."""

    def __init__(self, restarts: int, clock: Clock, full_s: float) -> None:
        super().__init__(restarts)
        self._clock, self._full_s, self.tries = clock, full_s, list[float]()

    def restart(self) -> None:
        self.restarts_left -= 1
        self.tries.append(round(self._clock.now))
        if self._clock.now < self._full_s:
            raise OSError(28, "No space left on device")


def test_a_disk_that_is_full_for_a_while_does_not_spend_all_restarts(clock: Clock) -> None:
    executor = FullDisk(20, clock, full_s=100)
    _recover(executor)
    assert executor.tries == [0, 1, 3, 7, 15, 30, 60, 90, 120]


def test_an_engine_that_is_to_end_waits_for_no_further_try(
    clock: Clock, exit_reason: list[str]
) -> None:
    executor = FullDisk(20, clock, full_s=100)
    with pytest.raises(SystemExit):
        _recover(executor, is_running=lambda: clock.now < 10)
    assert executor.tries == [0, 1, 3, 7]
    assert 10 <= clock.now < 11
    # What ends it is not what the ranks failed with.
    assert exit_reason == []


def test_without_restarts_and_for_errors_of_others_the_engine_ends(exit_reason: list[str]) -> None:
    with pytest.raises(RuntimeError, match="Executor failed"):
        _recover(Executor(restarts=0))
    assert exit_reason == [REPORT]
    with pytest.raises(RuntimeError, match="Executor failed"):
        _recover(Executor(restarts=2, report=None))


def test_vllms_loop_asks_and_goes_on() -> None:
    executor = Executor(restarts=1)
    engine = Engine(executor, AsyncEngineArgs)
    limits = SimpleNamespace(engine_recovery_timeout_sec=1)
    engine.ft_sentinel = RankRecovery(engine, SimpleNamespace(fault_tolerance_config=limits))
    engine.enable_fault_tolerance = True
    rounds: list[int] = []

    @fault_tolerant_wrapper
    def loop(engine: Engine) -> None:
        rounds.append(executor.restarts_left)
        if len(rounds) == 2:
            raise SystemExit
        raise ERROR

    with pytest.raises(SystemExit):
        loop(engine)
    assert rounds == [1, 0]


QUEUES = ("coordinator_input", "coordinator_output", "frontend_stats_publish_address")
ADDRESSES = nullcontext(SimpleNamespace(inputs=[], outputs=[], **dict.fromkeys(QUEUES)))


class BegunError(Exception):
    """The engine has come to the threads behind its sentinel."""


def test_vllms_engine_makes_the_sentinel_that_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own constructor, without a model and without the threads behind the sentinel."""
    from vllm.v1.engine import core

    def stop(*args: Any, **kwargs: Any) -> None:
        raise BegunError

    monkeypatch.setattr(core, "EngineCoreSentinel", core.EngineCoreSentinel)
    config: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(
            enable_fault_tolerance=False,
            fault_tolerance_config=SimpleNamespace(engine_recovery_timeout_sec=1),
        )
    )
    engine_core.ask_when_a_step_fails(config, RankRecovery)
    assert core.EngineCoreSentinel is RankRecovery
    assert config.parallel_config.enable_fault_tolerance
    monkeypatch.setattr(core.EngineCore, "__init__", lambda *args: None)
    monkeypatch.setattr(core.EngineCoreProc, "_init_data_parallel", lambda *args: None)
    monkeypatch.setattr(core.EngineCoreProc, "_perform_handshakes", lambda *args: ADDRESSES)
    monkeypatch.setattr(core.threading, "Thread", stop)
    made = core.EngineCoreProc.__new__(core.EngineCoreProc)
    with pytest.raises(BegunError):
        made.__init__(config, True, "", type(None), False)  # type: ignore[misc]
    assert isinstance(made.ft_sentinel, RankRecovery)

"""Requests that reach an idle engine together begin in one step, in vLLM's own loop."""

from __future__ import annotations

import math
import queue
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine import EngineCoreRequestType, core
from worlds import layout, node

from placement.cluster.assignment import assign
from ray_hetero.compat.engine import engine_core
from ray_hetero.compat.engine.engine_core import MOST_S, QUIET_S, SEVERAL_QUIET_S
from ray_hetero.config import HeteroConfig
from ray_hetero.executor import hetero_executor
from ray_hetero.executor.hetero_executor import HeteroExecutor
from ray_hetero.planning.rank_devices import reads_over_link
from ray_hetero.world import World

STEP_TOKENS = 1000
GAP_S = 0.0002
ADD, ABORT, UTILITY = (
    EngineCoreRequestType.ADD,
    EngineCoreRequestType.ABORT,
    EngineCoreRequestType.UTILITY,
)


class ScriptedQueue(queue.Queue[Any]):
    """A queue whose messages arrive by a clock that only its waits move; it notes their limits.

    A machine that does something else meanwhile can therefore delay nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.arrivals: list[tuple[float, Any]] = []
        self.limits: list[float] = []

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        self.arrivals.append((self.now, item))

    def empty(self) -> bool:
        return not self.arrivals or self.arrivals[0][0] > self.now

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        if timeout is not None:
            self.limits.append(timeout)
        end = self.now + timeout if timeout is not None else math.inf if block else self.now
        if not self.arrivals or self.arrivals[0][0] > end:
            assert end < math.inf, "a wait without an end"
            self.now = end
            raise queue.Empty
        at, item = self.arrivals.pop(0)
        self.now = max(self.now, at)
        return item


class Scheduler:
    """What an engine's loop needs of one."""

    max_num_scheduled_tokens = STEP_TOKENS
    max_num_running_reqs = 1000

    def __init__(self) -> None:
        self.requests: list[Any] = []

    @property
    def waiting(self) -> Iterator[Any]:
        """Requests, of one token each unless they have a number of their own."""
        for request in self.requests:
            yield SimpleNamespace(num_tokens=getattr(request, "num_tokens", 1))

    def has_requests(self) -> bool:
        return bool(self.requests)

    has_unfinished_requests = has_requests


def engine_of(config: Any) -> Any:
    """vLLM's engine up to its first step."""
    engine = core.EngineCoreProc.__new__(core.EngineCoreProc)
    engine.vllm_config, engine.scheduler, engine.batch_queue = config, Scheduler(), None
    engine.input_queue, engine.aborts_queue = ScriptedQueue(), queue.Queue()
    engine.engines_running, engine.process_input_queue_block = False, True
    engine.shutdown_state = core.EngineShutdownState.RUNNING
    engine._idle_state_callbacks = []
    engine.reject_new_requests = False
    engine.add_request = lambda request, wave: engine.scheduler.requests.append(request)
    return engine


def send(engine: Any, messages: Sequence[Any], gap_s: float = GAP_S) -> None:
    """Let messages arrive in an engine's queue, one after another."""
    begin = engine.input_queue.now
    engine.input_queue.arrivals += [
        (begin + number * gap_s, message) for number, message in enumerate(messages)
    ]


def added(*requests: Any) -> list[Any]:
    return [(ADD, (request, 0)) for request in requests]


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Of an engine whose arrivals are gathered."""
    name = "_process_input_queue"
    monkeypatch.setattr(core.EngineCoreProc, name, core.EngineCoreProc._process_input_queue)
    given = SimpleNamespace()
    for one in (SimpleNamespace(), given):
        engine_core.gather_arrivals(one)
    return given


@pytest.fixture
def engine(config: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An idle engine whose clock is that of its queue."""
    made = engine_of(config)
    clock = SimpleNamespace(monotonic=lambda: made.input_queue.now)
    monkeypatch.setattr(engine_core, "time", clock)
    return made


def test_requests_that_come_one_after_another_begin_together(engine: Any) -> None:
    send(engine, added(*range(8)))
    engine._process_input_queue()
    assert len(engine.scheduler.requests) == 8


def test_several_requests_wait_for_a_client_that_pauses(engine: Any) -> None:
    send(engine, added(1, 2), gap_s=0)
    engine.input_queue.arrivals.append((2 * QUIET_S, *added(3)))
    engine._process_input_queue()
    assert len(engine.scheduler.requests) == 3


def test_an_engine_of_others_takes_what_is_there(config: Any) -> None:
    for engine in (engine_of(SimpleNamespace()), engine_of(config)):
        for message in added(1, 2):
            engine.input_queue.put(message)
        engine._process_input_queue()
        assert engine.scheduler.requests == [1, 2]
        assert engine.input_queue.limits == [SEVERAL_QUIET_S] * (engine.vllm_config is config)


@pytest.mark.parametrize(
    ("requests", "expected", "taken"), [(1, QUIET_S, 1), (200, MOST_S, MOST_S / GAP_S)]
)
def test_one_request_waits_a_millisecond_and_no_stream_of_them_longer_than_twenty(
    requests: int, expected: float, taken: float, engine: Any
) -> None:
    assert (QUIET_S, SEVERAL_QUIET_S, MOST_S) == (0.001, 0.003, 0.02)
    send(engine, added(*range(requests)))
    engine._process_input_queue()
    assert engine.input_queue.now == pytest.approx(expected)
    assert len(engine.scheduler.requests) == pytest.approx(taken, abs=1)


@pytest.mark.parametrize("tokens", [[STEP_TOKENS], [STEP_TOKENS + 1], [600, 400]], ids=str)
def test_prompts_that_fill_a_step_do_not_wait(config: Any, tokens: list[int]) -> None:
    engine = engine_of(config)
    for count in (*tokens, 1):
        engine.input_queue.put(*added(SimpleNamespace(num_tokens=count)))
    engine._process_input_queue()
    assert len(engine.scheduler.requests) == len(tokens) + 1
    assert engine.input_queue.limits == []


def test_prompts_that_leave_room_wait_for_others(config: Any) -> None:
    engine = engine_of(config)
    engine.input_queue.put(*added(SimpleNamespace(num_tokens=STEP_TOKENS - 1)))
    engine._process_input_queue()
    assert engine.input_queue.limits == [QUIET_S]


def test_long_steps_wait_for_what_they_have_room_for(config: Any) -> None:
    """While no request decodes a step has more tokens than beside those that do."""
    engine = engine_of(config)
    engine.scheduler.idle_step_tokens = 4 * STEP_TOKENS
    send(engine, added(*(SimpleNamespace(num_tokens=STEP_TOKENS) for _ in range(5))))
    engine._process_input_queue()
    assert len(engine.scheduler.requests) == 4
    assert len(engine.input_queue.arrivals) == 1


def test_no_more_are_waited_for_than_run_at_once(config: Any) -> None:
    engine = engine_of(config)
    engine.scheduler.max_num_running_reqs = 2
    send(engine, added(*range(3)))
    engine._process_input_queue()
    assert len(engine.scheduler.requests) == 2


@pytest.mark.parametrize("gap_s", [0.0, GAP_S, 2.5 * SEVERAL_QUIET_S, MOST_S])
def test_no_arrival_is_missed(gap_s: float, engine: Any) -> None:
    """Requests behind the limit stay in the queue, and are there before the next step."""
    send(engine, added(*range(60)), gap_s)
    begun: list[int] = []
    while engine.input_queue.arrivals:
        engine._process_input_queue()
        assert len(engine.scheduler.requests) > 0
        # A step, in which others may come.
        begun += engine.scheduler.requests
        engine.scheduler.requests = []
        engine.input_queue.now += 0.05
    assert begun == list(range(60))


@pytest.mark.parametrize("busy", ["request", "batch", "other engines"])
def test_an_engine_that_computes_does_not_wait(config: Any, busy: str) -> None:
    engine = engine_of(config)
    if busy == "request":
        engine.scheduler.requests.append("running")
    elif busy == "batch":
        engine.batch_queue = ["a batch on its way"]
    else:
        engine.engines_running = True
    engine.input_queue.put(*added("new"))
    engine._process_input_queue()
    assert engine.scheduler.requests[-1] == "new"
    assert engine.input_queue.limits == []


def test_what_else_clients_send_is_done_at_once(engine: Any) -> None:
    done: dict[str, float] = {}
    engine.abort_requests = lambda ids: done.update(abort=engine.input_queue.now)
    engine.called = lambda: done.update(utility=engine.input_queue.now)
    engine.output_queue = queue.Queue()
    send(engine, [*added(1), (ABORT, ["one"]), (UTILITY, (0, 1, "called", ()))])
    engine._process_input_queue()
    assert done == {"abort": GAP_S, "utility": 2 * GAP_S}


def test_a_shutdown_ends_the_wait(config: Any) -> None:
    engine = engine_of(config)

    def shut_down(ids: Any) -> None:
        engine.shutdown_state = core.EngineShutdownState.REQUESTED

    engine.abort_requests = shut_down
    for message in (*added(1), (ABORT, [])):
        engine.input_queue.put(message)
    engine._process_input_queue()
    assert engine.input_queue.empty()
    assert engine.input_queue.limits == []


def test_an_executor_that_fails_meanwhile_is_an_error_at_once(config: Any) -> None:
    engine = engine_of(config)
    send(engine, [*added(1), (EngineCoreRequestType.EXECUTOR_FAILED, b"")], gap_s=0)
    with pytest.raises(RuntimeError, match=r"Executor failed\."):
        engine._process_input_queue()


@pytest.mark.parametrize("is_over_link", [True, False])
def test_the_executor_asks_for_it_where_the_plan_says_so(
    is_over_link: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def claim(executor: Any) -> None:
        executor._planned = SimpleNamespace(reads_over_link=is_over_link)

    asked: list[Any] = []
    monkeypatch.setattr(engine_core, "gather_arrivals", asked.append)
    monkeypatch.setattr(hetero_executor, "end_with_parent", lambda stop: None)
    for name, step in (("_begin", lambda self: None), ("_claim_devices", claim),
                       ("_connect", lambda self, ranks: None)):  # fmt: skip
        monkeypatch.setattr(HeteroExecutor, name, step)
    executor = HeteroExecutor.__new__(HeteroExecutor)
    executor.vllm_config = SimpleNamespace()
    executor._init_executor()
    assert asked == [executor.vllm_config] * is_over_link


@pytest.mark.parametrize(
    ("stages", "experts", "cpu", "expected"),
    [
        (("c", "g"), 0, {}, True),
        (("cc", "g"), 0, {}, True),
        (("c", "g"), 0, {"prefill_on_gpu": False}, False),
        (("c", "g"), 0, {"linear_kernel": "vllm"}, False),
        (("g", "g"), 0, {}, False),
        (("c", "c"), 0, {}, False),
        (("g",), 1, {}, True),
    ],
)
def test_engines_whose_steps_read_weights_over_a_link(
    stages: tuple[str, ...], experts: int, cpu: dict[str, Any], expected: bool
) -> None:
    shape = layout(*stages)
    there = node(sockets=shape.count("cpu") + experts, gpus=shape.count("gpu"), is_driver=True)
    seats = assign(shape, [there])
    beside = assign(layout("c" * experts), [there]) if experts else ()
    world = World(shape, seats, (2,) * len(stages), beside)
    config = HeteroConfig.model_validate({"cpu": {"linear_kernel": "streaming", **cpu}})
    assert reads_over_link(config, world, [there], is_bf16=True) is expected
    assert not reads_over_link(config, world, [there], is_bf16=False)
    off = {"cpu": {"linear_kernel": "streaming", "prefill_on_gpu": False},
           "experts": {"prefill_on_gpu": False}}  # fmt: skip
    assert not reads_over_link(HeteroConfig.model_validate(off), world, [there], is_bf16=True)

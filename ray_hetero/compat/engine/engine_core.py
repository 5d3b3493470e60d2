"""vLLM's engine process: which requests begin together, what its loop asks when a step raises, and
what it keeps meanwhile.
"""

from __future__ import annotations

import queue
import time
from collections import defaultdict
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

from ray_hetero.compat.patching import original, replace

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.engine import EngineCoreRequestType
    from vllm.v1.engine.core import EngineCoreProc


QUIET_S = 0.001
"""Seconds without a message after which an idle engine begins with a request that came alone."""
SEVERAL_QUIET_S = 0.003
"""The same where several have come: their client is a process that may not get on for a moment.
With the shorter one, two of five times 32 requests did not begin in one step, on a machine whose
cores had engines that waited."""
MOST_S = 0.02
"""Longest wait of a request for others, however many come.  A client hands in some six requests a
millisecond, and another step for those that come later reads the weights again for 100 ms."""


def gather_arrivals(vllm_config: VllmConfig) -> None:
    """In the engine's process: let requests that reach an idle engine together begin in one step.

    While no request is running, the first one to come waits until none has come for a millisecond,
    or for three where there are several, or until there are as many tokens as a step takes.
    Whatever else a client sends is done at once.

    Replaces: `EngineCoreProc._process_input_queue`.
    Uses: `EngineCoreProc._handle_client_request`, `EngineCoreProc.input_queue`,
    `EngineCoreProc.is_running`, `EngineCoreProc.engines_running`, `EngineCore.batch_queue`,
    `Scheduler.has_unfinished_requests`, `Scheduler.waiting`, `Scheduler.max_num_scheduled_tokens`,
    `Scheduler.max_num_running_reqs`, `Request.num_tokens`.
    Why: an idle engine schedules the first request by itself, and those that come a moment later
    wait for its step. Where that step reads the weights over a GPU's link, it takes about as long
    for one request as for all of them.
    Can go when: an idle engine can be told to wait for more requests before its first step.
    """
    from vllm.v1.engine.core import EngineCoreProc

    def make(stock: Callable[[EngineCoreProc], None]) -> Callable[[EngineCoreProc], None]:
        @wraps(stock)
        def process_input_queue(engine: EngineCoreProc) -> None:
            # A process that is forked off with this patch in it may be that of another engine.
            was_idle = engine.vllm_config is vllm_config and not _computes(engine)
            stock(engine)
            if was_idle and engine.scheduler.has_unfinished_requests():
                _take_what_comes(engine)

        return process_input_queue

    replace(EngineCoreProc, "_process_input_queue", make)


def _computes(engine: EngineCoreProc) -> bool:
    """Whether requests are running, of this engine or of those that it keeps step with."""
    return bool(
        engine.engines_running or engine.batch_queue or engine.scheduler.has_unfinished_requests()
    )


def _take_what_comes(engine: EngineCoreProc) -> None:
    """Do what clients send, until enough is there or nothing more comes.

    No arrival is missed: a message that is taken is done, as vLLM's own loop does it, and what
    comes behind the limit stays in the queue, which vLLM's loop empties before each step.  An
    engine is slowed by a millisecond for a request that comes alone, and by `MOST_S` at most, once
    for all that come while it is idle: one that computes never gets here.
    """
    end, scheduler = time.monotonic() + MOST_S, engine.scheduler
    # A step without requests that decode may be longer than others, see long_prompts.py.
    most = getattr(scheduler, "idle_step_tokens", scheduler.max_num_scheduled_tokens)
    while engine.is_running() and (left := end - time.monotonic()) > 0:
        tokens = [request.num_tokens for request in scheduler.waiting]
        if sum(tokens) >= most or len(tokens) >= scheduler.max_num_running_reqs:
            return  # more would not begin in the next step
        try:
            quiet_s = QUIET_S if len(tokens) < 2 else SEVERAL_QUIET_S
            message = engine.input_queue.get(timeout=min(quiet_s, left))
        except queue.Empty:
            return
        engine._handle_client_request(*message)


def tell_of_steps(
    vllm_config: VllmConfig, begin: Callable[[], object], end: Callable[[], object]
) -> None:
    """In the engine's process: call two functions around each step of its loop.

    Replaces: `EngineCoreProc._process_engine_step`.
    Why: nobody outside can tell a loop that hangs in a step from one that waits for requests.
    Can go when: vLLM's engine tells its clients what its loop does.
    """
    from vllm.v1.engine.core import EngineCoreProc

    def make(stock: Callable[[EngineCoreProc], bool]) -> Callable[[EngineCoreProc], bool]:
        @wraps(stock)
        def process_engine_step(engine: EngineCoreProc) -> bool:
            # A process that is forked off with this patch in it may be that of another engine.
            if engine.vllm_config is not vllm_config:
                return stock(engine)
            begin()
            try:
                return stock(engine)
            finally:
                end()

        return process_engine_step

    replace(EngineCoreProc, "_process_engine_step", make)


def ask_when_a_step_fails(vllm_config: VllmConfig, sentinel: type) -> None:
    """In the engine's process: let its loop ask our sentinel what to do about an error.

    Replaces: `EngineCoreSentinel` in `vllm.v1.engine.core`.
    Uses: `EngineCoreProc.enable_fault_tolerance`, `EngineCoreProc.ft_sentinel`.
    Why: fault_tolerant_wrapper asks one, but only under --enable-fault-tolerance, which is for
    data parallelism behind an external load balancer; and vLLM's own gives up once an executor
    has failed.
    Can go when: an executor can bring its own sentinel.
    """
    from vllm.v1.engine import core

    original(core, "EngineCoreSentinel")
    core.EngineCoreSentinel = sentinel
    original(vllm_config.parallel_config, "enable_fault_tolerance")
    vllm_config.parallel_config.enable_fault_tolerance = True


def end_all_requests(engine: EngineCoreProc) -> None:
    """End all requests that an engine knows of with an error, those too that wait in its queue.

    Uses: `Scheduler.finish_requests`, `EngineCoreProc.input_queue`,
    `EngineCoreProc._send_error_outputs_to_client`.
    """
    from vllm.v1.engine import EngineCoreRequestType
    from vllm.v1.request import RequestStatus

    ended = engine.scheduler.finish_requests(None, RequestStatus.FINISHED_ERROR)
    by_client = defaultdict(list)
    for request in [*ended, *(added for added, _ in _take(engine, EngineCoreRequestType.ADD))]:
        by_client[request.client_index].append(request.request_id)
    for client, requests in by_client.items():
        engine._send_error_outputs_to_client(requests, client)


def forget_ranks(engine: EngineCoreProc) -> None:
    """Drop what was true of an engine's old ranks only: batches on their way, cached prefixes.

    Uses: `EngineCoreProc.input_queue`, `EngineCore.batch_queue`, `Scheduler.reset_prefix_cache`,
    `Scheduler.reset_encoder_cache`.
    """
    from vllm.v1.engine import EngineCoreRequestType

    _take(engine, EngineCoreRequestType.EXECUTOR_FAILED)
    if engine.batch_queue is not None:
        engine.batch_queue.clear()
    was_emptied = engine.scheduler.reset_prefix_cache()
    assert was_emptied, "a request still holds blocks of the old ranks' KV cache"
    engine.scheduler.reset_encoder_cache()


def tell_api_servers(engine: EngineCoreProc, content: dict[str, Any]) -> None:
    """Push an engine's status to all of its API servers.

    Uses: `EngineCoreProc.addresses`, `EngineCoreProc.output_queue`.
    """
    from vllm.v1.engine import FT_STATUS_CALL_ID, EngineCoreOutputs, UtilityOutput
    from vllm.v1.serial_utils import UtilityResult

    message = UtilityOutput(FT_STATUS_CALL_ID, result=UtilityResult(content))
    for client in range(len(engine.addresses.outputs)):
        outputs = EngineCoreOutputs(utility_output=message, engine_index=content["id"])
        engine.output_queue.put_nowait((client, outputs))


def _take(engine: EngineCoreProc, wanted: EngineCoreRequestType) -> list[Any]:
    """Take the contents of all messages of a kind out of an engine's queue."""
    taken, others = [], []
    while not engine.input_queue.empty():
        kind, content = engine.input_queue.get_nowait()
        if kind == wanted:
            taken.append(content)
        else:
            others.append((kind, content))
    for entry in others:
        engine.input_queue.put_nowait(entry)
    return taken

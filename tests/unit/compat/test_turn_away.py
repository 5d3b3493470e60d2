"""An API server answers 503 while its engine is not healthy, and only then."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.entrypoints.generate.base.serving import GenerateBaseServing
from vllm.exceptions import GenerationError, GracefulHTTPError, RetryableRequestError
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from ray_hetero.compat.engine import api_server

FAULT = {0: {"id": 0, "status": "unhealthy", "fault_info": "rank 1 died"}}
WELL = ({}, {0: {"id": 0, "status": "healthy"}})


@pytest.fixture(autouse=True)
def _patched(monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name in (
        (AsyncLLM, "check_admission"),
        (AsyncLLM, "check_health"),
        (GenerateBaseServing, "_raise_if_error"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    api_server.turn_away_while_unhealthy(lambda vllm_config: vllm_config.late)


class Engine(AsyncLLM):
    """What these three methods need of an engine."""

    errored = False

    def __init__(self, statuses: dict[int, Any], late: str | None = None) -> None:
        self.engine_core = SimpleNamespace(_engine_status=statuses)
        nothing = {"max_num_queued_reqs": None, "max_num_queued_tokens": None}
        limits = SimpleNamespace(**nothing)
        self.vllm_config: Any = SimpleNamespace(scheduler_config=limits, late=late)
        self.scheduler_config = self.vllm_config.scheduler_config

    def __del__(self) -> None:
        pass


def _serving(engine: Engine) -> GenerateBaseServing:
    serving = GenerateBaseServing.__new__(GenerateBaseServing)
    serving.engine_client = engine
    return serving


def test_an_unhealthy_engine() -> None:
    engine = Engine(FAULT)
    with pytest.raises(GracefulHTTPError, match="rank 1 died") as refused:
        engine.check_admission()
    assert refused.value.http_status == 503
    with pytest.raises(EngineDeadError):
        asyncio.run(engine.check_health())
    with pytest.raises(RetryableRequestError, match="rank 1 died"):
        _serving(engine)._raise_if_error("error", "request")
    _serving(engine)._raise_if_error("stop", "request")


def test_an_engine_that_does_not_go_on() -> None:
    engine = Engine({}, "the engine's process has not moved for 31 s")
    with pytest.raises(GracefulHTTPError, match="has not moved for 31 s") as refused:
        engine.check_admission()
    assert refused.value.http_status == 503
    with pytest.raises(EngineDeadError):
        asyncio.run(engine.check_health())


@pytest.mark.parametrize("statuses", WELL)
def test_a_healthy_engine(statuses: dict[int, Any]) -> None:
    engine = Engine(statuses)
    engine.check_admission()
    asyncio.run(engine.check_health())
    with pytest.raises(GenerationError, match="Internal server error"):
        _serving(engine)._raise_if_error("error", "request")

"""vLLM's API server: requests while the engine's ranks start again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ray_hetero.compat.patching import original


def turn_away_while_unhealthy(late: Callable[[Any], str | None]) -> None:
    """In the API server: answer 503 while the engine says that it is not healthy, or says nothing.

    Replaces: `AsyncLLM.check_admission`, `AsyncLLM.check_health`,
    `GenerateBaseServing._raise_if_error`.
    Uses: `AsyncMPClient._engine_status`.
    Why: AsyncLLM keeps the status that an engine's sentinel pushes, and shows it on
    /fault_tolerance/status only; requests would wait, and those in flight end as internal errors.
    And an engine process that is stopped or hangs is healthy to it for ever.
    Can go when: check_admission and check_health look at the status, and notice a stopped engine.

    Args:
        late: tells, of the configuration of an engine, what is wrong with one that does not go on.

    """
    from http import HTTPStatus

    from vllm.entrypoints.generate.base.serving import GenerateBaseServing
    from vllm.exceptions import GracefulHTTPError, RetryableRequestError
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.exceptions import EngineDeadError

    admit = original(AsyncLLM, "check_admission")
    check = original(AsyncLLM, "check_health")
    raise_if_error = original(GenerateBaseServing, "_raise_if_error")
    if hasattr(admit, "__ray_hetero__"):
        return

    @functools.wraps(admit)
    def check_admission(self: Any, *args: Any, **kwargs: Any) -> None:
        if fault := _fault_of(self) or late(self.vllm_config):
            raise GracefulHTTPError(fault, HTTPStatus.SERVICE_UNAVAILABLE)
        admit(self, *args, **kwargs)

    @functools.wraps(check)
    async def check_health(self: Any) -> None:
        if _fault_of(self) or late(self.vllm_config):
            # What /health turns into a 503.
            raise EngineDeadError
        await check(self)

    @functools.wraps(raise_if_error)
    def _raise_if_error(self: Any, finish_reason: str | None, request_id: str) -> None:
        if finish_reason == "error" and (fault := _fault_of(self.engine_client)):
            raise RetryableRequestError(fault)
        raise_if_error(self, finish_reason, request_id)

    check_admission.__ray_hetero__ = True  # type: ignore[attr-defined]
    AsyncLLM.check_admission = check_admission
    AsyncLLM.check_health = check_health
    GenerateBaseServing._raise_if_error = _raise_if_error


def _fault_of(engine: Any) -> str | None:
    """The fault that the engine has reported."""
    statuses: dict[int, dict[str, str]] = getattr(engine.engine_core, "_engine_status", {})
    return next((s["fault_info"] for s in statuses.values() if "fault_info" in s), None)

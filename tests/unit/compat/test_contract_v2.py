"""Forms of kernels for vLLM's V2 model runner take what vLLM gives to Triton's."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
from vllm.v1.worker.cpu.model_runner import CPUModelRunner
from vllm.v1.worker.gpu.pp_utils import PPHandler

from ray_hetero.compat.worker import v2_kernels, v2_runner
from ray_hetero.compat.worker.v2_runner import DriverTokens

CHANGED = {"gather_block_tables", "post_update"} if v2_runner.other_release() else set()
"""Functions that take more in the installed release, with which the runner is refused."""


def _parameters(function: Callable[..., Any]) -> list[tuple[str, object]]:
    return [
        (one.name, one.default is inspect.Parameter.empty)
        for one in inspect.signature(function).parameters.values()
    ]


@pytest.mark.parametrize(
    ("owner", "name", "form"),
    [pytest.param(*one, id=f"{one[0].__name__}.{one[1]}") for one in v2_kernels.forms()],
)
def test_forms_of_kernels_take_the_same(owner: Any, name: str, form: Callable[..., Any]) -> None:
    ours, stock = _parameters(form), _parameters(getattr(owner, name))
    if name not in CHANGED:
        assert ours == stock
        return
    # Forms of these are to be written before the runner is there with this release.
    assert len(ours) < len(stock)
    assert ours == stock[: len(ours)]


def test_tokens_of_the_driver_stand_for_the_handler_of_pipelines() -> None:
    own = {name for name in vars(DriverTokens) if not name.startswith("_")}
    methods = {name for name, _ in inspect.getmembers(PPHandler, inspect.isfunction)}
    assert {name for name in methods if name[0] != "_"} == own - {"attach", "begin_step"}
    if v2_runner.other_release():
        assert "recv_drafts" in inspect.signature(PPHandler.receive).parameters
        return
    for name in methods:
        if not hasattr(DriverTokens, name):
            continue
        ours = [one for one, _ in _parameters(getattr(DriverTokens, name))]
        stock = [one for one, _ in _parameters(getattr(PPHandler, name))]
        assert len(ours) == len(stock)


def test_the_runner_for_cpus_warms_up() -> None:
    assert hasattr(CPUModelRunner, "warming_up_model")
    asked = inspect.signature(CPUModelRunner._dummy_run).parameters
    assert {"skip_attn", "is_profile"} <= asked.keys()

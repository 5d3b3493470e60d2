"""After an engine of ray_hetero a process makes vLLM's own engines as if there had been none."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import pytest
from engines import HERE, START_SECONDS, Model, start
from leftovers import Scene

VLLMS_OWN = "multiproc_executor.py"
"""Of the executor of vLLM's own engine, in its traceback."""

pytestmark = pytest.mark.timeout(1200)


def test_a_stock_engine_gets_the_runner_that_it_would_have_had(
    scene: Scene, logs: Path, model: Model, tmp_path: Path
) -> None:
    answer = tmp_path / "answer.json"
    command = [sys.executable, str(HERE / "two_backends_process.py"), str(model("llama"))]
    for attempt in range(2):
        child = start(
            scene,
            [*command, str(answer)],
            logs / f"two_backends_{attempt}",
            {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"},
        )
        if child.wait(2 * START_SECONDS) == 0:
            break
        # A worker of vLLM's own engine once did not start on a busy machine.
        assert attempt == 0, child.tail()
        assert VLLMS_OWN in child.log, child.tail()
        warnings.warn(child.tail(), stacklevel=1)
    found = json.loads(answer.read_text())
    ours, stock = found["ours"], found["stock"]
    assert set(ours["runners"]) == {"CPUModelRunner"}
    assert ours["chosen"]["executor"] == "HeteroExecutor"
    before, after = found["would_be"]
    assert before == after
    # Where there is Triton, that is the second runner.
    assert (before["v2_with_triton"], stock["chosen"]["v2_with_triton"]) == (True, True)
    same = {"v2", "executor", "worker", "scheduler"}
    assert {key: stock["chosen"][key] for key in same} == {key: before[key] for key in same}
    assert len(stock["runners"]) == 1
    assert stock["tokens"] == ours["tokens"]
    # Each is what the process has after the engine was made.
    assert ours["variables"] == stock["variables"] == {"VLLM_USE_V2_MODEL_RUNNER": None}

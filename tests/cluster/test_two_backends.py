"""After an engine of ray_hetero a process makes vLLM's own engines as if there had been none."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from engines import HERE, START_SECONDS, Model, start
from leftovers import Scene

pytestmark = [pytest.mark.timeout(1800), pytest.mark.slow]


def test_a_stock_engine_gets_the_runner_that_it_would_have_had(
    scene: Scene, logs: Path, model: Model, tmp_path: Path
) -> None:
    answer = tmp_path / "answer.json"
    script = str(HERE / "two_backends_process.py")
    child = start(
        scene,
        [sys.executable, script, str(model("llama")), str(answer)],
        logs / "two_backends",
        {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"},
    )
    assert child.wait(2 * START_SECONDS) == 0, child.tail()
    found = json.loads(answer.read_text())
    ours, stock = found["ours"], found["stock"]
    assert set(ours["runners"]) == {"CPUModelRunner"}
    assert ours["chosen"]["executor"] == "HeteroExecutor"
    # Of a rank that serves, what it was made of is left out: hundreds of thousands of objects.
    assert max(ours["watched"]) < 10_000
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

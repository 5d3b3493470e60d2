"""Ray Serve's own LLM deployment with this backend, on CPUs; where Ray Serve is installed."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from engines import HERE, START_SECONDS, Model, start
from leftovers import Scene

pytestmark = [pytest.mark.timeout(1800), pytest.mark.slow]


@pytest.fixture(scope="module", autouse=True)
def _serve() -> None:
    for name in ("ray.serve", "pyarrow", "jsonref"):
        try:
            importlib.import_module(name)
        except ImportError as error:
            pytest.skip(f"pip install 'ray[serve]' pyarrow jsonref: {error}")


@pytest.fixture(scope="module")
def found(scene: Scene, logs: Path, model: Model) -> dict[str, Any]:
    answer = logs / "answer.json"
    command = [sys.executable, str(HERE / "serve_process.py"), str(model("llama", "f32"))]
    child = start(scene, [*command, str(answer)], logs / "serve")
    assert child.wait(START_SECONDS) == 0, child.tail()
    read: dict[str, Any] = json.loads(answer.read_text())
    return read


def test_one_request_through_its_openai_endpoint(found: dict[str, Any]) -> None:
    assert found["said"]["usage"]["completion_tokens"] == 16
    assert found["said"]["choices"][0]["message"]["content"]


def test_the_ranks_are_in_the_bundles_of_the_deployment(found: dict[str, Any]) -> None:
    (engine,) = found["engines"]
    assert [(rank["kind"], rank["layers"]) for rank in engine["ranks"]] == [("cpu", 2), ("cpu", 2)]
    assert [bundles for name, bundles in found["groups"].items() if "ray_hetero" in name] == []


def test_nothing_is_left(found: dict[str, Any], scene: Scene) -> None:
    assert (found["engines left"], found["groups left"]) == (0, {})
    scene.assert_clean()

"""The example notebook, every cell in one kernel: start, look, stop, start again."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from engines import HERE, START_SECONDS, start
from leftovers import Scene
from quiet import noise

pytestmark = [pytest.mark.timeout(1800), pytest.mark.slow]

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"

Cells = dict[str, Any]


@pytest.fixture(scope="module")
def cells(scene: Scene, logs: Path) -> Cells:
    """What was shown below each cell of code, by the cell's first line."""
    done = logs / "done.ipynb"
    extra = {name: str(scene.temporary) for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR")}
    command = [sys.executable, str(HERE / "notebook_process.py"), str(NOTEBOOK), str(logs)]
    child = start(scene, [*command, str(done)], logs / "notebook", extra)
    status = child.wait(2 * START_SECONDS)
    assert status == 0, child.tail()
    found = nbformat.read(done, as_version=4)
    return {
        cell.source.partition("\n")[0]: cell.outputs
        for cell in found.cells
        if cell.cell_type == "code"
    }


def _text(outputs: Any) -> str:
    return "".join(output.text for output in outputs if output.output_type == "stream")


def _shown(outputs: Any) -> dict[str, str]:
    """What the cell's last expression shows, by MIME type."""
    return dict(outputs[-1].data)


def test_the_start_is_shown_below_its_cell(cells: Cells) -> None:
    text = _text(cells["from vllm import LLM, SamplingParams"])
    steps = ("discover", "plan", "reserve", "spawn", "connect", "warm up")
    assert [step for step in steps if f"/6] {step}" not in text] == []
    assert "┃ rank ┃ stage ┃" in text
    assert "[6/6] warm up: 100%|" in text


def test_the_engine_shows_itself_as_a_table_and_a_picture(cells: Cells) -> None:
    page = _shown(cells["from ray_hetero.observability.status import running_engines"])["text/html"]
    assert "serving demo-model" in page
    assert "<svg" in page
    assert "one decode step" in page.lower()


def test_a_dropped_engine_gives_its_devices_to_the_next_one(cells: Cells) -> None:
    assert _shown(cells["del llm"])["text/plain"] == "()"
    assert "3-3 (1)" not in _text(cells["from vllm import LLM, SamplingParams"])
    restarted = cells["llm = start(layers=[1, 3])"]
    assert "0-0 (1)" in _text(restarted)
    assert _shown(restarted)["text/plain"] == "True"


def test_nothing_runs_any_more(cells: Cells) -> None:
    assert _shown(cells["llm.llm_engine.engine_core.shutdown()"])["text/plain"] == "()"


def test_both_ends_look_normal(cells: Cells, logs: Path) -> None:
    shown = "\n".join(_text(outputs) for outputs in cells.values())
    assert noise(shown) == []
    assert noise((logs / "notebook").read_text()) == []


def test_the_machine_is_as_before(cells: Cells, scene: Scene) -> None:
    scene.assert_clean()

"""The models of two stages are the whole model, for a sample of vLLM's architectures."""

from __future__ import annotations

import datetime
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[2]
sys.path.insert(0, str(TESTS))

from families.configurations import architectures  # noqa: E402

MENDED = ("Ernie4_5_MoeForCausalLM", "Gemma4ForCausalLM", "GraniteMoeHybridForCausalLM")
"""Architectures that `compat/models/pipeline_models.py` is for."""
SAMPLE = 3
"""Architectures of this date, beside those."""

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Rows of the matrix, of these architectures, which a new date changes."""
    others = [name for name in architectures() if name not in MENDED]
    chosen = random.Random(datetime.date.today().isoformat()).sample(others, SAMPLE)
    work = tmp_path_factory.mktemp("families")
    results = work / "results.json"
    command = [
        sys.executable, "-m", "families.matrix", "--kinds", "stages", "--work", str(work),
        "--results", str(results), *MENDED, *chosen,
    ]  # fmt: skip
    subprocess.run(command, cwd=TESTS, env=os.environ | {"VLLM_PLUGINS": ""}, check=True)
    found: dict[str, Any] = json.loads(results.read_text())
    assert found.keys() == {*MENDED, *chosen}
    return found


@pytest.mark.parametrize("name", MENDED)
def test_stages_of_mended_models_are_the_whole_model(name: str, outcomes: dict[str, Any]) -> None:
    assert outcomes[name]["stages"]["outcome"] == "equal", outcomes[name]


def test_no_architecture_of_the_sample_differs_in_silence(outcomes: dict[str, Any]) -> None:
    # What cannot be built or loaded says so when an engine starts; a difference would not.
    silent = {
        name: row
        for name, row in outcomes.items()
        if "StageError" in row.get("stages", {}).get("sentence", "")
    }
    assert not silent

"""Stages read what the stages before them send, compiled or not, or the engine does not start."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from engines import Json, batch, engine, hetero, run_engines, tokens
from leftovers import Scene

sys.path.append(str(Path(__file__).parents[1]))

from families.checkpoints import write_checkpoint
from families.one_engine import prompts

pytestmark = [pytest.mark.timeout(1200), pytest.mark.slow]

UNMENDED = """
from ray_hetero.compat.models import pipeline_models

pipeline_models.read_per_layer_inputs = lambda: None
"""
"""Start-up code of a rank in which vLLM's Gemma 4 is as it is: no stage but the first reads the
inputs of each layer."""
REFUSAL = (
    "Gemma4ForCausalLM does not read per_layer_inputs behind a stage boundary: the stage before "
    "sends that to cpu rank 1, and tokens would be wrong without it. Write a layout of one stage."
)


def stages(model: Path, env: Json, *, eager: bool) -> Json:
    """An engine of two CPU stages, whose ranks have this environment."""
    ours = hetero(layout=[["cpu"], ["cpu"]], cpu={"ranks_per_socket": 2, **env})
    return engine(model, 2, dtype="float32", **ours) | {"enforce_eager": eager}


@pytest.mark.parametrize("eager", [True, False])
def test_gemma_4_as_vllm_has_it_is_refused_and_answers_as_stock_once_it_reads(
    eager: bool, scene: Scene, tmp_path: Path
) -> None:
    model = write_checkpoint(tmp_path / "model", "Gemma4ForCausalLM")
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(UNMENDED)
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH", "")]))
    unmended = stages(model, {"env": {"PYTHONPATH": path}}, eager=eager)
    asked = batch(prompts())
    (theirs,), (ours,), (failed,) = run_engines(
        scene,
        tmp_path / "run",
        [
            (engine(model, dtype="float32"), [asked]),
            (stages(model, {}, eager=eager), [asked]),
            ({**unmended, "fails": True}, []),
        ],
    )
    assert tokens(ours) == tokens(theirs)
    assert failed["left"] == []
    assert REFUSAL in (tmp_path / "run" / "log").read_text()

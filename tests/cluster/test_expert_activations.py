"""Routed experts with the activation of Gemma 4, on CPU stages and on expert ranks.

gpt-oss's is in test_expert_ranks.py, that of Nemotron-H in test_nemotron.py.  Limits of SiLU are
compared layer by layer only: stock vLLM's experts on CPUs leave them out, Transformers' too.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from engines import IN_THIS_PROCESS, Json, batch, engine, hetero, run_engines, tokens
from leftovers import Scene

sys.path.append(str(Path(__file__).parents[1]))

from families.checkpoints import write_checkpoint
from families.one_engine import prompts

pytestmark = [pytest.mark.timeout(1800), pytest.mark.slow]

RAY: Json = {
    "num_cpus": 2, "num_gpus": 2, "object_store_memory": 100 << 20, "include_dashboard": False
}  # fmt: skip
MIXTURE: Json = {
    "enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 64,
}  # fmt: skip


def ours(model: Path, layout: list[list[str]], **keys: object) -> Json:
    """An engine of ours over ranks of two shares."""
    settings = hetero(
        layout=layout, cpu={"ranks_per_socket": 2}, warmup={"step_timeout_s": 120}, **keys
    )
    return engine(model, len(layout), dtype="float32", **settings)


def test_experts_with_gelu_answer_as_stock_does(scene: Scene, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model", "Gemma4ForCausalLM", changed=MIXTURE)
    asked = [batch(prompts())]
    runs = [
        (engine(model, dtype="float32"), asked),
        (ours(model, [["cpu"], ["cpu"]]), asked),
        (ours(model, [["gpu"]], experts={"ranks": 2}), asked),
    ]
    extra = {"RAY_HETERO_PRETEND_GPU": "1", **IN_THIS_PROCESS}
    (theirs,), *found = run_engines(scene, tmp_path / "run", runs, ray=RAY, extra=extra)
    for (answers,) in found:
        assert tokens(answers) == tokens(theirs)
    # Not a test if no layer has experts.
    assert "experts of 4 layers are computed by" in (tmp_path / "run" / "log").read_text()

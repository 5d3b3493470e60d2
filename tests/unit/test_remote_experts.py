"""Layers whose experts others compute are what vLLM's own layers are, and hold no experts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from ray_hetero.cli.demo.model import write_demo_model  # noqa: E402
from ray_hetero.config import HeteroConfig  # noqa: E402
from ray_hetero.distributed import expert_memory  # noqa: E402
from ray_hetero.distributed.remote_experts import are_remote  # noqa: E402

if expert_memory._native is None:
    pytest.skip("needs the native module", allow_module_level=True)

PROGRAM = Path(__file__).with_name("expert_processes.py")
CASES: dict[str, dict[str, Any]] = {
    "mixtral": {"dtype": "float32", "kernel": "vllm", "experts": {"ranks": 2}},
    "qwen3_moe": {"dtype": "bfloat16", "kernel": "streaming", "experts": {"ranks": 2, "layers": 2}},
}


def run(role: str, work: Path, number: int = 0) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, str(PROGRAM), role, str(work), str(number)],
        env=os.environ | {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"},
        stdout=(work / f"{role}{number}.log").open("wb"),
        stderr=subprocess.STDOUT,
    )


@pytest.mark.timeout(400)
@pytest.mark.parametrize("architecture", CASES)
def test_remote_experts_compute_what_vllms_do(architecture: str, tmp_path: Path) -> None:
    case = CASES[architecture]
    short = {"float32": "f32", "bfloat16": "bf16"}[case["dtype"]]
    model = write_demo_model(tmp_path / "model", architecture, dtype=short)  # type: ignore[arg-type]
    work = tmp_path / uuid.uuid4().hex
    work.mkdir()
    (work / "request.json").write_text(json.dumps(case | {"model": str(model)}))
    experts = [run("expert", work, number) for number in range(case["experts"]["ranks"])]
    asked = [run("stock", work), run("stage", work)]
    try:
        for process in asked:
            assert process.wait(300) == 0, "\n".join(
                log.read_text()[-3000:] for log in work.glob("*.log")
            )
        for process in experts:
            assert process.wait(30) == 1, "an expert rank ends with its stage"
    finally:
        for process in (*experts, *asked):
            process.kill()
    stock, stage = (torch.load(work / f"{role}.pt") for role in ("stock", "stage"))
    if case["experts"].get("layers") is None:
        assert stage["held"] == 0 < stock["held"]
    else:
        assert 0 < stage["held"] < stock["held"]
    assert stock["sums"].keys() == stage["sums"].keys()
    for name, sums in stock["sums"].items():
        scale = float(sums.abs().max())
        atol = scale * (1e-5 if case["dtype"] == "float32" else 2**-6)
        torch.testing.assert_close(stage["sums"][name], sums, rtol=0, atol=atol, msg=name)


@pytest.mark.parametrize(
    ("asked", "remote"), [("all", [0, 1, 2, 3]), (1, [3]), (3, [1, 2, 3]), (9, [0, 1, 2, 3])]
)
def test_the_last_layers_experts_are_remote(asked: Any, remote: list[int]) -> None:
    config = HeteroConfig.model_validate({"experts": {"ranks": 1, "layers": asked}})
    is_remote = are_remote(config, 4)
    names = [f"language_model.model.layers.{layer}.mlp.experts" for layer in range(6)]
    assert [layer for layer, name in enumerate(names) if is_remote(name)] == remote
    assert not is_remote("model.experts")

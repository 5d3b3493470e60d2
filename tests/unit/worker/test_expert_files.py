"""Experts that are read from a checkpoint's files are those that vLLM's classes load."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from placement.model.expert_tensors import ARCHITECTURES, ExpertTensors  # noqa: E402
from ray_hetero.cli.demo.model import DemoShape, write_demo_model  # noqa: E402
from ray_hetero.distributed import expert_memory  # noqa: E402
from ray_hetero.errors import UnsupportedError  # noqa: E402
from ray_hetero.worker.expert_rows import Share  # noqa: E402

if expert_memory._native is None:
    pytest.skip("needs the native module", allow_module_level=True)

PROGRAM = Path(__file__).with_name("expert_files_process.py")
START = Path(__file__).parents[3] / "benchmarks" / "expert_start.py"
QUANTISED = DemoShape(layers=2, hidden=384, heads=12)
"""Half of an expert's inner size, 256, is a whole block."""
ONLY_ON_GPUS = {"DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"}
"""Architectures whose classes vLLM cannot make on CPUs; they are those of DeepSeek V3."""
QWEN = {"num_experts_per_tok": 2, "hidden_act": "silu", "hidden_size": 64}


def ask(how: str, *what: str | Path) -> None:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), how, *map(str, what)],
        env=os.environ | {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def compared(*models: Path) -> None:
    ask("files", *models)
    ask("vllm", *models)
    for model in models:
        by_files, by_vllm = (
            json.loads((model / f"{how}.json").read_text()) for how in ("files", "vllm")
        )
        assert [len(one) > 0 for one in by_files] == [True, True]
        assert by_files == by_vllm, model.name


@pytest.mark.timeout(900)
def test_experts_of_files_are_those_that_vllm_loads(tmp_path: Path) -> None:
    compared(
        write_demo_model(tmp_path / "mixtral", "mixtral"),
        write_demo_model(tmp_path / "fp8", "qwen3_moe", stored="fp8", shape=QUANTISED),
        write_demo_model(tmp_path / "w4a16", "qwen3_moe", stored="w4a16", shape=QUANTISED),
    )


@pytest.mark.timeout(300)
def test_an_expert_rank_imports_neither_vllm_nor_transformers(tmp_path: Path) -> None:
    """The actor of a real process, from its first import until its experts are in memory."""
    model = write_demo_model(tmp_path / "mixtral", "mixtral")
    done = subprocess.run(
        [sys.executable, str(START), str(model), "--child", "--by", "files"],
        capture_output=True,
        text=True,
    )
    (line,) = (one for one in done.stdout.splitlines() if one.startswith("LOADED "))
    _, layers, _, modules, *_ = line.split()
    assert (int(layers), int(modules)) == (4, 0), done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_that_is_known(architecture: str, tmp_path: Path) -> None:
    model = tmp_path / architecture
    ask("write", model)
    if architecture not in ONLY_ON_GPUS:
        compared(model)
        return
    ask("files", model)
    layers = [list(one) for one in json.loads((model / "files.json").read_text())]
    assert layers[0] == layers[1]
    assert layers[0][-1] == "model.layers.3.mlp.experts"


@pytest.mark.parametrize(
    ("architecture", "more"),
    [
        ("DbrxForCausalLM", {}),
        ("Qwen3MoeForCausalLM", {"hidden_act": "gelu"}),
        ("Qwen3MoeForCausalLM", {"swiglu_limit": 7.0}),
        ("Qwen3MoeForCausalLM", {"num_experts_per_tok": None}),
        ("Qwen3MoeForCausalLM", {"quantization_config": {"quant_method": "awq"}}),
        ("Qwen3MoeForCausalLM", {"quantization_config": {"quant_method": "fp8"}}),
        ("GptOssForCausalLM", {"quantization_config": {"quant_method": "fp8"}}),
    ],
)
def test_what_is_not_known_is_left_to_vllm(architecture: str, more: dict[str, object]) -> None:
    assert ExpertTensors.of("Qwen3MoeForCausalLM", QWEN) is not None
    assert ExpertTensors.of(architecture, QWEN | more) is None


def test_a_share_is_an_equal_part() -> None:
    rows = torch.arange(12).view(6, 2)
    assert torch.equal(Share(1, 3).of(rows, 0), rows[2:4])
    assert torch.equal(Share(1, 2).of(rows, 1), rows[:, 1:])
    with pytest.raises(UnsupportedError, match=r"Set experts\.ranks to a divisor of 6"):
        Share(0, 4).of(rows, 0)

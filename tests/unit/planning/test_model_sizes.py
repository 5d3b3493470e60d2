"""Sizes of a model from the first source that knows them; what vLLM answers is kept."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
from vllm.v1.kv_cache_interface import MambaSpec

from placement.model.built import shape_from_parts
from placement.model.config import UnknownModelError
from placement.model.reading import shape_from_config
from placement.units import GIB
from ray_hetero.cli.demo.model import DemoShape, write_demo_model
from ray_hetero.planning.sizes import model_probe
from ray_hetero.planning.sizes.model_sizes import sizes_of

sys.path.insert(0, str(Path(__file__).parents[3] / "tools"))

import write_built_models as kept

MODELS = kept.DATA / "models"
BUILT = kept.DATA / "built"


def published(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((MODELS / f"{name}.json").read_text(encoding="utf-8"))
    return content


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where answers are kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "ray_hetero" / "models"


def test_vllm_answers_what_is_kept() -> None:
    """One of each: windows, Gated DeltaNet with images, Mamba with experts, sparse latents."""
    names = ("gpt-oss-20b", "qwen3.5-35b-a3b", "nemotron-3-nano-30b", "deepseek-v3.2")
    found = kept.answers([MODELS / f"{name}.json" for name in names])
    for name in names[1:]:
        assert found[name] == json.loads((BUILT / f"{name}.json").read_text(encoding="utf-8"))
    # The reader of config.json and vLLM's class are two ways to the same sizes.
    config = published("gpt-oss-20b")
    read, built = shape_from_config(config), shape_from_parts(found["gpt-oss-20b"], config)
    assert built.weight_bytes == pytest.approx(read.weight_bytes, rel=0.005)
    assert [layer.kv for layer in built.layers] == [layer.kv for layer in read.layers]
    assert built.bytes_by_role() == pytest.approx(read.bytes_by_role(), rel=0.005)
    for name in (
        "experts", "active_experts", "intermediate_size", "num_heads", "num_kv_heads", "head_dim",
        "hidden_size", "vocab_size", "expert_parts", "tied",
    ):  # fmt: skip
        assert getattr(built, name) == getattr(read, name), name


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("deepseek-v3.2", 671 + 3), ("glm-5-fp8", 744), ("qwen3-next-80b-a3b", 79.7),
        ("qwen3.5-397b-a17b", 396.8), ("minimax-m2.5", 228.7), ("llama-4-scout", 108.6),
        ("nemotron-3-nano-30b", 31.6), ("gemma-3-27b", 27.4), ("falcon-h1-34b", 33.6),
    ],
)  # fmt: skip
def test_sizes_are_those_that_publishers_give(name: str, billions: float) -> None:
    parts = json.loads((BUILT / f"{name}.json").read_text(encoding="utf-8"))
    shape = shape_from_parts(parts, published(name))
    width = 1 if published(name).get("quantization_config") else 2
    assert shape.weight_bytes == pytest.approx(billions * 1e9 * width, rel=0.03)


@pytest.mark.parametrize("drafts", [0, 1, 3])
@pytest.mark.parametrize(
    ("name", "shapes", "sizes"),
    [
        (
            "nemotron-3-nano-30b",
            MambaStateShapeCalculator.mamba2_state_shape,
            (1, 64 * 64, 8, 64, 64, 128, 4),
        ),
        (
            "qwen3-next-80b-a3b",
            MambaStateShapeCalculator.gated_delta_net_state_shape,
            (1, 16, 32, 128, 128, 4),
        ),
    ],
)
def test_states_of_drafts_take_what_vllm_asks_for(
    name: str, shapes: Any, sizes: tuple[int, ...], drafts: int
) -> None:
    spec = MambaSpec(
        block_size=1024, shapes=shapes(*sizes, num_spec=drafts),
        dtypes=(torch.bfloat16, torch.float32), num_speculative_blocks=drafts,
    )  # fmt: skip
    asked: Any = SimpleNamespace(cache_config=SimpleNamespace(mamba_cache_mode="none"))
    parts = json.loads((BUILT / f"{name}.json").read_text(encoding="utf-8"))
    caches = [layer.kv for layer in shape_from_parts(parts, published(name)).layers]
    states = {one.rank_held(1, 0, 1, drafts) for one in caches if one and one.state_bytes}
    assert states == {spec.max_memory_usage_bytes(asked)}


def test_every_published_model_has_sizes() -> None:
    unknown = {path.stem for path in kept.unknown_models()}
    assert len(list(MODELS.glob("*.json"))) >= 24
    # vLLM wants prefix caching for it, which its CPU platform lacks.
    assert unknown - {path.stem for path in BUILT.glob("*.json")} == {"kimi-k3"}


def test_vllms_own_name_of_a_method_is_the_checkpoints() -> None:
    config = published("gpt-oss-120b")
    renamed = {**config["quantization_config"], "quant_method": "gpt_oss_mxfp4"}
    assert shape_from_config({**config, "quantization_config": renamed}) == shape_from_config(
        config
    )


def test_a_fork_with_the_type_of_another_model_is_not_taken_for_it() -> None:
    config = {**published("llama-3.3-70b"), "architectures": ["ZebraForCausalLM"]}
    with pytest.raises(UnknownModelError, match="with the architecture 'ZebraForCausalLM'"):
        shape_from_config(config)


def test_an_answer_of_vllm_is_asked_for_once(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = published("qwen3-next-80b-a3b")
    answer = (BUILT / "qwen3-next-80b-a3b.json").read_text(encoding="utf-8")
    asked = []

    def run(command: list[str], **how: Any) -> subprocess.CompletedProcess[str]:
        asked.append(json.loads(Path(command[-2]).read_text(encoding="utf-8")))
        Path(command[-1]).write_text(f'{{"parts": {answer}}}', encoding="utf-8")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    first, second = (sizes_of(config, dtype="bfloat16") for _ in range(2))
    assert first == second
    assert first.source == "vLLM"
    assert first.weight_bytes / GIB == pytest.approx(148.4, abs=0.1)
    assert [one["dtype"] for one in asked] == ["bfloat16"]
    assert len(list(directory.iterdir())) == 1
    sizes_of({**config, "num_hidden_layers": 12}, dtype="bfloat16")
    assert len(asked) == 2


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("import time; time.sleep(60)", "vLLM has not built the model within 1 s"),
        ("raise SystemExit('no memory')", "ended with 1: no memory"),
        (
            "import sys; open(sys.argv[2], 'w').write('{\"problem\": \"ValueError: odd\"}')",
            "vLLM cannot build it: ValueError: odd",
        ),
    ],
)
def test_why_vllm_has_no_answer(
    program: str, reason: str, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stand_in.py").write_text(program, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(model_probe, "MODULE", "stand_in")
    monkeypatch.setattr(model_probe, "LIMIT_S", 1.0 if "sleep" in program else 60.0)
    with pytest.raises(UnknownModelError) as raised:
        sizes_of({"model_type": "zebra"})
    assert "'zebra' is not known" in str(raised.value)
    assert reason in str(raised.value)
    assert not directory.exists()


def test_files_of_a_model_that_nothing_else_knows(
    directory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(model_probe, "find_spec", lambda name: None)
    folder = tmp_path / "model"
    write_demo_model(folder, "llama", shape=DemoShape(layers=3, hidden=64, heads=2))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert sizes_of(config, folder).source == "safetensors"
    odd = {**config, "model_type": "zebra", "ssm_groups": 2}
    (folder / "config.json").write_text(json.dumps(odd), encoding="utf-8")
    found = sizes_of(odd, folder)
    assert (found.source, len(found.layers)) == ("safetensors", 3)
    assert "what ssm_groups means for the caches of its layers" in caplog.text

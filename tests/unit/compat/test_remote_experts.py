"""Layers whose experts others compute are what vLLM's own layers are, and hold no experts."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

import transformers  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

sys.path.append(str(Path(__file__).parents[2] / "cluster"))

from dequantised import dequantised  # noqa: E402

from ray_hetero.cli.demo.model import DemoShape, write_demo_model  # noqa: E402
from ray_hetero.cli.demo.stored import FORMATS  # noqa: E402
from ray_hetero.compat.models import remote_experts  # noqa: E402
from ray_hetero.config import HeteroConfig  # noqa: E402
from ray_hetero.distributed import expert_memory  # noqa: E402
from ray_hetero.distributed.stage_experts import are_remote  # noqa: E402
from ray_hetero.planning.expert_ranks import asked_layers  # noqa: E402

if expert_memory._native is None:
    pytest.skip("needs the native module", allow_module_level=True)

PROGRAM = Path(__file__).parents[1].joinpath("expert_processes.py")
TWO: dict[str, Any] = {
    "dtype": "float32",
    "kernel": "vllm",
    "experts": {"ranks": 2, "layers": "all"},
}
LINKED: dict[str, Any] = {
    **TWO, "dtype": "bfloat16", "kernel": "streaming",
    "experts": {**TWO["experts"], "prefill_on_gpu_tokens": 32, "prefill_on_gpu": True},
}  # fmt: skip
"""The stage's device reads experts for many tokens itself."""
SPLIT: dict[str, Any] = {**LINKED, "experts": {**LINKED["experts"], "prefill_gpu_share": 0.4}}
"""Some of them, while the expert ranks compute the others."""
SLOTS: dict[str, Any] = {"slots_gib": 0.25, "slots": "fixed"}
"""All experts are in slots too, for a token alone."""
CASES: dict[str, dict[str, Any]] = {
    "mixtral": TWO,
    "qwen3_moe": {**LINKED, "experts": {**LINKED["experts"], "layers": 2}},
    "qwen2_moe": TWO,
    "deepseek_v2": TWO,
    "deepseek_v3": SPLIT,
    "glm4_moe": TWO,
    "gpt_oss": {
        **TWO,
        "dtype": "bfloat16",
        "kernel": "streaming",
        "experts": {**TWO["experts"], "prefill_on_gpu": False, **SLOTS},
    },
    "gpt_oss in mxfp4": {**LINKED, "experts": {**LINKED["experts"], **SLOTS}},
    "fp8": LINKED,
    "mxfp8": LINKED,
    "nvfp4": LINKED,
    "nvfp4-modelopt": SPLIT,
    "w4a16": {**SPLIT, "kernel": "auto"},
}
USUAL = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss in mxfp4", "fp8", "w4a16")
"""Cases with, among them, every way of computing and every kind of code; the others are slow."""
QUANTISED = DemoShape(layers=2, hidden=384, heads=12)
"""Half of an expert's inner size, 256, is a whole block."""
COMMON: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
GATED: dict[str, Any] = {
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
}
MLA: dict[str, Any] = {
    "q_lora_rank": None, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32,
    "v_head_dim": 32, "n_routed_experts": 8, "n_shared_experts": 2, "n_group": 2, "topk_group": 1,
    "first_k_dense_replace": 1, "num_experts_per_tok": 3, "routed_scaling_factor": 1.5,
}  # fmt: skip
LATENT = ("deepseek_v2", "deepseek_v3")
"""Models with multi-head latent attention."""
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_moe": ("Qwen2Moe", {**GATED, "num_experts": 8, "shared_expert_intermediate_size": 64}),
    "deepseek_v2": ("DeepseekV2", {**MLA, "moe_intermediate_size": 64,
                                   "topk_method": "group_limited_greedy"}),
    "deepseek_v3": ("DeepseekV3", {**MLA, "moe_intermediate_size": 64, "topk_method": "noaux_tc"}),
    "glm4_moe": ("Glm4Moe", {**GATED, "n_routed_experts": 8, "n_shared_experts": 1,
                             "first_k_dense_replace": 1, "head_dim": 32}),
    "gpt_oss": ("GptOss", {"num_local_experts": 8, "num_experts_per_tok": 4, "head_dim": 32}),
}  # fmt: skip
"""Models with shared experts, group routing, biases: the name of their classes, their sizes."""


def written(directory: Path, architecture: str, dtype: str) -> Path:
    if architecture not in OTHERS:
        short: Any = {"float32": "f32", "bfloat16": "bf16"}[dtype]
        return write_demo_model(directory, architecture, dtype=short)
    name, sizes = OTHERS[architecture]
    config = getattr(transformers, f"{name}Config")(**COMMON | sizes)
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config).to(getattr(torch, dtype))
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
    model.save_pretrained(directory)
    return directory


def quantised(directory: Path, name: str) -> dict[str, str]:
    """A checkpoint of that format, and what it holds as a plain one."""
    stored = write_demo_model(directory / "stored", "qwen3_moe", stored=name, shape=QUANTISED)
    return {"model": str(stored), "reference": str(dequantised(stored, directory / "plain"))}


FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def in_mxfp4(directory: Path) -> dict[str, str]:
    """A checkpoint of gpt-oss with its experts in MXFP4, and what it holds as a plain one."""
    plain, stored = directory / "plain", directory / "stored"
    written(plain, "gpt_oss", "bfloat16")
    shutil.copytree(plain, stored)
    tensors = load_file(plain / "model.safetensors")
    coded = dict(tensors)
    for name in [name for name in tensors if name.endswith("_proj") and ".experts." in name]:
        # [experts, inputs, outputs] in the model's dtype, [experts, outputs, inputs] in codes.
        groups = coded.pop(name).float().mT.unflatten(-1, (-1, 32))
        exponents = groups.abs().amax(-1, keepdim=True).log2().floor() - 2
        scaled = groups / exponents.exp2()
        codes = (scaled.abs().unsqueeze(-1) - FP4).abs().argmin(-1)
        values = FP4[codes].copysign(scaled) * exponents.exp2()
        tensors[name] = values.flatten(-2).mT.contiguous().to(torch.bfloat16)
        codes += 8 * (scaled < 0)
        coded[f"{name}_blocks"] = (codes[..., ::2] + 16 * codes[..., 1::2]).to(torch.uint8)
        coded[f"{name}_scales"] = (exponents.squeeze(-1) + 127).to(torch.uint8)
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    save_file(coded, stored / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((stored / "config.json").read_text())
    kept = [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    (stored / "config.json").write_text(json.dumps(config))
    return {"model": str(stored), "reference": str(plain)}


def models_of(directory: Path, name: str) -> dict[str, str]:
    """The checkpoint of a case, and what it is compared with where that is another one."""
    if name == "gpt_oss in mxfp4":
        return in_mxfp4(directory)
    if name in FORMATS:
        return quantised(directory, name)
    return {"model": str(written(directory, name, CASES[name]["dtype"]))}


def run(role: str, work: Path, number: int = 0) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, str(PROGRAM), role, str(work), str(number)],
        env=os.environ | {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"},
        stdout=(work / f"{role}{number}.log").open("wb"),
        stderr=subprocess.STDOUT,
    )


@pytest.fixture(scope="module")
def found(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> dict[str, tuple[Any, Any]]:
    """What the layers of each model make of some tokens, in vLLM and with expert ranks."""
    wanted = {
        item.callspec.params["name"]
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and item.module is request.module
        and "found" in item.fixturenames
    }
    work = tmp_path_factory.mktemp("experts") / uuid.uuid4().hex
    work.mkdir()
    cases = {
        name: case | models_of(work / name.replace(" ", "-"), name) | {"latent": name in LATENT}
        for name, case in CASES.items()
        if name in wanted
    }
    (work / "request.json").write_text(json.dumps(cases))
    # Those that the others wait for are looked at first.
    # One of them reads the files by itself where that is possible.
    processes = [run("expert", work, 0), run("files", work, 1)]
    processes += [run("stage", work), run("stock", work)]
    try:
        for process in processes:
            assert process.wait(600) == 0, "\n".join(
                log.read_text()[-3000:] for log in work.glob("*.log")
            )
    finally:
        for process in processes:
            process.kill()
    return {
        name: tuple(torch.load(work / f"{name}-{role}.pt") for role in ("stock", "stage"))
        for name in cases
    }


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "name", [one if one in USUAL else pytest.param(one, marks=pytest.mark.slow) for one in CASES]
)
def test_remote_experts_compute_what_vllms_do(name: str, found: dict[str, tuple[Any, Any]]) -> None:
    stock, stage = found[name]
    if CASES[name]["experts"]["layers"] != "all":
        assert 0 < stage["held"] < stock["held"]
    else:
        assert stage["held"] == 0 < stock["held"]
    assert stock["sums"].keys() == stage["sums"].keys()
    assert stock["sums"]
    # Each block of experts computes 70 tokens, and one.
    asked = CASES[name]["experts"]
    layers = len(stock["sums"]) // 2 if asked["layers"] == "all" else asked["layers"]
    assert stage["linked"] == (70 * layers if asked.get("prefill_on_gpu") else 0)
    assert stage["in_slots"] == (8 if "slots_gib" in asked else 0)
    for layer, sums in stock["sums"].items():
        scale = float(sums.abs().max())
        atol = scale * (1e-5 if CASES[name]["dtype"] == "float32" else 2**-6)
        torch.testing.assert_close(stage["sums"][layer], sums, rtol=0, atol=atol, msg=layer)


@pytest.mark.timeout(300)
def test_experts_are_loaded_and_computed_without_vllms_cpu_kernels(tmp_path: Path) -> None:
    """As beside a build for CUDA; of a layer that needs them the rank says so, and ends."""
    model = str(written(tmp_path / "model", "qwen3_moe", "bfloat16"))
    case = LINKED | {"model": model, "latent": False, "kernel": "auto"}
    (tmp_path / "request.json").write_text(json.dumps({"bare": case}))
    assert run("bare", tmp_path).wait(250) == 0, (tmp_path / "bare0.log").read_text()[-3000:]
    found = torch.load(tmp_path / "bare.pt")
    torch.testing.assert_close(found["ours"], found["expected"], rtol=0, atol=found["atol"])
    assert "vLLM's for CPUs are not installed on this node" in found["refusal"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_experts_that_only_gpus_compute_are_refused(tmp_path: Path) -> None:
    model = write_demo_model(tmp_path / "m", "qwen3_moe", stored="mxfp4", shape=QUANTISED)
    case = TWO | {"dtype": "bfloat16", "kernel": "auto", "model": str(model), "latent": False}
    (tmp_path / "request.json").write_text(json.dumps({"mxfp4": case}))
    assert run("expert", tmp_path).wait(250) == 1
    said = (tmp_path / "expert0.log").read_text()
    assert "vLLM computes its experts with MarlinExperts, on GPUs only" in said


@pytest.mark.parametrize(
    ("asked", "remote"), [("all", [0, 1, 2, 3]), (1, [3]), (3, [1, 2, 3]), (9, [0, 1, 2, 3])]
)
def test_the_last_layers_experts_are_remote(asked: Any, remote: list[int]) -> None:
    config = HeteroConfig.model_validate({"experts": {"ranks": 1, "layers": asked}})
    layers = asked_layers(config.experts, 4)
    assert layers is not None
    is_remote = are_remote(layers, 4)
    names = [f"language_model.model.layers.{layer}.mlp.experts" for layer in range(6)]
    assert [layer for layer, name in enumerate(names) if is_remote(name)] == remote
    assert not is_remote("model.experts")


def test_weights_on_the_input_are_applied_before_tokens_are_handed_over() -> None:
    """Llama 4 multiplies a token, not a result, with the weight of its one expert."""
    method = object.__new__(remote_experts._remote_method())
    method._compute = lambda x, weights, ids, compute_shared: (x, weights)
    x, ids = torch.randn(5, 8).bfloat16(), torch.zeros((5, 1), dtype=torch.int32)
    weights = torch.rand(5, 1)
    for is_on_input in (False, True):
        layer = SimpleNamespace(apply_router_weight_on_input=is_on_input)
        handed, left = method.apply(layer, x, weights, ids, None, None)
        assert torch.equal(handed, x * weights.bfloat16() if is_on_input else x)
        assert torch.equal(left, torch.ones(5, 1) if is_on_input else weights)

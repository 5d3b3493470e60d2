"""Checkpoints without a CPU kernel are known by the configuration that they come with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from transformers import NemotronHConfig

from placement.cluster.layout import Layout
from ray_hetero.cli.demo.stored import FORMATS
from ray_hetero.errors import UnsupportedError
from ray_hetero.preflight.refusal import refuse_first
from ray_hetero.preflight.refused_models import MODELS_OF_CPU_RANKS, refuse_ranks
from ray_hetero.preflight.unsupported_checkpoints import CheckpointOnCpus

COMPRESSED = "compressed-tensors"
NVFP4 = ("nvfp4-pack-quantized", 4, "float")


def _compressed(stored: str, bits: int, kind: str = "int", *, activations: bool = False) -> Any:
    group = {"weights": {"num_bits": bits, "type": kind}, "input_activations": None}
    if activations:
        group["input_activations"] = {"num_bits": 8, "type": kind}
    return {"format": stored, "config_groups": {"group_0": group}}


def _model(
    method: str | None, scheme: Any = None, *, experts: int = 0, model_type: str = "llama"
) -> Any:
    """What vLLM knows about a model."""
    given = {} if scheme is None else {"quantization_config": scheme}
    return SimpleNamespace(
        quantization=method,
        hf_text_config=SimpleNamespace(to_dict=dict),
        hf_config=SimpleNamespace(model_type=model_type, **given),
        get_num_experts=lambda: experts,
    )


def _refuse(model: Any, linear_kernel: str = "auto") -> None:
    refuse_first(MODELS_OF_CPU_RANKS, CheckpointOnCpus.of_model(model, linear_kernel))


@pytest.mark.parametrize(
    ("method", "given", "layers"),
    [
        ("modelopt_fp4", {"quant_algo": "W4A16_NVFP4"}, "NVFP4 weight-only"),
        ("modelopt_fp4", {"quant_algo": "NVFP4", **_compressed(*NVFP4)}, "NVFP4 weight-only"),
        ("fbgemm_fp8", {}, "FBGEMM FP8"),
        ("auto_gptq", {"bits": 8}, "8-bit GPTQ"),
        (COMPRESSED, _compressed(*NVFP4), "NVFP4 weight-only"),
    ],
)
def test_refused_with_any_kernels(method: str, given: dict[str, Any], layers: str) -> None:
    said = rf"with {layers} layers .* GPUs only\. Take the model as .*, or write a layout without"
    with pytest.raises(UnsupportedError, match=said):
        _refuse(_model(method, given))
    config = {"quantization_config": {**given, "quant_method": method}}
    with pytest.raises(UnsupportedError, match=said):
        refuse_first(MODELS_OF_CPU_RANKS, CheckpointOnCpus.of_config(config, "auto"))


@pytest.mark.parametrize(
    ("method", "given", "layers"),
    [
        ("modelopt_fp4", {}, "NVFP4"),
        ("modelopt_fp4", {"quant_algo": "NVFP4"}, "NVFP4"),
        ("modelopt", {"quant_algo": "MXFP8"}, "MXFP8"),
        (COMPRESSED, _compressed(*NVFP4, activations=True), "NVFP4"),
        (COMPRESSED, _compressed("mxfp8-quantized", 8, "float", activations=True), "MXFP8"),
        (COMPRESSED, _compressed("pack-quantized", 8), "8-bit int weight-only"),
        (COMPRESSED, _compressed("float-quantized", 8, "float"), "8-bit float weight-only"),
    ],
)
def test_refused_where_this_projects_kernels_are_not_taken(
    method: str, given: dict[str, Any], layers: str
) -> None:
    for kernel in ("auto", "streaming"):
        _refuse(_model(method, given), kernel)
    said = f"linear_kernel vllm beside a checkpoint with {layers} layers .* Leave cpu.linear_kernel"
    with pytest.raises(UnsupportedError, match=said):
        _refuse(_model(method, given), "vllm")
    if layers in ("NVFP4", "MXFP8"):
        _refuse(_model(method, given, experts=8))
        return
    with pytest.raises(UnsupportedError, match=rf"a mixture of experts in {layers} .* Take the"):
        _refuse(_model(method, given, experts=8))
    kept = {**given, "ignore": ["re:.*mlp.experts.*"]}
    _refuse(_model(method, kept, experts=8))


@pytest.mark.parametrize(
    ("method", "name"), [("fp8", "fp8-tensor"), (COMPRESSED, "compressed")], ids=str
)
def test_experts_with_one_scale_are_refused(method: str, name: str) -> None:
    if name in FORMATS:
        given = FORMATS[name].scheme(128, [])
    else:
        given = _compressed("float-quantized", 8, "float", activations=True)
        given["config_groups"]["group_0"]["weights"]["strategy"] = "tensor"
    _refuse(_model(method, given), "vllm")
    with pytest.raises(UnsupportedError, match="in FP8 with one scale does"):
        _refuse(_model(method, given, experts=8))


def test_an_architecture_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"Mamba layers.* scan\. Write a layout without"):
        _refuse(_model(None, model_type="mamba"))


@pytest.mark.parametrize(
    ("pattern", "is_refused"), [("MEM*", True), ("M-M*", False), (None, True)], ids=str
)
def test_experts_without_a_gate_need_this_projects_kernels(
    pattern: str | None, is_refused: bool
) -> None:
    given = {} if pattern is None else {"hybrid_override_pattern": pattern}
    config = {"model_type": "nemotron_h", "mlp_hidden_act": "relu2", **given}
    model = _model(None, model_type="nemotron_h")
    model.hf_text_config = NemotronHConfig(**given)
    cpus, beside = (Layout((("cpu",),)), 0), (Layout((("gpu",),)), 2)
    said = r"vllm (beside|for) experts without a gate \(relu2\) .* Leave cpu.linear_kernel out"
    for kernel in ("auto", "streaming", "vllm"):
        for checkpoint in (
            CheckpointOnCpus.of_config(config, kernel), CheckpointOnCpus.of_model(model, kernel)
        ):  # fmt: skip
            refuse_ranks(checkpoint, Layout((("gpu",),)))
            for ranks in (cpus, beside):
                if kernel == "vllm" and is_refused:
                    with pytest.raises(UnsupportedError, match=said):
                        refuse_ranks(checkpoint, *ranks)
                else:
                    refuse_ranks(checkpoint, *ranks)


@pytest.mark.parametrize("pattern", [[0.95, 0.0], 0.95])
def test_sparse_activations_are_refused_where_ranks_divide_them(pattern: object) -> None:
    model = _model(None, model_type="gemma3n")
    model.hf_text_config.to_dict = lambda: {"activation_sparsity_pattern": pattern}
    checkpoint = CheckpointOnCpus.of_model(model, "auto")
    refuse_ranks(checkpoint, Layout((("cpu",), ("gpu",))))
    refuse_ranks(checkpoint, Layout((("gpu", "gpu"),)))
    with pytest.raises(UnsupportedError, match=r"sparse activations.* stages of one rank"):
        refuse_ranks(checkpoint, Layout((("cpu", "cpu"),)))
    model.hf_text_config.to_dict = lambda: {"activation_sparsity_pattern": [0.0, 0.0]}
    dense = CheckpointOnCpus.of_model(model, "auto")
    refuse_ranks(dense, Layout((("cpu", "cpu"),)))


@pytest.mark.parametrize(
    ("method", "given"),
    [
        ("None", {}),
        ("auto_gptq", {"bits": 4}),
        ("auto_awq", {"bits": 4}),
        ("fp8", {}),
        ("fp8", FORMATS["fp8"].scheme(128, [])),
        (COMPRESSED, FORMATS["int8"].scheme(128, [])),
        (COMPRESSED, _compressed("mxfp4-pack-quantized", 4, "float")),
        (COMPRESSED, _compressed("pack-quantized", 4)),
        (COMPRESSED, _compressed("float-quantized", 8, "float", activations=True)),
        (COMPRESSED, {"config_groups": None}),
    ],
)
def test_not_refused(method: str, given: dict[str, Any]) -> None:
    for kernel in ("auto", "vllm"):
        _refuse(_model(method, given, experts=8), kernel)


@pytest.mark.parametrize("name", FORMATS)
def test_no_format_of_demo_models_is_refused(name: str) -> None:
    config = {"model_type": "llama", "quantization_config": FORMATS[name].scheme(128, [])}
    refuse_first(MODELS_OF_CPU_RANKS, CheckpointOnCpus.of_config(config, "auto"))


def test_an_unquantised_model_has_no_configuration_to_ask() -> None:
    _refuse(_model(None))
    refuse_first(MODELS_OF_CPU_RANKS, CheckpointOnCpus.of_config({"model_type": "llama"}, "vllm"))

"""Checkpoints without a CPU kernel are known by the configuration that they come with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ray_hetero.cli.demo.int8 import scheme
from ray_hetero.errors import UnsupportedError
from ray_hetero.preflight.refusals import refuse_checkpoint
from ray_hetero.preflight.unsupported_checkpoints import without_kernel

COMPRESSED = "compressed-tensors"


def _compressed(stored: str, bits: int, kind: str = "int", *, activations: bool = False) -> Any:
    group = {"weights": {"num_bits": bits, "type": kind}, "input_activations": None}
    if activations:
        group["input_activations"] = {"num_bits": 8, "type": kind}
    return {"format": stored, "config_groups": {"group_0": group}}


@pytest.mark.parametrize(
    ("method", "given", "layers"),
    [
        ("modelopt_fp4", {}, "NVFP4"),
        ("auto_gptq", {"bits": 8}, "8-bit GPTQ"),
        (COMPRESSED, _compressed("nvfp4-pack-quantized", 4, "float"), "NVFP4"),
        (COMPRESSED, _compressed("pack-quantized", 8), "8-bit int weight-only"),
        (COMPRESSED, _compressed("float-quantized", 8, "float"), "8-bit float weight-only"),
    ],
)
def test_refused(method: str, given: dict[str, Any], layers: str) -> None:
    assert without_kernel(method, given) == layers
    model: Any = SimpleNamespace(
        quantization=method,
        hf_config=SimpleNamespace(model_type="llama", quantization_config=given),
    )
    said = (
        rf"with {layers} layers .* no CPU kernel.* Take the model as .*, or write a layout without"
    )
    with pytest.raises(UnsupportedError, match=said):
        refuse_checkpoint(model)


def test_an_architecture_is_refused() -> None:
    model: Any = SimpleNamespace(quantization=None, hf_config=SimpleNamespace(model_type="mamba"))
    with pytest.raises(UnsupportedError, match=r"Mamba layers.* scan\. Write a layout without"):
        refuse_checkpoint(model)


@pytest.mark.parametrize(
    ("method", "given"),
    [
        ("None", {}),
        ("auto_gptq", {"bits": 4}),
        ("auto_awq", {"bits": 4}),
        ("fp8", {"activation_scheme": "dynamic"}),
        (COMPRESSED, scheme(128, [])),
        (COMPRESSED, _compressed("mxfp4-pack-quantized", 4, "float")),
        (COMPRESSED, _compressed("pack-quantized", 4)),
        (COMPRESSED, _compressed("float-quantized", 8, "float", activations=True)),
        (COMPRESSED, {"config_groups": None}),
    ],
)
def test_not_refused(method: str, given: dict[str, Any]) -> None:
    assert without_kernel(method, given) is None


def test_an_unquantised_model_has_no_configuration_to_ask() -> None:
    model: Any = SimpleNamespace(quantization=None, hf_config=SimpleNamespace(model_type="llama"))
    refuse_checkpoint(model)

"""Quantised demo models: the same model, rounded, in the format that the config names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from placement.model.reading import shape_of
from ray_hetero.cli.demo import fp8
from ray_hetero.cli.demo.model import DemoShape, write_demo_model
from ray_hetero.errors import ConfigError

SMALL = DemoShape(layers=2, hidden=64, heads=2)


def _pair(directory: Path, architecture: str) -> tuple[dict[str, Any], dict[str, Any]]:
    folders = [
        write_demo_model(directory / name, architecture, shape=SMALL, dtype="f32", stored=stored)
        for name, stored in (("plain", None), ("int8", "int8"))
    ]
    plain, rounded = (load_file(folder / "model.safetensors") for folder in folders)
    return plain, rounded


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma", "opt"])
def test_weights_are_those_of_the_plain_model_rounded(tmp_path: Path, architecture: str) -> None:
    plain, rounded = _pair(tmp_path, architecture)
    scales = {name for name in rounded if name.endswith("_scale")}
    assert set(rounded) - scales == set(plain)
    # Of llama: seven linear layers in each of two.
    assert len(scales) >= 12
    for name, weight in plain.items():
        if f"{name}_scale" not in scales:
            assert rounded[name].equal(weight)
            continue
        scale = rounded[f"{name}_scale"]
        assert str(rounded[name].dtype) == "torch.int8"
        assert tuple(scale.shape) == (weight.shape[0], 1)
        # Half a step at most, and every row uses the whole range.
        assert ((rounded[name] * scale - weight).abs() <= 0.501 * scale).all()
        assert (rounded[name].abs().amax(dim=1) == 127).all()


def test_the_config_says_so_and_the_planner_reads_it(tmp_path: Path) -> None:
    plain = write_demo_model(tmp_path / "plain", shape=SMALL)
    int8 = write_demo_model(tmp_path / "int8", shape=SMALL, stored="int8")
    scheme = json.loads((int8 / "config.json").read_text())["quantization_config"]
    assert (scheme["quant_method"], scheme["format"]) == ("compressed-tensors", "int-quantized")
    layers = [shape_of(path, "bfloat16", "auto").layers[0].nbytes for path in (plain, int8)]
    assert 0.5 * layers[0] < layers[1] < 0.6 * layers[0]


@pytest.mark.parametrize(
    ("stored", "method", "share"),
    [
        ("w8a16", "compressed-tensors", 0.53),
        ("fp8", "fp8", 0.5),
        ("fp8-tensor", "fp8", 0.5),
        ("fp8-weight", "compressed-tensors", 0.5),
        ("fp8-channel", "compressed-tensors", 0.5),
        ("fp8-32", "fp8", 0.5),
        ("w4a16", "compressed-tensors", 0.28),
        ("w4a16-32", "compressed-tensors", 0.28),
        ("w4a16-zeros", "compressed-tensors", 0.29),
        ("gptq", "gptq", 0.29),
        ("awq", "awq", 0.29),
        ("mxfp4", "compressed-tensors", 0.26),
        ("mxfp8", "compressed-tensors", 0.51),
        ("nvfp4", "compressed-tensors", 0.28),
        ("nvfp4-modelopt", "modelopt", 0.28),
    ],
)
def test_each_format_takes_the_bytes_that_the_planner_reads(
    tmp_path: Path, stored: str, method: str, share: float
) -> None:
    plain = write_demo_model(tmp_path / "plain", shape=SMALL)
    other = write_demo_model(tmp_path / "stored", shape=SMALL, stored=stored)
    scheme = json.loads((other / "config.json").read_text())["quantization_config"]
    assert scheme["quant_method"] == method
    layers = [shape_of(path, "bfloat16", "auto").layers[0].nbytes for path in (plain, other)]
    assert share * layers[0] < layers[1] < (share + 0.06) * layers[0]


def test_the_last_outputs_of_a_weight_in_blocks_may_fill_half_a_block() -> None:
    weight = torch.randn(192, 256)
    parts = fp8.block_tensors(weight, 128)
    assert parts["weight"].shape == weight.shape
    assert parts["weight_scale_inv"].shape == (2, 2)
    scales = parts["weight_scale_inv"].repeat_interleave(128, 0)[:192].repeat_interleave(128, 1)
    # Floats have three bits behind the first; small ones have the step of the smallest.
    room = weight.abs() * 2**-4 + scales * 2**-10
    assert ((parts["weight"].float() * scales - weight).abs() <= room).all()


def test_an_unknown_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--stored: expected one of int8, w8a16, .*; got 'int3'"):
        write_demo_model(tmp_path / "model", stored="int3")


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_experts_are_stored_in_the_format_and_their_router_is_not(
    name: str, tmp_path: Path
) -> None:
    path = write_demo_model(tmp_path / "model", name, shape=SMALL, stored="fp8-channel")
    names = load_file(path / "model.safetensors").keys()
    scaled = {key.removesuffix(".weight_scale") for key in names if key.endswith("weight_scale")}
    experts = {key for key in scaled if ".experts." in key}
    routers = {key for key in names if key.endswith(".gate.weight")}
    ignored = json.loads((path / "config.json").read_text())["quantization_config"]["ignore"]
    assert len(experts) % 3 == 0
    assert len(experts) > 3
    assert routers
    assert not {key.removesuffix(".weight") for key in routers} & scaled
    assert {*ignored} == {"lm_head", *(key.removesuffix(".weight") for key in routers)}

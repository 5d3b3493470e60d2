"""Rows that an expert rank reads are its slice, and no others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from placement.model.checkpoint import StoredTensor  # noqa: E402
from placement.model.expert_tensors import ExpertTensors  # noqa: E402
from ray_hetero.errors import UnsupportedError  # noqa: E402
from ray_hetero.kernels.experts.file_experts import Rows  # noqa: E402
from ray_hetero.worker.expert_rows import ExpertRows, Key, Share  # noqa: E402

FILE = Path("weights")
HIDDEN, INNER = 128, 256
FP8 = {"quant_method": "fp8", "weight_block_size": [64, 64]}
INT4 = {
    "quant_method": "compressed-tensors", "format": "pack-quantized",
    "config_groups": {
        "g": {"weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}}
    },
}  # fmt: skip


def tensors(settings: Any, architecture: str = "Qwen3MoeForCausalLM") -> ExpertTensors:
    config = {"num_experts_per_tok": 1, "hidden_act": "silu", "quantization_config": settings}
    found = ExpertTensors.of(architecture, config)
    assert found is not None
    return found


def stored(dtype: str, *shape: int, offset: int = 0) -> StoredTensor:
    return StoredTensor(FILE, "", dtype, shape, offset)


def parts(dtype: str, end: str, *shapes: tuple[int, ...]) -> dict[Key, StoredTensor]:
    names = "gate_proj", "up_proj", "down_proj"
    return {
        (0, f"{name}.{end}"): stored(dtype, *shape, offset=1000 * number)
        for number, (name, shape) in enumerate(zip(names, shapes, strict=True))
    }


def plain(dtype: str = "BF16", inner: int = INNER) -> dict[Key, StoredTensor]:
    return parts(dtype, "weight", (inner, HIDDEN), (inner, HIDDEN), (HIDDEN, inner))


def found(settings: Any, layer: dict[Key, StoredTensor], share: Share, **more: Any) -> Any:
    return ExpertRows(tensors(settings, **more), share, lambda _: 7).of(layer)


def test_weights_in_bf16_are_divided_by_outputs_and_then_by_inputs() -> None:
    ((gate_up, down),) = found(None, plain(), Share(1, 2))
    row, half = 2 * HIDDEN, INNER // 2
    gate, up = (Rows(7, at + half * row, row, half) for at in (0, 1000))
    assert (gate_up.codes, gate_up.inputs, gate_up.outputs) == ((gate, up), HIDDEN, INNER)
    assert down.codes == (Rows(7, 2000 + INNER, 2 * INNER, HIDDEN),)
    assert (down.inputs, down.scales, down.groups) == (half, (), 0)


@pytest.mark.parametrize(("dtype", "is_widened"), [("F32", False), ("BF16", True), ("U8", False)])
def test_blocks_of_fp8(dtype: str, is_widened: bool) -> None:
    layer = parts("F8_E4M3", "weight", (INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER))
    layer |= parts(dtype, "weight_scale_inv", (4, 2), (4, 2), (2, 4))
    ((gate_up, down),) = found(FP8, layer, Share(1, 2))
    width = {"F32": 4, "BF16": 2, "U8": 1}[dtype]
    assert [rows.offset for rows in gate_up.scales] == [2 * 2 * width, 1000 + 2 * 2 * width]
    assert [rows.count for rows in gate_up.scales] == [2, 2]
    assert down.scales == (Rows(7, 2000 + 2 * width, 4 * width, 2),)
    assert (down.groups, down.outputs_per_scale, down.is_widened) == (2, 64, is_widened)


def test_a_scale_for_all_inputs_belongs_to_every_slice() -> None:
    layer = parts("I32", "weight_packed", (64, 16), (64, 16), (128, 8))
    layer |= parts("BF16", "weight_scale", (64, 1), (64, 1), (128, 1))
    assert found(INT4, layer, Share(0, 1)) is not None
    ((gate_up, down),) = found(INT4, layer, Share(1, 2))
    assert (gate_up.group, down.group, down.inputs) == (128, 64, 32)
    assert down.scales == (Rows(7, 2000, 2, 128),)
    assert down.codes[0].offset == 2000 + 16


def test_micro_floats_of_all_experts_are_in_one_tensor() -> None:
    layer: dict[Key, StoredTensor] = {
        (None, "gate_up_proj_blocks"): stored("U8", 3, 128, 4, 16),
        (None, "gate_up_proj_scales"): stored("U8", 3, 128, 4, offset=100_000),
        (None, "down_proj_blocks"): stored("U8", 3, 128, 4, 16, offset=200_000),
        (None, "down_proj_scales"): stored("U8", 3, 128, 4, offset=300_000),
    }
    mxfp4 = {"quant_method": "mxfp4"}
    pairs = found(mxfp4, layer, Share(1, 2), architecture="GptOssForCausalLM")
    assert len(pairs) == 3
    gate_up, down = pairs[2]
    assert gate_up.codes == (Rows(7, 2 * 128 * 64 + 64 * 64, 64, 64),)
    assert gate_up.scales == (Rows(7, 100_000 + 2 * 128 * 4 + 64 * 4, 4, 64),)
    assert down.codes == (Rows(7, 200_000 + 2 * 128 * 64 + 32, 64, 128),)
    assert (down.inputs, down.groups) == (64, 2)


def test_what_native_code_does_not_read_is_left() -> None:
    assert found(None, plain("F32"), Share(0, 1)) is None
    assert found(None, plain(inner=48), Share(0, 2)) is None
    layer = parts("F8_E4M3", "weight", (INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER))
    assert (
        found(FP8, layer | parts("F16", "weight_scale_inv", (4, 2), (4, 2), (2, 4)), Share(0, 1))
        is None
    )
    together: dict[Key, StoredTensor] = {
        (None, "gate_up_proj"): stored("BF16", 2, HIDDEN, INNER),
        (None, "down_proj"): stored("BF16", 2, INNER, HIDDEN),
    }
    assert found(None, together, Share(0, 1), architecture="GptOssForCausalLM") is None


@pytest.mark.parametrize(("inner", "ranks"), [(96, 1), (96, 2), (320, 2)])
def test_blocks_that_two_parts_or_ranks_would_share_are_refused(inner: int, ranks: int) -> None:
    blocks = -(-inner // 64)
    layer = parts("F8_E4M3", "weight", (inner, HIDDEN), (inner, HIDDEN), (HIDDEN, inner))
    layer |= parts("F32", "weight_scale_inv", (blocks, 2), (blocks, 2), (2, blocks))
    said = f"a multiple of 64 rows of gate and up in each expert rank, got {inner} / {ranks} = "
    with pytest.raises(UnsupportedError, match=said):
        found(FP8, layer, Share(0, ranks))


def test_what_is_missing_or_cannot_be_divided_is_named() -> None:
    layer = plain()
    del layer[0, "up_proj.weight"]
    with pytest.raises(KeyError, match=r"up_proj\.weight"):
        found(None, layer, Share(0, 1))
    with pytest.raises(UnsupportedError, match=r"Set experts\.ranks to a divisor of 256"):
        found(None, plain(), Share(0, 3))

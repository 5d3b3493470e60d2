"""gpt-oss as it is published: experts in MXFP4, all else in bf16; and the same weights in bf16."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from dequantised import weight_of
from safetensors.torch import load_file, save_file

from ray_hetero.cli.demo import micro_floats
from ray_hetero.cli.demo.model import ARCHITECTURES, SLIDING_WINDOW, DemoShape, write_demo_model

EXPERTS = 4
SCHEME = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
}
OF_EXPERTS = ("experts.gate_up_proj", "experts.down_proj")


def _config(shape: DemoShape, common: dict[str, Any]) -> Any:
    from transformers import GptOssConfig

    return GptOssConfig(
        **common,
        num_key_value_heads=shape.kv_heads,
        intermediate_size=shape.intermediate,
        head_dim=shape.head_size,
        num_local_experts=EXPERTS,
        num_experts_per_tok=2,
        sliding_window=SLIDING_WINDOW,
        tie_word_embeddings=False,
    )


def write_gpt_oss(directory: Path, shape: DemoShape) -> tuple[Path, Path]:
    """Write a demo checkpoint of gpt-oss into new folders of a directory.

    Returns:
        The checkpoint in MXFP4, and the one of the same weights in bf16.

    """
    quantised, plain = directory / "quantised", directory / "plain"
    with patch.dict(ARCHITECTURES, {"gpt_oss": _config}):
        write_demo_model(plain, "gpt_oss", shape=shape)
    shutil.copytree(plain, quantised)
    config = json.loads((plain / "config.json").read_text())
    (quantised / "config.json").write_text(json.dumps(config | {"quantization_config": SCHEME}))
    state = load_file(plain / "model.safetensors")
    stored: dict[str, torch.Tensor] = {}
    for name, weights in list(state.items()):
        if not name.endswith(OF_EXPERTS):
            stored[name] = weights
            continue
        # [experts, inputs, outputs]
        outputs = [weight.t().float().contiguous() for weight in weights]
        parts = [micro_floats.mxfp4_tensors(weight, 0) for weight in outputs]
        blocks = torch.stack([part["weight_packed"] for part in parts])
        stored[f"{name}_blocks"] = blocks.unflatten(-1, (-1, micro_floats.GROUP // 2))
        stored[f"{name}_scales"] = torch.stack([part["weight_scale"] for part in parts])
        rounded = [weight_of(part, SCHEME).t().to(torch.bfloat16) for part in parts]
        state[name] = torch.stack(rounded).contiguous()
    save_file(stored, quantised / "model.safetensors", metadata={"format": "pt"})
    save_file(state, plain / "model.safetensors", metadata={"format": "pt"})
    return quantised, plain

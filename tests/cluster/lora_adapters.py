"""LoRA adapters of random matrices for demo models."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from ray_hetero.cli.demo.model import DemoShape

EVERYWHERE = (
    "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
)  # fmt: skip


def write_adapter(
    folder: Path, shape: DemoShape, *, rank: int, modules: Sequence[str] = EVERYWHERE,
    seed: int = 1, scale: float = 0.3,
) -> Path:  # fmt: skip
    """Write an adapter of a demo model of Llama's architecture.

    Args:
        folder: for its files.
        shape: of the model.
        rank: of the matrices.
        modules: linear layers that it has matrices for, in every decoder layer.
        seed: of the random numbers.
        scale: of the matrices' elements.

    Returns:
        The folder.

    """
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    random = torch.Generator().manual_seed(seed)
    keys = shape.kv_heads * shape.head_size
    sizes = {
        "q_proj": (shape.hidden, shape.hidden), "k_proj": (keys, shape.hidden),
        "v_proj": (keys, shape.hidden), "o_proj": (shape.hidden, shape.hidden),
        "gate_proj": (shape.intermediate, shape.hidden),
        "up_proj": (shape.intermediate, shape.hidden),
        "down_proj": (shape.hidden, shape.intermediate),
    }  # fmt: skip
    matrices = {}
    for layer in range(shape.layers):
        for name in modules:
            outputs, inputs = sizes[name]
            part = "self_attn" if name[0] in "qkvo" else "mlp"
            place = f"base_model.model.model.layers.{layer}.{part}.{name}"
            for side, size in (("A", (rank, inputs)), ("B", (outputs, rank))):
                matrix = scale * torch.randn(size, generator=random)
                matrices[f"{place}.lora_{side}.weight"] = matrix
    save_file(matrices, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none"}
    config["target_modules"] = list(modules)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def write_merged(model: Path, adapter: Path, target: Path) -> Path:
    """Write a model's checkpoint with an adapter added to its weights; answers the folder."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, target)
    weights = load_file(target / "model.safetensors")
    matrices = load_file(adapter / "adapter_model.safetensors")
    config = json.loads((adapter / "adapter_config.json").read_text())
    ends = (".lora_A.weight", ".lora_B.weight")
    for name in {key.removesuffix(ends[0]) for key in matrices if key.endswith(ends[0])}:
        down, up = (matrices[name + end] for end in ends)
        weight = weights[name.removeprefix("base_model.model.") + ".weight"]
        weight += config["lora_alpha"] / config["r"] * (up @ down)
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    return target

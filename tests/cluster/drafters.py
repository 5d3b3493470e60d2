"""Small drafters for the demo model, written so that some of their drafts are accepted.

The demo model's output matrix favours one successor of each token whatever came before
(ray_hetero/cli/demo/weights.py).  A draft model of fewer layers knows the same successors.  An
EAGLE head is given the last token's embedding and has the target's output matrix: it knows them as
soon as it hands the embedding on.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from ray_hetero.cli.demo.model import DemoShape, write_demo_model

SHAPE = DemoShape()
SLICE = SHAPE.kv_heads * SHAPE.head_size
"""Elements of an embedding that fit into the values of an attention."""
KEPT = (
    "hidden_size", "head_dim", "num_attention_heads", "num_key_value_heads", "intermediate_size",
    "vocab_size", "max_position_embeddings", "bos_token_id", "eos_token_id",
)  # fmt: skip
"""Keys of a target's configuration that a head of another class has too."""
SHARPNESS = 3.0
"""Factor on queries and keys under which a token attends to itself more than to all others."""

Weights = dict[str, torch.Tensor]


def write_draft_model(directory: Path) -> Path:
    """A draft model: the demo model with half of its layers."""
    return write_demo_model(directory, shape=DemoShape(layers=2), dtype="f32")


def write_eagle_head(directory: Path, target: Path) -> Path:
    """An EAGLE head: what it is given passes a layer that adds little."""
    noise = _noise("fc", SHAPE.hidden, SHAPE.hidden)
    weights = _quiet_layer("layers.0", SHAPE.hidden)
    weights["fc.weight"] = torch.cat([torch.eye(SHAPE.hidden), 0.02 * noise], dim=1)
    return _write(directory, target, weights)


def write_llama_eagle_head(directory: Path, target: Path) -> Path:
    """An EAGLE head for a target of any class, whose sizes it has: a layer of Llama's."""
    given = json.loads((target / "config.json").read_text())
    config = {name: given[name] for name in KEPT}
    hidden, sliced = config["hidden_size"], config["num_key_value_heads"] * config["head_dim"]
    weights = _quiet_layer("layers.0", hidden, hidden, sliced, config["intermediate_size"])
    noise = _noise("fc", hidden, hidden)
    weights["fc.weight"] = torch.cat([torch.eye(hidden), 0.02 * noise], dim=1)
    directory.mkdir()
    config |= {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (directory / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    return directory


def write_eagle3_head(directory: Path, target: Path) -> Path:
    """An EAGLE-3 head, which sees the embedding only where its attention hands it on."""
    weights = _quiet_layer("midlayer", 2 * SHAPE.hidden)
    first = torch.eye(SLICE, 2 * SHAPE.hidden)
    heads = torch.arange(SHAPE.hidden) // SHAPE.head_size
    shared = heads // (SHAPE.heads // SHAPE.kv_heads)
    of_slice = shared * SHAPE.head_size + torch.arange(SHAPE.hidden) % SHAPE.head_size
    attention = "midlayer.self_attn"
    weights |= {
        "fc.weight": 0.02 * _noise("fc", SHAPE.hidden, 3 * SHAPE.hidden),
        "norm.weight": torch.ones(SHAPE.hidden),
        "midlayer.input_layernorm.weight": torch.ones(SHAPE.hidden),
        "midlayer.hidden_norm.weight": torch.ones(SHAPE.hidden),
        f"{attention}.q_proj.weight": SHARPNESS * first[of_slice],
        f"{attention}.k_proj.weight": first.clone(),
        f"{attention}.v_proj.weight": first.clone(),
        # Query heads that share a value head bring the same; half of each makes one.
        f"{attention}.o_proj.weight": 0.5 * torch.eye(SHAPE.hidden)[of_slice].T.contiguous(),
    }
    # vLLM's own choice would name one of the four layers twice.
    reads = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3], "use_aux_hidden_state": True}
    return _write(directory, target, weights, eagle_config=reads)


def write_mtp_model(directory: Path, target: Path) -> Path:
    """The target's own weights as a MiMo checkpoint, with a layer that predicts one token more.

    MiMo is Qwen2 with such layers, and Qwen2 is Llama with biases, which are 0 here.
    """
    weights = load_file(target / "model.safetensors")
    layer = "model.mtp_layers.0"
    weights |= _quiet_layer(layer, SHAPE.hidden)
    norms = ("token_layernorm", "hidden_layernorm", "input_layernorm", "final_layernorm")
    weights |= {f"{layer}.{name}.weight": torch.ones(SHAPE.hidden) for name in norms}
    noise = _noise("input_proj", SHAPE.hidden, SHAPE.hidden)
    weights[f"{layer}.input_proj.weight"] = torch.cat([0.02 * noise, torch.eye(SHAPE.hidden)], 1)
    for name, weight in list(weights.items()):
        if any(part in name for part in ("q_proj", "k_proj", "v_proj")):
            weights[name.replace("weight", "bias")] = torch.zeros(len(weight))
    for file in target.iterdir():
        if file.suffix in (".json", ".jinja") and not file.name.endswith("index.json"):
            (directory / file.name).parent.mkdir(exist_ok=True)
            (directory / file.name).write_bytes(file.read_bytes())
    config = json.loads((target / "config.json").read_text())
    config |= {
        "model_type": "qwen2", "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    return directory


def favour_successors(model: Path, factor: float = 25.0, share: float = 0.5) -> None:
    """Let the output matrix of a random model favour one successor of each token.

    Args:
        model: folder of the checkpoint.
        factor: on the embedding, so that more of it is left behind the layers.
        share: of the predecessor's embedding in a row of the matrix.

    """
    weights = load_file(model / "model.safetensors")
    embedding, rows = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    embedding *= factor
    unit = embedding / embedding.std() / rows.shape[1] ** 0.5
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1))
    rows[order] += share * unit[order.roll(1)]
    save_file(weights, model / "model.safetensors", {"format": "pt"})


def add_mtp_layer(model: Path, like: str) -> None:
    """Add a layer that predicts one token more, as Qwen3-Next's checkpoints have it.

    Args:
        model: folder of the checkpoint.
        like: name of the model's layer whose weights it has, small.

    """
    weights = load_file(model / "model.safetensors")
    hidden = weights["model.embed_tokens.weight"].shape[1]
    for name, weight in list(weights.items()):
        if name.startswith(f"{like}."):
            own = name.replace(like, "mtp.layers.0")
            weights[own] = 0.03 * weight if weight.dim() > 1 else weight.clone()
    noise = _noise("fc", hidden, hidden)
    weights["mtp.fc.weight"] = torch.cat([torch.eye(hidden), 0.02 * noise], dim=1)
    for norm in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        weights[f"mtp.{norm}.weight"] = torch.zeros(hidden)
    save_file(weights, model / "model.safetensors", {"format": "pt"})


def _quiet_layer(
    name: str, width: int, hidden: int = SHAPE.hidden, sliced: int = SLICE,
    inner: int = SHAPE.intermediate,
) -> Weights:  # fmt: skip
    """A decoder layer without its first norm, the weights of which are small.

    Args:
        name: of the layer.
        width: of what its attention is given.
        hidden: width of the layer.
        sliced: width of its keys.
        inner: width of its MLP.

    """
    shapes = {
        "self_attn.q_proj": (hidden, width),
        "self_attn.k_proj": (sliced, width),
        "self_attn.v_proj": (sliced, width),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    made = {f"{name}.{part}.weight": 0.03 * _noise(part, *size) for part, size in shapes.items()}
    return made | {f"{name}.post_attention_layernorm.weight": torch.ones(hidden)}


def _noise(name: str, *size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(sum(map(ord, name))))


def _write(directory: Path, target: Path, weights: Weights, **more: Any) -> Path:
    directory.mkdir()
    config = json.loads((target / "config.json").read_text())
    config |= {"num_hidden_layers": 1, **more}
    (directory / "config.json").write_text(json.dumps(config))
    save_file(weights, directory / "model.safetensors")
    return directory

"""A checkpoint of heavy_tailed.py as a GGUF file, so that llama.cpp computes the same weights.

    python benchmarks/gguf_file.py tiny-moe FILE.gguf
    python benchmarks/gguf_file.py tiny-moe FILE.gguf --experts mxfp4

Matrices stay in bf16, routed experts if they are not to be rounded to MXFP4; norms and routers are
float32, as llama.cpp's own converter has them.  The file has no tokenizer: prompts of benchmarks
are numbers.  Needs the package `gguf`.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from heavy_tailed import EMBEDDINGS, HEAD, heavy_tailed_folder, write_checkpoint
from safetensors import safe_open
from shapes import SHAPES, config_of, head_size

OF_LAYERS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate": "ffn_gate_inp",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""Names of a layer's tensors, in checkpoints and in GGUF files."""
OTHERS = {
    EMBEDDINGS: "token_embd",
    "model.norm.weight": "output_norm",
    HEAD: "output",
}
AS_FLOAT32 = ("_norm", "ffn_gate_inp")
"""Ends of the names of tensors that llama.cpp wants in float32."""

EXPERTS = {"bf16": "", "mxfp4": "MXFP4"}
"""Formats of routed experts: the names that the package `gguf` has for those that are rounded."""


@dataclass(frozen=True)
class Tensor:
    """A tensor of a GGUF file, made of one of the checkpoint, or of all experts of a layer."""

    name: str
    parts: tuple[str, ...]
    shape: tuple[int, ...]
    heads: int = 0
    """Heads of a matrix whose rows llama.cpp rotates in pairs of neighbours, not of halves."""

    @property
    def is_float32(self) -> bool:
        """Whether it is stored so, not in bf16."""
        return self.name.endswith(AS_FLOAT32)

    @property
    def is_expert(self) -> bool:
        """Whether it is all routed experts of a layer."""
        return len(self.shape) == 3

    def values(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """Values in the form that the file holds."""
        found = torch.stack(parts) if self.is_expert else parts[0]
        if self.heads:
            halves = found.view(self.heads, 2, -1, found.shape[1])
            found = halves.transpose(1, 2).reshape(found.shape)
        return found.float() if self.is_float32 else found.view(torch.uint16)


def tensors_of(name: str) -> Iterator[Tensor]:
    """All tensors of a shape."""
    shape = SHAPES[name]
    hidden, size = shape["hidden_size"], head_size(shape)
    heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    experts, inner = shape.get("num_experts", 0), shape["intermediate_size"]
    sizes: dict[str, tuple[int, ...]] = {
        "attn_norm": (hidden,), "ffn_norm": (hidden,),
        "attn_q": (heads * size, hidden), "attn_k": (kv_heads * size, hidden),
        "attn_v": (kv_heads * size, hidden), "attn_output": (hidden, heads * size),
    }  # fmt: skip
    if experts:
        sizes |= {"attn_q_norm": (size,), "attn_k_norm": (size,), "ffn_gate_inp": (experts, hidden)}
        inner = shape["moe_intermediate_size"]
    # The architecture of Llama rotates neighbours, that of Qwen halves as checkpoints do.
    paired = {} if experts else {"attn_q": heads, "attn_k": kv_heads}
    sizes |= {"ffn_gate": (inner, hidden), "ffn_up": (inner, hidden), "ffn_down": (hidden, inner)}
    in_checkpoint = {ours: theirs for theirs, ours in OF_LAYERS.items()}
    for layer in range(shape["num_hidden_layers"]):
        before = f"model.layers.{layer}."
        for tensor, of_one in sizes.items():
            source = in_checkpoint[tensor]
            if experts and tensor in ("ffn_gate", "ffn_up", "ffn_down"):
                own = source.removeprefix("mlp.")
                parts = tuple(f"{before}mlp.experts.{i}.{own}.weight" for i in range(experts))
                yield Tensor(f"blk.{layer}.{tensor}_exps", parts, (experts, *of_one))
            else:
                parts = (f"{before}{source}.weight",)
                yield Tensor(f"blk.{layer}.{tensor}", parts, of_one, paired.get(tensor, 0))
    words = shape["vocab_size"]
    for source, tensor in OTHERS.items():
        yield Tensor(tensor, (source,), (hidden,) if tensor == "output_norm" else (words, hidden))


def write_gguf(name: str, path: Path, experts: str = "bf16") -> Path:
    """Write the checkpoint of a shape, and the GGUF file of it; answers the file.

    Args:
        name: a key of `SHAPES`.
        path: of the file; one that is there is left as it is.
        experts: format of routed experts, a key of `EXPERTS`.

    """
    import numpy as np
    from gguf import GGMLQuantizationType, GGUFWriter
    from gguf.quants import quant_shape_to_byte_shape, quantize

    if path.exists():
        return path
    folder = write_checkpoint(name, heavy_tailed_folder(name))
    path.parent.mkdir(parents=True, exist_ok=True)
    # An interrupted file is written again.
    part = path.with_suffix(".part")
    writer = GGUFWriter(part, "qwen3moe" if "num_experts" in SHAPES[name] else "llama")
    write_keys(writer, name)
    # What there is comes before the values, of which one tensor at a time is in memory.
    for tensor in tensors_of(name):
        dtype = np.dtype("float32" if tensor.is_float32 else "uint16")
        kind = None if tensor.is_float32 else GGMLQuantizationType.BF16
        shape, nbytes = tensor.shape, math.prod(tensor.shape) * dtype.itemsize
        if tensor.is_expert and EXPERTS[experts]:
            dtype, kind = np.dtype("uint8"), GGMLQuantizationType[EXPERTS[experts]]
            shape = quant_shape_to_byte_shape(shape, kind)
            nbytes = math.prod(shape)
        writer.add_tensor_info(f"{tensor.name}.weight", shape, dtype, nbytes, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in tensors_of(name):
        if tensor.is_expert and EXPERTS[experts]:
            kind = GGMLQuantizationType[EXPERTS[experts]]
            # One expert after the other: rounding takes several times their memory.
            rounded = [quantize(one.float().numpy(), kind) for one in read(folder, tensor.parts)]
            writer.write_tensor_data(np.stack(rounded))
            continue
        values = tensor.values(read(folder, tensor.parts))
        assert tuple(values.shape) == tensor.shape, tensor
        writer.write_tensor_data(values.contiguous().numpy())
    writer.close()
    part.rename(path)
    return path


def write_keys(writer: Any, name: str) -> None:
    """Write the keys by which llama.cpp reads a shape."""
    shape, config = SHAPES[name], config_of(name)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(shape["hidden_size"])
    writer.add_block_count(shape["num_hidden_layers"])
    writer.add_feed_forward_length(shape["intermediate_size"])
    writer.add_head_count(shape["num_attention_heads"])
    writer.add_head_count_kv(shape["num_key_value_heads"])
    for add in (writer.add_key_length, writer.add_value_length, writer.add_rope_dimension_count):
        add(head_size(shape))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(shape["vocab_size"])
    writer.add_tokenizer_model("none")
    if "num_experts" in shape:
        writer.add_expert_count(shape["num_experts"])
        writer.add_expert_used_count(shape["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(shape["moe_intermediate_size"])


def read(folder: Path, names: tuple[str, ...]) -> list[torch.Tensor]:
    """Tensors of a checkpoint, all in one of its files."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    (file,) = {index[name] for name in names}
    with safe_open(folder / file, "pt") as opened:
        return [opened.get_tensor(name) for name in names]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("file", type=Path)
    parser.add_argument("--experts", choices=EXPERTS, default="bf16")
    options = parser.parse_args()
    print(write_gguf(options.shape, options.file, options.experts))

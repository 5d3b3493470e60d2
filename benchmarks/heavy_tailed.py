"""Checkpoints of a known shape with heavy-tailed weights, as trained ones have them.

    python benchmarks/heavy_tailed.py 8b FOLDER

How many bytes compact weights take depends on the values, so that vLLM's dummy weights, which are
evenly spread, say nothing about them.  Values are Student's t with 5 degrees of freedom.
One block of them serves all matrices, each from a place of its own in it: drawing billions would
take longer than writing them.

Greedy text of such a checkpoint repeats itself after `CIRCLE` tokens, so that drafts taken from the
text so far are accepted: an embedding is larger than what all layers add to it, and the head has
each token's embedding at the token that follows it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from shapes import SHAPES, config_of, head_size

DEGREES = 5
SPREAD = 0.02
"""Standard deviation of the weights, as initialisers of such models have it."""
DRAWN = 1 << 24
"""Values that are drawn."""
CIRCLE = 16
"""Tokens after which greedy text repeats itself; it divides all vocabularies."""
EMBEDDED = 2048.0
"""Factor by which an embedding is larger than other weights.  Each layer adds a few units to a
hidden state, whose embedding then has about fifty; a power of two changes no mantissa."""
WRITERS = 4
EMBEDDINGS = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


def heavy_tailed_folder(name: str) -> Path:
    """Where the engines of all benchmarks look for the checkpoint of a shape."""
    return Path(tempfile.gettempdir()) / "ray_hetero_shapes" / f"{name}-heavy-tailed"


def drawn_values() -> torch.Tensor:
    """The block that all matrices are taken from, [`DRAWN`], bf16."""
    values = np.random.default_rng(0).standard_t(DEGREES, DRAWN)
    return torch.from_numpy(SPREAD * values).bfloat16()


def drawn_matrix(drawn: torch.Tensor, outputs: int, inputs: int) -> torch.Tensor:
    """A matrix [outputs, inputs] of the block's values, over and over."""
    values = outputs * inputs
    return drawn.repeat(-(-values // len(drawn)))[:values].view(outputs, inputs)


def write_checkpoint(name: str, folder: Path) -> Path:
    """Write config.json and a safetensors file for each layer; answers the folder.

    Args:
        name: a key of `SHAPES`.
        folder: where to; a folder that holds this checkpoint already is left as it is.

    """
    done = folder / "config.json"
    if done.exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    drawn = drawn_values()
    files = {f"layer-{i}.safetensors": dict(_layer(name, i)) for i in range(_layers(name))}
    files["others.safetensors"] = dict(_others(name))
    with ThreadPoolExecutor(WRITERS) as pool:
        for future in [
            pool.submit(_write, folder / file, tensors, drawn) for file, tensors in files.items()
        ]:
            future.result()
    index = {tensor: file for file, tensors in files.items() for tensor in tensors}
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": index})
    )
    # The last file: an interrupted checkpoint is written again.
    done.write_text(json.dumps(config_of(name)))
    # A disk that is still written to takes time from the cores that are measured next.
    os.sync()
    return folder


def _write(path: Path, tensors: dict[str, tuple[int, ...]], drawn: torch.Tensor) -> None:
    save_file({name: _values(name, shape, drawn) for name, shape in tensors.items()}, path)


def _values(name: str, shape: tuple[int, ...], drawn: torch.Tensor) -> torch.Tensor:
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    if name == HEAD:
        embedded = _values(EMBEDDINGS, shape, drawn).view(-1, CIRCLE, shape[1])
        return (embedded.roll(1, dims=1) / EMBEDDED).view(shape)
    # The same place for the same name; places are not aligned with each other.
    start = sum((i + 1) * 7919 * byte for i, byte in enumerate(name.encode())) % DRAWN
    values = torch.empty(math.prod(shape), dtype=torch.bfloat16)
    for at in range(0, len(values), DRAWN):
        part = values[at : at + DRAWN]
        head = drawn[start:][: len(part)]
        part[: len(head)] = head
        part[len(head) :] = drawn[: len(part) - len(head)]
    if name == EMBEDDINGS:
        values *= EMBEDDED
    return values.view(shape)


def _layers(name: str) -> int:
    return SHAPES[name]["num_hidden_layers"]


def _layer(name: str, index: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    shape = SHAPES[name]
    hidden, size = shape["hidden_size"], head_size(shape)
    queries, kv = (shape[f"num_{which}_heads"] * size for which in ("attention", "key_value"))
    before = f"model.layers.{index}."
    yield f"{before}input_layernorm.weight", (hidden,)
    yield f"{before}post_attention_layernorm.weight", (hidden,)
    yield f"{before}self_attn.q_proj.weight", (queries, hidden)
    yield f"{before}self_attn.k_proj.weight", (kv, hidden)
    yield f"{before}self_attn.v_proj.weight", (kv, hidden)
    yield f"{before}self_attn.o_proj.weight", (hidden, queries)
    if experts := shape.get("num_experts"):
        yield f"{before}self_attn.q_norm.weight", (size,)
        yield f"{before}self_attn.k_norm.weight", (size,)
        yield f"{before}mlp.gate.weight", (experts, hidden)
        for number in range(experts):
            yield from _mlp(
                f"{before}mlp.experts.{number}.", hidden, shape["moe_intermediate_size"]
            )
    else:
        yield from _mlp(f"{before}mlp.", hidden, shape["intermediate_size"])


def _mlp(before: str, hidden: int, inner: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{before}gate_proj.weight", (inner, hidden)
    yield f"{before}up_proj.weight", (inner, hidden)
    yield f"{before}down_proj.weight", (hidden, inner)


def _others(name: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, words = SHAPES[name]["hidden_size"], SHAPES[name]["vocab_size"]
    yield EMBEDDINGS, (words, hidden)
    yield "model.norm.weight", (hidden,)
    yield HEAD, (words, hidden)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    print(write_checkpoint(options.shape, options.folder))

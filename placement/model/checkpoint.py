"""Tensor sizes of a local checkpoint, from the headers of its safetensors files alone.

A safetensors file starts with eight bytes, the little-endian length of a JSON object that gives
each tensor's dtype, shape and place (https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from placement.given import shown
from placement.model.config import MOST, UnknownModelError, json_object
from placement.model.quantisation import Stored
from placement.model.tensors import is_multiplied

_DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64,
}  # fmt: skip
_FLOATS = ("F16", "BF16", "F32", "F64")
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.\d+\.")
_NOT_TEXT = re.compile(r"(^|\.)(vision|visual|vit|audio|image|mm_|multi_modal|siglip)")
_NOT_LOADED = re.compile(r"rotary_emb\.inv_freq$|\.attn\.(masked_)?bias$")
_EMBEDDING = re.compile(r"(embed_tokens|wte|word_embeddings|embed_positions|wpe|project_in)\.")
_LAST = re.compile(r"(^|\.)(norm|ln_f|final_layer_norm|final_layernorm|norm_f|project_out)\.")
_HEAD = re.compile(r"(^|\.)(lm_head|embed_out|output)\.")
_LONGEST_HEADER = 100_000_000


@dataclass(frozen=True)
class Sorted:
    """A checkpoint's tensors by where they belong; names of a layer without its prefix."""

    layers: dict[int, dict[str, tuple[Stored, int]]]
    """Tensors by layer index and name, each with the number of experts that have it."""
    embedding: tuple[Stored, ...]
    final_norm: tuple[Stored, ...]
    output_head: tuple[Stored, ...]
    extra: tuple[Stored, ...]
    """Vision and audio towers and whatever else is no part of the decoder."""


def read_headers(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtype and shape of every tensor of a checkpoint directory.

    Raises:
        UnknownModelError: there is no safetensors file, or one is damaged.

    """
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    for file in _files(path):
        for name, entry in _header(file).items():
            if name != "__metadata__":
                tensors[name] = _entry(file, name, entry)
    return tensors


def _entry(file: Path, name: str, entry: object) -> tuple[str, tuple[int, ...]]:
    found = entry if isinstance(entry, dict) else {}
    dtype, shape = found.get("dtype"), found.get("shape")
    sizes = shape if isinstance(shape, list) else [None]
    if isinstance(dtype, str) and all(type(size) is int and 0 <= size <= MOST for size in sizes):
        return dtype, tuple(sizes)
    raise UnknownModelError(
        f"{file}: tensor {shown(name)}: expected its dtype and shape, got {shown(entry)}"
    )


def _files(path: Path) -> list[Path]:
    index = path / "model.safetensors.index.json"
    if index.is_file():
        # A directory may hold the same weights twice (consolidated.safetensors): the index decides.
        files = [path / name for name in sorted(_names_in(index))]
    elif (path / "model.safetensors").is_file():
        files = [path / "model.safetensors"]
    else:
        files = sorted(path.glob("*.safetensors"))
    missing = [file.name for file in files if not file.is_file()]
    if missing or not files:
        raise UnknownModelError(
            f"{path}: expected safetensors files, "
            + (f"{', '.join(missing)} of the index are missing" if missing else "found none")
        )
    return files


def _names_in(index: Path) -> set[str]:
    names = json_object(index.read_bytes(), index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise UnknownModelError(f"{index}: expected weight_map with the file of every tensor")
    return set(names.values())


def _header(file: Path) -> dict[str, Any]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, _LONGEST_HEADER):
            raise UnknownModelError(
                f"{file}: no safetensors header: it says {length} bytes, the file has {size}"
            )
        return json_object(stream.read(length), f"{file}: header")


def sort_tensors(
    headers: Mapping[str, tuple[str, tuple[int, ...]]],
    layers: int,
    *,
    float_bytes: int | None,
    bits: int,
) -> Sorted:
    """Sort tensors by layer, experts of a layer together.

    Layers with an index of `layers` or above (multi-token prediction) are left out: vLLM loads
    them for speculative decoding only.

    Args:
        headers: as from `read_headers`.
        layers: decoder layers of the model.
        float_bytes: width that plain weights are loaded with; None leaves them as stored.
        bits: width of packed quantised weights.

    """
    decoder: dict[int, dict[str, tuple[Stored, int]]] = {i: {} for i in range(layers)}
    rest: dict[str, list[Stored]] = {"embedding": [], "final": [], "head": [], "extra": []}
    for name, stored in _loaded(headers, float_bytes, bits):
        layer = None if _NOT_TEXT.search(name) else _LAYER.search(name)
        if layer is None:
            rest[_place(name)].append(stored)
        elif (index := int(layer.group(1))) < layers:
            short = _EXPERT.sub(".experts.*.", name[layer.end() :])
            known = decoder[index].get(short)
            decoder[index][short] = (
                Stored(short, stored.elements, stored.dtype_bytes, stored.values),
                known[1] + 1 if known else 1,
            )
    return Sorted(
        decoder,
        tuple(rest["embedding"]),
        tuple(rest["final"]),
        tuple(rest["head"]),
        tuple(rest["extra"]),
    )


def _place(name: str) -> str:
    if _NOT_TEXT.search(name):
        return "extra"
    if _EMBEDDING.search(name):
        return "embedding"
    if _HEAD.search(name):
        return "head"
    return "final" if _LAST.search(name) else "extra"


def _loaded(
    headers: Mapping[str, tuple[str, tuple[int, ...]]], float_bytes: int | None, bits: int
) -> Iterator[tuple[str, Stored]]:
    for name, (dtype, shape) in sorted(headers.items()):
        if _NOT_LOADED.search(name):
            continue
        width, elements = _width(name, dtype), math.prod(shape)
        if float_bytes and dtype in _FLOATS and _takes_model_dtype(name):
            width = float_bytes
        values = _values(name, dtype, bits) if len(shape) > 1 and is_multiplied(name) else 0
        yield name, Stored(name, elements, width, values)


def _takes_model_dtype(name: str) -> bool:
    return not re.search(r"scales?$|scale_inv$|e_score_correction_bias$", name)


def _values(name: str, dtype: str, bits: int) -> int:
    if name.endswith(("qweight", "weight_packed")) and dtype == "I32":
        return 32 // bits
    return 2 if dtype == "U8" and bits == 4 else 1


def _width(name: str, dtype: str) -> int:
    if dtype not in _DTYPE_BITS:
        raise UnknownModelError(
            f"tensor {shown(name)} has dtype {shown(dtype)}; known are {', '.join(_DTYPE_BITS)}"
        )
    return _DTYPE_BITS[dtype] // 8

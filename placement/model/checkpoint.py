"""Tensor sizes of a local checkpoint, from the headers of its safetensors files alone.

A safetensors file starts with eight bytes, the little-endian length of a JSON object that gives
each tensor's dtype, shape and place (https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

from placement.given import file_shown, shown
from placement.model.config import (
    MOST,
    DamagedCheckpointError,
    UnknownModelError,
    json_object,
    read_object,
)
from placement.model.quantisation import Stored
from placement.model.tensors import is_multiplied
from placement.text_file import MissingFileError

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
LONGEST_HEADER = 100_000_000
"""Bytes of a file's header, as the format limits it."""
LONGEST_INDEX = 64 << 20
"""Bytes of an index."""
_MOST_DIMENSIONS = 64
_MOST_NAMED = 8
_DTYPE = re.compile(r"[A-Z][A-Z0-9_]{1,15}")
_NUMBERED = re.compile(r"\.\d+\.")
_FILE_NAME = re.compile(r"(?!\.{1,2}$)[^/\x00-\x1f]{1,255}")


Header = dict[str, tuple[str, tuple[int, ...]]]
"""Dtype and shape of tensors, by name."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file."""

    file: Path
    name: str
    dtype: str
    """Name of the type in the format."""
    shape: tuple[int, ...]
    offset: int
    """Bytes of the file before the tensor's."""

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * _DTYPE_BITS[self.dtype] // 8


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


def read_headers(path: Path) -> Header:
    """Dtype and shape of every tensor of a checkpoint directory.

    Raises:
        DamagedCheckpointError: a file is missing, damaged or not whole.
        UnknownModelError: there is no safetensors file, or one has a dtype that is not known.

    """
    tensors: Header = {}
    for file in weight_files(path):
        tensors |= _header(file)
    return tensors


def stored_tensors(path: Path) -> Iterator[StoredTensor]:
    """Tensors of a checkpoint directory, by file.

    Raises:
        DamagedCheckpointError: as `read_headers`.
        UnknownModelError: as `read_headers`.

    """
    for file in weight_files(path):
        for name, (dtype, shape, offset) in _entries(file).items():
            yield StoredTensor(file, name, dtype, shape, offset)


def check_layers(name: str, headers: Iterable[str], found: Sorted) -> None:
    """See that every layer of the config has a tensor.

    Args:
        name: of the checkpoint, for errors.
        headers: names of all tensors.
        found: the same, sorted.

    Raises:
        DamagedCheckpointError: some layers have none.
        UnknownModelError: tensors are numbered, but no layer is under a known name.

    """
    empty = [str(index) for index, tensors in found.layers.items() if not tensors]
    if not empty:
        return
    where = f"{name}: config.json has {len(found.layers)} layers (num_hidden_layers)"
    if len(empty) == len(found.layers) and any(_NUMBERED.search(name) for name in headers):
        raise UnknownModelError(
            f"{where}; expected them under a known name (layers.N, h.N or blocks.N)"
        )
    rest = f" and {len(empty) - _MOST_NAMED} more" if len(empty) > _MOST_NAMED else ""
    raise DamagedCheckpointError(
        f"{where}, and the safetensors files have no tensor of layer "
        f"{', '.join(empty[:_MOST_NAMED])}{rest}; is the checkpoint whole? Download it again, or "
        "correct num_hidden_layers"
    )


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of a checkpoint directory.

    Raises:
        DamagedCheckpointError: a file of the index is missing.
        UnknownModelError: there is none.

    """
    index = path / "model.safetensors.index.json"
    if index.is_file():
        # A directory may hold the same weights twice (consolidated.safetensors): the index decides.
        files = [path / name for name in sorted(_names_in(index))]
    elif (path / "model.safetensors").is_file():
        files = [path / "model.safetensors"]
    else:
        files = sorted(path.glob("*.safetensors"))
    missing = [file.name for file in files if not file.is_file()]
    if not files:
        raise UnknownModelError(f"{file_shown(path)}: expected safetensors files, found none")
    if missing:
        rest = f" and {len(missing) - _MOST_NAMED} more" if len(missing) > _MOST_NAMED else ""
        raise DamagedCheckpointError(
            f"{file_shown(path)}: expected safetensors files, {', '.join(missing[:_MOST_NAMED])}"
            f"{rest} of the index are missing; download the checkpoint again"
        )
    return files


def _names_in(index: Path) -> set[str]:
    try:
        content = read_object(index, "the index of a checkpoint", LONGEST_INDEX)
    except MissingFileError as error:
        raise DamagedCheckpointError(f"{file_shown(index)}: {error}") from None
    except UnknownModelError as error:
        raise DamagedCheckpointError(str(error)) from None
    return files_of_index(content, file_shown(index))


def files_of_index(content: Mapping[str, object], name: str) -> set[str]:
    """Names of the files that a checkpoint's index lists.

    Args:
        content: of model.safetensors.index.json.
        name: of the index, for errors.

    Raises:
        DamagedCheckpointError: it is no index, or names files elsewhere.

    """
    names = content.get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
        raise DamagedCheckpointError(f"{name}: expected weight_map with the file of every tensor")
    for file in names.values():
        # Files elsewhere are no part of the checkpoint; vLLM does not read them either.
        if not _FILE_NAME.fullmatch(file):
            raise DamagedCheckpointError(
                f"{name}: expected names of files in the same folder, like "
                f"model-00001-of-00002.safetensors, got {shown(file)}"
            )
    return set(names.values())


def _header(file: Path) -> Header:
    """Dtype and shape of every tensor of a file that is as long as its header says."""
    return {name: (dtype, shape) for name, (dtype, shape, _) in _entries(file).items()}


_Entries = dict[str, tuple[str, tuple[int, ...], int]]


def _entries(file: Path) -> _Entries:
    """Dtype, shape and offset of every tensor of a file that is as long as its header says."""
    name = file_shown(file)
    try:
        with file.open("rb") as stream:
            return _entries_of(stream.read, file.stat().st_size, name)
    except OSError as error:
        raise DamagedCheckpointError(f"{name}: cannot be read: {error.strerror}") from None


def header_of(read: Callable[[int], bytes], size: int, name: str) -> Header:
    """Dtype and shape of every tensor of a file that is as long as its header says.

    Args:
        read: gives so many bytes of the file, from its beginning on.
        size: bytes of the whole file.
        name: of the file, for errors.

    Raises:
        DamagedCheckpointError: the file has no header, or is shorter than it says.
        UnknownModelError: a tensor has a dtype that is not known.

    """
    return {key: entry[:2] for key, entry in _entries_of(read, size, name).items()}


def _entries_of(read: Callable[[int], bytes], size: int, name: str) -> _Entries:
    """Dtype, shape and offset of every tensor; arguments and errors as of `header_of`."""
    length = int.from_bytes(read(8), "little")
    if size < 8 or length > min(size - 8, LONGEST_HEADER):
        raise DamagedCheckpointError(
            f"{name}: no safetensors header: its length would be {length:,} bytes, and the "
            f"file has {size:,}; is the download whole?"
        )
    try:
        text = read(length).decode("utf-8")
    except UnicodeDecodeError as error:
        raise DamagedCheckpointError(f"{name}: header: not in UTF-8: {error.reason}") from None
    try:
        entries = json_object(text, f"{name}: header")
    except UnknownModelError as error:
        raise DamagedCheckpointError(str(error)) from None
    entries.pop("__metadata__", None)
    return {key: _tensor(name, key, entry, 8 + length, size) for key, entry in entries.items()}


def _tensor(
    file: str, name: str, entry: object, begin: int, size: int
) -> tuple[str, tuple[int, ...], int]:
    """Dtype, shape and offset of one tensor whose bytes are in the file.

    Args:
        file: its name, for errors.
        name: of the tensor.
        entry: what the header says of it.
        begin: bytes of the header, with its length.
        size: bytes of the file.

    """
    room = size - begin
    found = entry if isinstance(entry, dict) else {}
    dtype, shape, place = found.get("dtype"), found.get("shape"), found.get("data_offsets")
    if not (
        isinstance(dtype, str)
        and _DTYPE.fullmatch(dtype)
        and _are_sizes(shape)
        and len(shape) <= _MOST_DIMENSIONS
    ):
        raise DamagedCheckpointError(
            f"{file}: tensor {shown(name)}: expected its dtype and shape, got {shown(entry)}"
        )
    if not (_are_sizes(place, 2**63 - 1) and len(place) == 2 and place[0] <= place[1]):
        raise DamagedCheckpointError(
            f"{file}: tensor {shown(name)}: expected data_offsets, its first byte and the one "
            f"behind its last, got {shown(place)}"
        )
    if place[1] > room:
        raise DamagedCheckpointError(
            f"{file}: tensor {shown(name)} ends at byte {place[1]:,} of the data, and the file has "
            f"{room:,}: it is not whole; download it again"
        )
    if (bits := _DTYPE_BITS.get(dtype)) is None:
        raise UnknownModelError(
            f"{file}: tensor {shown(name)} has dtype {shown(dtype)}; known are "
            f"{', '.join(_DTYPE_BITS)}"
        )
    if math.prod(shape) * bits // 8 != place[1] - place[0]:
        raise DamagedCheckpointError(
            f"{file}: tensor {shown(name)}: {shown(shape)} in {dtype} takes "
            f"{math.prod(shape) * bits // 8:,} bytes, data_offsets has {place[1] - place[0]:,}; "
            "the file is damaged, download it again"
        )
    return dtype, tuple(shape), begin + place[0]


def _are_sizes(value: object, most: int = MOST) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(one) is int and 0 <= one <= most for one in value)


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
        width, elements = _DTYPE_BITS[dtype] // 8, math.prod(shape)
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

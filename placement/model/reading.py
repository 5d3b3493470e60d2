"""The sizes of a model: bytes of every layer's weights and of a token's KV cache.

From its Hugging Face config (`shape_from_config`), or exactly, for any architecture, from the
headers of a local checkpoint (`shape_from_safetensors`).  No weight is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from os.path import isdir
from pathlib import Path
from typing import Any, Literal

from placement.given import file_shown, shown
from placement.model.architectures import (
    ARCHITECTURES,
    Architecture,
    Experts,
    Matrix,
    Vector,
    architecture_of,
)
from placement.model.built import decoder_config
from placement.model.caches import cache_of, latents_of
from placement.model.checkpoint import Header, check_layers, read_headers, sort_tensors
from placement.model.config import (
    EXPERT_KEYS,
    Config,
    UnknownModelError,
    dtype_bytes,
    kv_bytes,
    read_object,
)
from placement.model.quantisation import (
    Quantised,
    Stored,
    config_groups,
    packed_bits,
    quantised_from,
    store,
    stored_together,
    weights_of,
)
from placement.model.shape import Mla, ModelShape
from placement.model.tensors import Layer, Tensor, is_multiplied, role_of, shards_of
from placement.model.undivided import uses_of
from placement.model.vocabulary import vocabulary_of
from placement.text_file import MissingFileError

DECODER = ("text_config", "quantization_config", "generation_config")
"""Sections of a config.json that describe no part beside the decoder."""

__all__ = [
    "Mla",
    "ModelShape",
    "UnknownModelError",
    "shape_from_config",
    "shape_from_safetensors",
    "shape_of",
]


def shape_of(
    model: str | Path | Mapping[str, Any], dtype: str | None = None, kv_dtype: str | None = None
) -> ModelShape:
    """Sizes of a model by the best source there is.

    Args:
        model: a checkpoint directory, a config.json, a directory that holds one, or its content.
        dtype: vLLM's `--dtype`; None or auto takes the config's.
        kv_dtype: vLLM's `--kv-cache-dtype`; None or auto takes the model's.

    Raises:
        UnknownModelError: no config there, or its architecture cannot be told from it.

    """
    if isinstance(model, Mapping):
        return shape_from_config(model, dtype, kv_dtype)
    path = Path(model)
    # Unlike Path's, it says no to a name that is too long for a file.
    if isdir(path) and any(path.glob("*.safetensors")):
        return shape_from_safetensors(path, dtype, kv_dtype)
    return shape_from_config(read_config(path), dtype, kv_dtype)


def read_config(path: Path) -> dict[str, Any]:
    """Content of a config.json, given by its path or its directory.

    Raises:
        UnknownModelError: there is none, or it is not a JSON object.

    """
    file = path / "config.json" if isdir(path) else path
    if file.suffix in (".yaml", ".yml"):
        raise UnknownModelError(
            f"{file_shown(file)}: expected a model's config.json, got YAML; a description of "
            "machines is for --topology"
        )
    try:
        return read_object(file, "a model's config.json")
    except MissingFileError:
        missing = (
            "in this folder there is no config.json" if file != path else "there is no such file"
        )
        raise UnknownModelError(
            f"{file_shown(path)}: {missing}; expected a checkpoint's folder, its config.json, or a "
            "name on the hub, like Qwen/Qwen3-32B"
        ) from None


def shape_from_config(
    config: Mapping[str, Any], dtype: str | None = None, kv_dtype: str | None = None
) -> ModelShape:
    """Sizes of a model of a known architecture, from its config alone.

    Raises:
        UnknownModelError: the model_type, the quantisation or a needed key is not known.

    """
    reader = decoder_config(config)
    architecture = architecture_of(reader)
    towers = [
        key for key in config if key.endswith("_config") and key not in DECODER and config[key]
    ]
    if architecture is None or (reader.values is not config and towers):
        raise UnknownModelError(
            f"config.json: model_type {shown(config.get('model_type'))} is not known from its "
            f"config alone{_of_class(config)} (known: {', '.join(sorted(ARCHITECTURES))})"
        )
    width = dtype_bytes(dtype, config)
    quantised = quantised_from(reader, width)
    layers = tuple(
        Layer(
            index,
            tuple(_layer_tensors(architecture, reader, index, width, quantised)),
            cache_of(reader, index, kv_bytes(kv_dtype, width)),
        )
        for index in range(reader.layers)
    )
    tied = reader.flag("tie_word_embeddings", architecture.tied)
    around = vocabulary_of(reader, width, tied=tied)
    rest = tuple(
        tuple(_tensor(part, reader) for part in parts)
        for parts in (around.embedding, around.final_norm, around.output_head, ())
    )
    return _shape(reader, "config", layers, rest, width)


def _of_class(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    if (
        str(config.get("model_type")) not in ARCHITECTURES
        or not isinstance(names, list)
        or not names
    ):
        return ""
    return f" with the architecture {shown(names[0])}"


def shape_from_safetensors(
    path: str | Path, dtype: str | None = None, kv_dtype: str | None = None
) -> ModelShape:
    """Sizes of a local checkpoint of any architecture; its config.json gives heads and windows.

    Raises:
        UnknownModelError: files are missing or damaged, or the config lacks a needed key.

    """
    directory = Path(path)
    config = read_config(directory)
    return shape_from_headers(
        read_headers(directory), config, file_shown(directory), dtype, kv_dtype
    )


def shape_from_headers(
    headers: Header,
    config: Mapping[str, Any],
    name: str,
    dtype: str | None = None,
    kv_dtype: str | None = None,
) -> ModelShape:
    """Sizes of a checkpoint of any architecture.

    Args:
        headers: dtype and shape of all tensors.
        config: content of config.json, which gives heads and windows.
        name: of the checkpoint, for errors.
        dtype: vLLM's `--dtype`; None or auto takes the config's.
        kv_dtype: vLLM's `--kv-cache-dtype`; None or auto takes the model's.

    Raises:
        UnknownModelError: layers have no tensor, or the config lacks a needed key.

    """
    reader = decoder_config(config)
    settings = reader.section("quantization_config")
    width = dtype_bytes(dtype, reader.values)
    found = sort_tensors(
        headers,
        reader.layers,
        float_bytes=width if dtype not in (None, "auto") else None,
        bits=_packed_bits(settings) if settings else 4,
    )
    if not reader.has("block_configs"):  # Layers of these may hold nothing.
        check_layers(name, headers, found)
    layers = tuple(
        Layer(
            index,
            tuple(_tensor(part, reader, count) for part, count in tensors.values()),
            cache_of(reader, index, kv_bytes(kv_dtype, width)),
        )
        for index, tensors in found.layers.items()
    )
    rest = tuple(
        tuple(_tensor(part, reader) for part in parts)
        for parts in (found.embedding, found.final_norm, found.output_head, found.extra)
    )
    return _shape(reader, "safetensors", layers, rest, width)


def _packed_bits(settings: Config) -> int:
    groups = config_groups(settings)
    if groups:
        return packed_bits(weights_of(groups[0]), "num_bits")
    return packed_bits(settings, "bits", "w_bit", default=4)


def _shape(
    config: Config,
    source: Literal["config", "safetensors"],
    layers: tuple[Layer, ...],
    rest: tuple[tuple[Tensor, ...], ...],
    width: int,
) -> ModelShape:
    architecture = architecture_of(config)
    embedding, final_norm, head, extra = rest
    experts = config.experts
    if not experts and any(tensor.role == "expert" for x in layers for tensor in x.tensors):
        raise UnknownModelError(
            f"config.json of model_type {shown(config.model_type)}: its layers have experts, "
            f"expected how many in {' or '.join(EXPERT_KEYS)}"
        )
    return ModelShape(
        model_type=config.model_type,
        source=source,
        layers=layers,
        embedding=embedding,
        final_norm=final_norm,
        output_head=head,
        extra=extra,
        tied=not head,
        vocabulary_everywhere=architecture is not None and architecture.vocabulary_everywhere,
        hidden_size=config.hidden,
        vocab_size=config.number("vocab_size"),
        intermediate_size=_intermediate(config),
        num_heads=config.heads,
        num_kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        dtype_bytes=width,
        experts=experts,
        active_experts=min(experts, config.number("num_experts_per_tok")) if experts else 0,
        mla=latents_of(config),
        expert_parts=_expert_parts(config),
        uses=uses_of(config),
    )


def _intermediate(config: Config) -> int:
    keys = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
    # Where a config leaves the width out it is four times the hidden size (GPT-2, BLOOM, Falcon).
    dense = config.number(*keys) if any(map(config.has, keys)) else 4 * config.hidden
    if not config.experts:
        return dense
    width = config.number("moe_intermediate_size", "intermediate_size")
    shared = config.number_or(0, "n_shared_experts", least=0)
    return max(dense, width * (config.number("num_experts_per_tok") + shared))


def _expert_parts(config: Config) -> int:
    if not config.experts:
        return 0
    inner = config.number("moe_intermediate_size", "intermediate_size")
    together = stored_together(config)
    return inner // together if inner % together == 0 else 1


def _layer_tensors(
    architecture: Architecture, config: Config, index: int, width: int, quantised: Quantised
) -> Iterator[Tensor]:
    prefix = f"{architecture.prefix}{index}."
    for part in architecture.layer(config, index):
        if isinstance(part, Stored):
            yield _tensor(part, config)
        elif isinstance(part, Matrix):
            yield _tensor(Stored(part.name, part.elements, width), config)
        elif isinstance(part, Vector):
            stored = Stored(part.name, part.elements, part.dtype_bytes or width, values=0)
            yield _tensor(stored, config)
        elif isinstance(part, Experts):
            for linear in part.linears:
                for stored in store(linear, prefix, width, quantised):
                    yield _tensor(stored, config, part.count)
        else:
            for stored in store(part, prefix, width, quantised):
                yield _tensor(stored, config)


def _tensor(stored: Stored, config: Config, count: int = 1) -> Tensor:
    return Tensor(
        name=stored.name,
        elements=stored.elements,
        dtype_bytes=stored.dtype_bytes,
        count=count,
        role=role_of(stored.name),
        shards=shards_of(stored.name, config.kv_heads),
        values=stored.values if is_multiplied(stored.name) else 0,
    )

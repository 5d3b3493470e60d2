"""The sizes of a model: bytes of every layer's weights and of a token's KV cache.

From its Hugging Face config (`shape_from_config`), or exactly, for any architecture, from the
headers of a local checkpoint (`shape_from_safetensors`).  No weight is read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from placement.architectures import (
    ARCHITECTURES,
    Architecture,
    Config,
    Experts,
    Vector,
    window_of,
)
from placement.checkpoint import read_headers, sort_tensors
from placement.quantisation import (
    Linear,
    Quantised,
    Stored,
    UnknownModelError,
    quantised_from,
    store,
)
from placement.tensors import KvCache, Layer, Tensor, is_multiplied, role_of, shards_of

__all__ = [
    "Mla",
    "ModelShape",
    "UnknownModelError",
    "shape_from_config",
    "shape_from_safetensors",
    "shape_of",
]

DTYPE_BYTES = {
    "float32": 4, "float": 4, "bfloat16": 2, "float16": 2, "half": 2,
    "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Mla:
    """Multi-head latent attention: one latent per token instead of keys and values per head."""

    kv_lora_rank: int
    qk_rope_head_dim: int
    qk_nope_head_dim: int
    v_head_dim: int


@dataclass(frozen=True)
class ModelShape:
    """Everything about a model that placing it needs."""

    model_type: str
    source: Literal["config", "safetensors"]
    layers: tuple[Layer, ...]
    embedding: tuple[Tensor, ...]
    final_norm: tuple[Tensor, ...]
    output_head: tuple[Tensor, ...]
    """Empty where the embedding serves as output matrix."""
    extra: tuple[Tensor, ...]
    """Vision and audio towers; the first stage holds them."""
    tied: bool
    vocabulary_everywhere: bool
    """vLLM gives each pipeline stage of this architecture its embedding, norm and output head."""
    hidden_size: int
    vocab_size: int
    intermediate_size: int
    """Widest MLP a token passes, all its active experts together."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype_bytes: int
    """Width of activations."""
    experts: int = 0
    active_experts: int = 0
    mla: Mla | None = None

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, each counted once."""
        rest = self.embedding + self.final_norm + self.output_head + self.extra
        return sum(layer.nbytes for layer in self.layers) + sum(t.nbytes for t in rest)

    def bytes_by_role(self) -> dict[str, int]:
        """Weight bytes of attention, MLP, experts, norms, embedding, output head, …."""
        sums: dict[str, int] = {}
        parts = [(tensor.role, tensor) for layer in self.layers for tensor in layer.tensors]
        parts += [("embedding", t) for t in self.embedding]  # type: ignore[misc]
        parts += [("norm", t) for t in self.final_norm]  # type: ignore[misc]
        names: list[tuple[str, Tensor]] = [*parts, *(("output head", t) for t in self.output_head)]
        names += [("other", t) for t in self.extra]
        for role, tensor in names:
            sums[role] = sums.get(role, 0) + tensor.nbytes
        return sums

    def kv_bytes_per_token(self) -> int:
        """KV bytes of one token over all layers."""
        return sum(layer.kv.bytes_per_token for layer in self.layers if layer.kv is not None)

    def around(self, *, first: bool, last: bool) -> tuple[Tensor, ...]:
        """Tensors outside the layers that a stage holds, as vLLM 0.32 places them."""
        everywhere = self.vocabulary_everywhere
        tensors: tuple[Tensor, ...] = ()
        if first or everywhere or (last and self.tied):
            tensors += self.embedding
        if first:
            tensors += self.extra
        if last or everywhere:
            tensors += self.final_norm + self.output_head
        return tensors

    @property
    def output_matrix(self) -> tuple[Tensor, ...]:
        """What a decode step reads after the last layer."""
        if not self.tied:
            return self.output_head + self.final_norm
        matrix = max(self.embedding, key=lambda tensor: tensor.nbytes, default=None)
        return ((matrix,) if matrix is not None else ()) + self.final_norm


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
    if path.is_dir() and any(path.glob("*.safetensors")):
        return shape_from_safetensors(path, dtype, kv_dtype)
    return shape_from_config(read_config(path), dtype, kv_dtype)


def read_config(path: Path) -> dict[str, Any]:
    """Content of a config.json, given by its path or its directory.

    Raises:
        UnknownModelError: there is none, or it is not a JSON object.

    """
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UnknownModelError(f"{file}: expected a model's config.json: {error}") from None
    if not isinstance(config, dict):
        raise UnknownModelError(f"{file}: expected a JSON object, got {type(config).__name__}")
    return config


def shape_from_config(
    config: Mapping[str, Any], dtype: str | None = None, kv_dtype: str | None = None
) -> ModelShape:
    """Sizes of a model of a known architecture, from its config alone.

    Raises:
        UnknownModelError: the model_type, the quantisation or a needed key is not known.

    """
    reader = Config(config)
    architecture = ARCHITECTURES.get(reader.model_type)
    if architecture is None:
        raise UnknownModelError(
            f"model_type {reader.model_type!r} is not known from its config alone (known: "
            f"{', '.join(sorted(ARCHITECTURES))}). Plan from a local checkpoint instead: give its "
            "directory, the headers of its safetensors files say everything."
        )
    width = _dtype_bytes(dtype, config)
    quantised = quantised_from(config, width)
    layers = tuple(
        Layer(
            index,
            tuple(_layer_tensors(architecture, reader, index, width, quantised)),
            _kv(reader, index, _kv_bytes(kv_dtype, width)),
        )
        for index in range(reader.layers)
    )
    tied = reader.flag("tie_word_embeddings", architecture.tied)
    embedding, final, head = _vocabulary(reader, width, tied)
    return _shape(reader, "config", layers, (embedding, final, head, ()), width)


def shape_from_safetensors(
    path: str | Path, dtype: str | None = None, kv_dtype: str | None = None
) -> ModelShape:
    """Sizes of a local checkpoint of any architecture; its config.json gives heads and windows.

    Raises:
        UnknownModelError: files are missing or damaged, or the config lacks a needed key.

    """
    directory = Path(path)
    config = read_config(directory)
    # A model with a vision or audio tower describes its decoder in a section of its own.
    reader = Config({**config, **config["text_config"]} if "text_config" in config else config)
    settings = config.get("quantization_config") or {}
    width = _dtype_bytes(dtype, reader.values)
    found = sort_tensors(
        read_headers(directory),
        reader.layers,
        float_bytes=width if dtype not in (None, "auto") else None,
        bits=_packed_bits(settings),
    )
    layers = tuple(
        Layer(
            index,
            tuple(_tensor(part, reader, count) for part, count in tensors.values()),
            _kv(reader, index, _kv_bytes(kv_dtype, width)),
        )
        for index, tensors in found.layers.items()
    )
    rest = tuple(
        tuple(_tensor(part, reader) for part in parts)
        for parts in (found.embedding, found.final_norm, found.output_head, found.extra)
    )
    return _shape(reader, "safetensors", layers, rest, width)


def _packed_bits(settings: Mapping[str, Any]) -> int:
    groups = list((settings.get("config_groups") or {}).values())
    if groups:
        return int(groups[0]["weights"]["num_bits"])
    return int(settings.get("bits") or settings.get("w_bit") or 4)


def _shape(
    config: Config,
    source: Literal["config", "safetensors"],
    layers: tuple[Layer, ...],
    rest: tuple[tuple[Tensor, ...], ...],
    width: int,
) -> ModelShape:
    architecture = ARCHITECTURES.get(config.model_type)
    embedding, final_norm, head, extra = rest
    experts = config.experts
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
        mla=_mla(config),
    )


def _intermediate(config: Config) -> int:
    dense = config.number("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
    if not config.experts:
        return dense
    width = config.number("moe_intermediate_size", "intermediate_size")
    shared = int(config.values.get("n_shared_experts") or 0)
    return max(dense, width * (config.number("num_experts_per_tok") + shared))


def _mla(config: Config) -> Mla | None:
    if not config.has("kv_lora_rank"):
        return None
    return Mla(
        config.number("kv_lora_rank"),
        config.number("qk_rope_head_dim"),
        config.number("qk_nope_head_dim"),
        config.number("v_head_dim"),
    )


def _kv(config: Config, index: int, kv_bytes: int) -> KvCache:
    mla, window = _mla(config), window_of(config, index)
    if mla is not None:
        latent = mla.kv_lora_rank + mla.qk_rope_head_dim
        flops = 2 * config.heads * (latent + mla.kv_lora_rank)
        return KvCache(latent * kv_bytes, 1, window, flops)
    heads, size = config.kv_heads, config.head_dim
    return KvCache(2 * heads * size * kv_bytes, heads, window, 4 * config.heads * size)


def _layer_tensors(
    architecture: Architecture, config: Config, index: int, width: int, quantised: Quantised
) -> Iterator[Tensor]:
    prefix = f"{architecture.prefix}{index}."
    for part in architecture.layer(config, index):
        if isinstance(part, Vector):
            stored = Stored(part.name, part.elements, part.dtype_bytes or width, values=0)
            yield _tensor(stored, config)
        elif isinstance(part, Experts):
            for linear in part.linears:
                for stored in store(linear, prefix, width, quantised):
                    yield _tensor(stored, config, part.count)
        else:
            for stored in store(part, prefix, width, quantised):
                yield _tensor(stored, config)


def _vocabulary(
    config: Config, width: int, tied: bool
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], tuple[Tensor, ...]]:
    hidden, vocab = config.hidden, config.number("vocab_size")
    if config.model_type == "opt":
        return _opt_vocabulary(config, width, tied)
    embedding = (_tensor(Stored("embed_tokens.weight", vocab * hidden, width), config),)
    final = (_tensor(Stored("norm.weight", hidden, width, values=0), config),)
    head = _tensor(Stored("lm_head.weight", vocab * hidden, width), config)
    return embedding, final, () if tied else (head,)


def _opt_vocabulary(
    config: Config, width: int, tied: bool
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], tuple[Tensor, ...]]:
    hidden, vocab = config.hidden, config.number("vocab_size")
    inner = config.number("word_embed_proj_dim", "hidden_size")
    # OPT's positions start at 2, the two rows in front are never used.
    positions = config.number("max_position_embeddings") + 2
    embedding = [
        Stored("embed_tokens.weight", vocab * inner, width),
        Stored("embed_positions.weight", positions * hidden, width, values=0),
    ]
    final = []
    if config.flag("do_layer_norm_before", True) and not config.flag("_remove_final_layer_norm"):
        names = ("weight", "bias") if config.flag("layer_norm_elementwise_affine", True) else ()
        final = [Stored(f"final_layer_norm.{name}", hidden, width, values=0) for name in names]
    if inner != hidden:
        embedding.append(Stored("project_in.weight", inner * hidden, width))
        final.append(Stored("project_out.weight", inner * hidden, width))
    head = [] if tied else [Stored("lm_head.weight", vocab * inner, width)]
    return (
        tuple(_tensor(part, config) for part in embedding),
        tuple(_tensor(part, config) for part in final),
        tuple(_tensor(part, config) for part in head),
    )


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


def _dtype_bytes(dtype: str | None, config: Mapping[str, Any]) -> int:
    if dtype in (None, "auto"):
        found = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    else:
        found = str(dtype)
    return _width(found)


def _kv_bytes(kv_dtype: str | None, width: int) -> int:
    return width if kv_dtype in (None, "auto") else _width(str(kv_dtype))


def _width(dtype: str) -> int:
    name = dtype.removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise UnknownModelError(f"dtype {dtype!r} is not known (known: {', '.join(DTYPE_BYTES)})")
    return DTYPE_BYTES[name]

"""The sizes of a model from what vLLM's class of it holds and caches.

`ray_hetero.planning.sizes.model_probe` builds that class in a process of its own and hands over
plain values; nothing here knows vLLM.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from placement.model.config import Config, kv_bytes
from placement.model.quantisation import stored_together
from placement.model.shape import Mla, ModelShape
from placement.model.tensors import KvCache, Layer, Role, Tensor, is_multiplied, role_of
from placement.model.towers import describes_encoders
from placement.model.undivided import uses_of

Values = Mapping[str, Any]
PACKED = ("qweight", "weight_packed", "qweight_packed")
"""Ends of the names of integers that hold several weights each."""


def shape_from_parts(
    parts: Values, config: Mapping[str, Any], kv_dtype: str | None = None
) -> ModelShape:
    """Sizes of a model.

    Args:
        parts: as `ray_hetero.compat.models.model_parts.parts_of` gives them.
        config: content of config.json.
        kv_dtype: vLLM's `--kv-cache-dtype`; None or auto takes what the layers ask for.

    """
    reader = decoder_config(config)
    count = int(parts["layers"])
    width = int(parts["dtype_bytes"])
    held: dict[int, list[Tensor]] = {index: [] for index in range(count)}
    around: dict[str, list[Tensor]] = defaultdict(list)
    for one in parts["parameters"]:
        tensor = _tensor(one, int(parts["kv_heads"]), bits_of(config))
        for index in one["layers"]:
            if index < count:
                held[index].append(tensor)
        if not one["layers"]:
            around[one["place"]].append(tensor)
    caches = caches_of(parts["caches"], count, kv_dtype, width)
    latents = [int(size) for size in parts["latents"]]
    experts = int(parts["experts"])
    inner, together = int(parts["expert_inner"]), stored_together(reader)
    return ModelShape(
        model_type=reader.model_type,
        source="vLLM",
        layers=tuple(Layer(i, tuple(held[i]), caches[i]) for i in range(count)),
        embedding=tuple(around["embedding"]),
        final_norm=tuple(around["final"]),
        output_head=tuple(around["head"]),
        extra=tuple(around["extra"]),
        tied=not around["head"],
        vocabulary_everywhere=bool(parts.get("vocabulary_everywhere", False)),
        hidden_size=int(parts["hidden_size"]),
        vocab_size=int(parts["vocab_size"]),
        intermediate_size=_widest(held, experts, int(parts["active_experts"]), parts),
        num_heads=int(parts["heads"]),
        num_kv_heads=int(parts["kv_heads"]),
        head_dim=int(parts["head_dim"]),
        dtype_bytes=width,
        experts=experts,
        active_experts=int(parts["active_experts"]),
        mla=Mla(*latents) if latents[0] else None,
        expert_parts=(inner // together if inner % together == 0 else 1) if experts else 0,
        uses=uses_of(reader),
        divides=bool(parts.get("divides", True)),
        has_unsized_encoders=bool(parts.get("decoder_alone")) and describes_encoders(config),
    )


def decoder_config(config: Mapping[str, Any]) -> Config:
    """A config.json with what it says of the decoder alone at its top.

    The type of a model with other parts stays that of its decoder; the quantisation may stand in
    either place.
    """
    decoder = Config(config).section("text_config")
    return Config({**config, **decoder.values} if decoder else config)


def bits_of(config: Mapping[str, Any]) -> int:
    """Width of packed integers of a quantised checkpoint; 4 where its config does not say."""
    settings = decoder_config(config).section("quantization_config")
    found: object = None
    if settings is not None:
        groups = settings.values.get("config_groups")
        first = next(iter(groups.values()), None) if isinstance(groups, dict) else None
        weights = first.get("weights") if isinstance(first, dict) else None
        packed = weights if isinstance(weights, dict) else settings.values
        found = packed.get("num_bits") or packed.get("bits") or packed.get("w_bit")
    return found if type(found) is int and 0 < found <= 32 else 4


def caches_of(
    caches: Sequence[Values], layers: int, kv_dtype: str | None, width: int
) -> tuple[KvCache | None, ...]:
    """The cache of each layer; None where it has none of its own.

    Args:
        caches: those of all layers, each with the numbers of the layers that have it.
        layers: decoder layers of the model.
        kv_dtype: vLLM's `--kv-cache-dtype`.
        width: bytes of a value of the model.

    """
    of_layers: list[list[KvCache]] = [[] for _ in range(layers)]
    for one in caches:
        if one["kind"] != "shared":
            cache = _cache(one, kv_dtype, width)
            for index in one["layers"]:
                if index < layers:
                    of_layers[index].append(cache)
    return tuple(_merged(found) for found in of_layers)


def _cache(one: Values, kv_dtype: str | None, width: int) -> KvCache:
    if one["kind"] == "state":
        return KvCache(0, 1, state_bytes=int(one["state"]), draft_bytes=int(one["draft"]))
    asked = kv_bytes(kv_dtype, int(one["width"]))
    # Caches whose values are bytes hold scales as well, and keep their form.
    scale = asked if int(one["width"]) == width else int(one["width"])
    return KvCache(
        int(one["bytes_per_token"]) * scale // int(one["width"]),
        int(one["heads"]),
        one["window"],
        int(one["flops"]),
        is_kept_whole=one["kind"] == "ChunkedLocalAttention",
    )


def _merged(found: list[KvCache]) -> KvCache | None:
    """One cache of a layer, others beside it; equal ones and states are added up."""
    state = sum(one.state_bytes for one in found)
    draft = sum(one.draft_bytes for one in found)
    growing = sorted(
        (one for one in found if one.bytes_per_token), key=lambda one: -one.bytes_per_token
    )
    if not growing:
        return KvCache(0, 1, state_bytes=state, draft_bytes=draft) if state else None
    return replace(growing[0], state_bytes=state, draft_bytes=draft, beside=tuple(growing[1:]))


def _tensor(one: Values, kv_heads: int, bits: int) -> Tensor:
    name = str(one["name"])
    role: Role = "expert" if one.get("expert") else role_of(name)
    kept = role if role != "expert" or one.get("expert") else "mlp"
    is_kv = name.rsplit(".", 2)[-2:-1] in (["k_proj"], ["v_proj"])
    return Tensor(
        name=name,
        elements=int(one["elements"]),
        dtype_bytes=int(one["width"]),
        count=int(one.get("count", 1)),
        role=kept,
        shards=1 if one["replicated"] else kv_heads if is_kv else None,
        values=_values(name, str(one["type"]), int(one["dimensions"]), bits),
    )


def _values(name: str, dtype: str, dimensions: int, bits: int) -> int:
    """Weights in one element of a parameter; 0 where it is not multiplied with."""
    if dimensions < 2 or not is_multiplied(name):
        return 0
    if dtype == "int32" and name.endswith(PACKED):
        return 32 // bits
    return 2 if dtype == "uint8" else 1


def _widest(held: Mapping[int, Sequence[Tensor]], experts: int, active: int, parts: Values) -> int:
    """Widest MLP that a token passes: what it is multiplied with there, by gate, up and down."""
    hidden = int(parts["hidden_size"])

    def width(tensors: Sequence[Tensor]) -> int:
        multiplied = sum(t.weights for t in tensors if t.role in ("mlp", "shared expert"))
        routed = sum(t.weights for t in tensors if t.role == "expert")
        passed = multiplied + (routed * active // experts if experts else 0)
        return int(passed // (3 * hidden))

    return max(1, *(width(tensors) for tensors in held.values()))

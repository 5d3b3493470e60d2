"""Parameters, layers and caches of vLLM's class of a model, as plain values."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from math import ceil, prod
from typing import TYPE_CHECKING, Any

from placement.model.towers import is_tower
from ray_hetero.compat.models.routed_experts import routed_layers
from ray_hetero.compat.patching import original

if TYPE_CHECKING:
    from torch import nn
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import MambaSpec

Values = dict[str, Any]


def parts_of(model: nn.Module, vllm_config: VllmConfig) -> Values:
    """Everything about a model that planning needs, to be sent as JSON.

    Args:
        model: of vLLM's class, made without memory, of one rank and one stage.
        vllm_config: with which it was made.

    """
    config = vllm_config.model_config
    text = config.hf_text_config
    experts = list(routed_layers(model))
    layers = decoder_layers(model, config.get_total_num_hidden_layers())
    return {
        "layers": config.get_total_num_hidden_layers(),
        "hidden_size": config.get_hidden_size(),
        "vocab_size": config.get_vocab_size(),
        "heads": int(getattr(text, "num_attention_heads", 0) or 1),
        "kv_heads": config.get_total_num_kv_heads() or 1,
        "head_dim": config.get_head_size() or 1,
        "dtype_bytes": config.dtype.itemsize,
        "experts": max((one.global_num_experts for one in experts), default=0),
        "active_experts": max((one.top_k for one in experts), default=0),
        "expert_inner": max((one.intermediate_size_per_partition for one in experts), default=0),
        "latents": [int(getattr(text, name, 0) or 0) for name in LATENTS],
        "parameters": _grouped(_parameters(model, layers)),
        "caches": _grouped(_caches(model, vllm_config, layers)),
    }


def is_divided(model: nn.Module) -> bool:
    """Whether vLLM has pipelines for a model."""
    from vllm.model_executor.models.interfaces import supports_pp

    return bool(supports_pp(type(model)))


def has_vocabulary(stage: nn.Module) -> bool:
    """Whether a stage holds an embedding or an output head of tokens."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    return any(
        isinstance(module, VocabParallelEmbedding) and not is_tower(name)
        for name, module in stage.named_modules()
    )


def _grouped(found: Iterator[Values]) -> list[Values]:
    """Each value once, with the numbers of all layers that have it; none outside of the layers."""
    groups: dict[str, Values] = {}
    for one in found:
        index = one.pop("layer")
        group = groups.setdefault(json.dumps(one, sort_keys=True), {"layers": [], **one})
        if index is not None:
            group["layers"].append(index)
    return list(groups.values())


LATENTS = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
"""Keys of a configuration with multi-head latent attention."""


def decoder_layers(model: nn.Module, count: int) -> str:
    """Name of the module list of the decoder's layers; the one with most parameters of that many.

    Empty where there is none.
    """
    from torch import nn

    lists = {
        name: sum(parameter.numel() for parameter in module.parameters())
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) >= count and not is_tower(name)
    }
    return max(lists, key=lambda name: lists[name], default="")


def _layer(name: str, layers: str) -> int | None:
    """Number of the decoder layer to which a module or a parameter belongs."""
    if not layers or not name.startswith(f"{layers}."):
        return None
    number = name.removeprefix(f"{layers}.").split(".")[0]
    return int(number) if number.isdigit() else None


def _parameters(model: nn.Module, layers: str) -> Iterator[Values]:
    """Each parameter once, fused queries, keys and values as three."""
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.layers.linear import QKVParallelLinear

    seen: set[int] = set()
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            full = f"{path}.{name}" if path else name
            index = _layer(full, layers)
            known = {
                "layer": index,
                "name": full if index is None else full.removeprefix(f"{layers}.{index}."),
                "width": parameter.element_size(),
                "type": str(parameter.dtype).removeprefix("torch."),
                "dimensions": parameter.dim(),
                "place": "extra" if is_tower(full) else _place(module, full),
                "replicated": _is_replicated(module),
            }
            elements = parameter.numel()
            if isinstance(module, RoutedExperts) and parameter.dim():
                count = module.local_num_experts
                if parameter.shape[0] == count:
                    yield known | {"elements": elements // count, "count": count, "expert": True}
                    continue
            sizes = module.output_sizes if isinstance(module, QKVParallelLinear) else []
            # MiniMax M3 has its indexer's queries and keys in it, too.
            is_qkv = len(sizes) == len("qkv") and "qkv_proj" in full
            if is_qkv and elements % sum(sizes) == 0:
                for part, size in zip("qkv", sizes, strict=True):
                    one = known["name"].replace("qkv_proj", f"{part}_proj")
                    yield known | {"name": one, "elements": elements // sum(sizes) * size}
            else:
                expert = isinstance(module, RoutedExperts)
                yield known | {"elements": elements, "expert": expert}


def _place(module: nn.Module, name: str) -> str:
    """Where a parameter outside the layers belongs: embedding, head, final or extra."""
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        VocabParallelEmbedding,
    )

    if isinstance(module, ParallelLMHead) or "lm_head" in name:
        return "head"
    if isinstance(module, VocabParallelEmbedding):
        return "embedding"
    return "final" if "norm" in name else "extra"


def _is_replicated(module: nn.Module) -> bool:
    """Whether every tensor-parallel rank has all of a module's parameters.

    Uses: the classes of vllm.model_executor.layers.linear that divide their weights.
    """
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.layers.linear import (
        ColumnParallelLinear,
        MergedColumnParallelLinear,
        RowParallelLinear,
    )
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    divided = (
        ColumnParallelLinear, MergedColumnParallelLinear, RowParallelLinear, RoutedExperts,
        VocabParallelEmbedding,
    )  # fmt: skip
    return not isinstance(module, divided)


def _caches(model: nn.Module, vllm_config: VllmConfig, layers: str) -> Iterator[Values]:
    """The cache of each layer; nothing for layers that read the cache of another one.

    Uses: `CompilationConfig.static_forward_context`, `AttentionLayerBase.get_kv_cache_spec`,
    `Attention.kv_sharing_target_layer_name`; `AttentionSpec.num_heads`,
    `AttentionSpec.unpadded_page_size_bytes`, `AttentionSpec.block_size`, `MambaSpec.shapes`,
    `MambaSpec.dtypes`, `MambaSpec.tp_replicated`.
    """
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.v1.kv_cache_interface import AttentionSpec, MambaSpec

    # The name of a cache may have another number than the layer, so that none occurs twice.
    paths = {id(module): path for path, module in model.named_modules()}
    for name, layer in vllm_config.compilation_config.static_forward_context.items():
        if not isinstance(layer, AttentionLayerBase):
            continue
        known = {"layer": _number_in(paths.get(id(layer), name), layers)}
        if getattr(layer, "kv_sharing_target_layer_name", None):
            yield known | {"kind": "shared"}
            continue
        spec = original(layer, "get_kv_cache_spec")(vllm_config)
        if isinstance(spec, MambaSpec):
            state = _state_bytes(spec)
            yield known | {
                "kind": "state",
                "state": state,
                "draft": _state_bytes(_with_a_draft(layer, vllm_config)) - state,
                "replicated": spec.tp_replicated,
            }
        elif isinstance(spec, AttentionSpec):
            window = getattr(spec, "sliding_window", None)
            chunk = getattr(spec, "attention_chunk_size", None)
            page = original(spec, "unpadded_page_size_bytes")
            yield known | {
                "kind": type(spec).__name__.removesuffix("Spec"),
                "bytes_per_token": ceil(page / spec.block_size),
                "width": spec.dtype.itemsize,
                "heads": spec.num_heads,
                "window": window or chunk,
                "flops": 2 * int(getattr(layer, "num_heads", 0) or 0)
                * (spec.head_size + (spec.head_size_v or spec.head_size)),
            }  # fmt: skip


def _state_bytes(spec: MambaSpec) -> int:
    sizes = zip(spec.shapes, spec.dtypes, strict=True)
    return sum(prod(shape) * dtype.itemsize for shape, dtype in sizes)


def _with_a_draft(layer: Any, vllm_config: VllmConfig) -> MambaSpec:
    """The states of a layer in steps that verify one draft of each sequence.

    Uses: `MambaMixer2.num_spec`, `GatedDeltaNetAttention.num_spec`, `ShortConv.num_spec`; other
    layers keep no more for drafts.
    """
    before = getattr(layer, "num_spec", None)
    if before is None:
        return layer.get_kv_cache_spec(vllm_config)
    layer.num_spec = before + 1
    try:
        return layer.get_kv_cache_spec(vllm_config)
    finally:
        layer.num_spec = before


def _number_in(name: str, layers: str) -> int | None:
    """Number of the decoder layer in a path, whatever is before it there."""
    last = layers.rsplit(".", 1)[-1]
    parts = name.split(".")
    for before, number in pairwise(parts):
        if before == last and number.isdigit():
            return int(number)
    return next((int(part) for part in parts if part.isdigit()), None)

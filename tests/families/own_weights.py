"""Weights of architectures that Transformers has no class for, named as vLLM loads them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

EXPERTS = {"w13_weight": ("gate_proj", "up_proj"), "w2_weight": ("down_proj",)}


def model_of(directory: Path) -> Any:
    """vLLM's whole model of a `config.json`, with weights that nobody has loaded."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed.parallel_state import (
        init_distributed_environment,
        initialize_model_parallel,
    )
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    from families.stock import stock_arguments

    config = EngineArgs(**stock_arguments(directory)).create_engine_config()
    with tempfile.TemporaryDirectory() as meeting, set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{meeting}/meeting", 0, "gloo")
        initialize_model_parallel(1, 1)
        with set_default_torch_dtype(torch.float32):
            return initialize_model(config)


def named_weights(model: Any) -> Iterator[tuple[str, Any]]:
    """Names and shapes of a checkpoint that a model of vLLM's takes.

    Where its mapper, or what it says of packed modules, names the parts of a layer, they are
    weights of their own.

    Yields:
        A name, and an empty tensor of its shape.

    """
    import torch

    parts = _parts(model)
    for name, weight in model.named_parameters():
        *path, layer, kind = name.split(".")
        if kind in EXPERTS:
            names = EXPERTS[kind]
            rows = weight.shape[1] // len(names)
            base = ".".join(path)
            for expert in range(weight.shape[0]):
                for part in names:
                    yield f"{base}.{expert}.{part}.weight", torch.empty(rows, weight.shape[2])
            continue
        found = parts.get(layer)
        sizes = _sizes(model.get_submodule(".".join([*path, layer])))
        if found is None or len(found) != len(sizes):
            yield name, _beginning(name, weight)
            continue
        for part, size in zip(found, sizes, strict=True):
            yield ".".join([*path, part, kind]), torch.zeros(size, *weight.shape[1:])


def _beginning(name: str, weight: Any) -> Any:
    import torch

    is_norm = weight.dim() == 1 and name.endswith(".weight")
    return torch.ones_like(weight) if is_norm else torch.zeros_like(weight)


def _parts(model: Any) -> dict[str, list[str]]:
    """Fused layer → its parts, in order."""
    found: dict[str, list[str]] = {}
    for module in model.modules():
        for layer, names in (getattr(module, "packed_modules_mapping", None) or {}).items():
            found[layer] = list(names)
        mapper = getattr(module, "hf_to_vllm_mapper", None)
        stacked: dict[str, list[str]] = {}
        for part, (layer, _) in getattr(mapper, "orig_to_new_stacked", {}).items():
            stacked.setdefault(layer.strip(".").split(".")[-1], []).append(
                part.strip(".").split(".")[-1]
            )
        found |= stacked
    return found


def _sizes(module: Any) -> list[int]:
    """Rows of the parts of a layer."""
    if hasattr(module, "total_num_kv_heads"):
        heads = (module.total_num_heads, module.total_num_kv_heads, module.total_num_kv_heads)
        return [count * module.head_size for count in heads]
    return list(getattr(module, "output_sizes", ()))

"""The checkpoint of an engine whose expert ranks load their experts without vLLM."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from placement.model.expert_tensors import ExpertTensors
from ray_hetero.world import ExpertSource

if TYPE_CHECKING:
    from vllm.config import VllmConfig

LOAD_FORMATS = "auto", "safetensors"
HIDDEN_MULTIPLE = 32
"""Divisor of the hidden size that this project's kernels of experts have."""


def expert_source(vllm_config: VllmConfig) -> ExpertSource | None:
    """The checkpoint, where files, architecture and format are known without vLLM; else None."""
    model, load = vllm_config.model_config, vllm_config.load_config
    text = model.hf_text_config.to_dict()
    settings: Any = getattr(model.hf_config, "quantization_config", None)
    settings = settings.to_dict() if hasattr(settings, "to_dict") else settings
    is_ordinary = (
        str(model.dtype) == "torch.bfloat16"
        and text.get("hidden_size", 1) % HIDDEN_MULTIPLE == 0
        # A format that is asked for is not that of the files.
        and (model.quantization is None) == (settings is None)
        and load.load_format in LOAD_FORMATS
        and not load.model_loader_extra_config
        and not getattr(model, "model_weights", "")
        and not vllm_config.parallel_config.enable_eplb
        and os.environ.get("VLLM_USE_MODELSCOPE", "").lower() not in ("1", "true")
        and _has_safetensors(model.model)
    )
    config = text | {"quantization_config": settings}
    tensors = ExpertTensors.of(model.architecture, config) if is_ordinary else None
    if tensors is None:
        return None
    layers = model.get_total_num_hidden_layers()
    return ExpertSource(model.model, tensors, layers, model.revision, load.download_dir)


def _has_safetensors(model: str) -> bool:
    """Whether a folder has such files; a name on the hub is looked at by the expert rank."""
    folder = Path(model)
    if not folder.is_dir():
        return "://" not in model
    return any(folder.glob("*.safetensors"))

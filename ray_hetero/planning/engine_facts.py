"""What planning needs to know of the model and of the engine, read off vLLM's configuration."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from placement.model.reading import UnknownModelError, shape_of
from placement.model.shape import ModelShape

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig


CPU_BLOCK_SIZE = 128
"""Tokens of a KV block on CPU ranks; vLLM's own default there, and every GPU backend takes it."""


@dataclass(frozen=True)
class EngineFacts:
    """One engine as the planner sees it."""

    shape: ModelShape | None
    why_no_shape: str
    """Why sizes of the model are not known; empty where they are."""
    hidden_layers: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    gpu_memory_utilization: float
    is_eager: bool = False
    is_bf16: bool = False
    """Whether what is not quantised is computed in bfloat16."""


def facts_of(vllm_config: VllmConfig) -> EngineFacts:
    """Read the facts; of the model no weight is read."""
    model, scheduler = vllm_config.model_config, vllm_config.scheduler_config
    layers = model.get_total_num_hidden_layers()
    shape, why = _shape(model, str(vllm_config.cache_config.cache_dtype), layers)
    return EngineFacts(
        shape=shape,
        why_no_shape=why,
        hidden_layers=layers,
        max_model_len=model.max_model_len,
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        gpu_memory_utilization=vllm_config.cache_config.gpu_memory_utilization,
        is_eager=bool(model.enforce_eager),
        is_bf16=str(model.dtype) == "torch.bfloat16",
    )


def _shape(model: ModelConfig, cache_dtype: str, layers: int) -> tuple[ModelShape | None, str]:
    """Sizes from the checkpoint on this disk, else from the configuration; or why there are none.

    A source with another number of layers does not count: `--hf-overrides` may have changed it.
    """
    dtype = str(model.dtype)
    problems = []
    directory = Path(model.model)
    sources = [directory] if any(directory.glob("*.safetensors")) else []
    for source in (*sources, model.hf_config.to_dict()):
        try:
            shape = shape_of(source, dtype, cache_dtype)
        except UnknownModelError as error:
            problems.append(str(error))
            continue
        if len(shape.layers) == layers:
            return shape, ""
        problems.append(f"{shape.source} has {len(shape.layers)} layers, vLLM counts {layers}")
    return None, problems[0]

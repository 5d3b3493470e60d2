"""PyTorch in the place of vLLM's compiled operators, where a rank's process has none.

Models that need others than those of `torch_operators` are refused before they are loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from vllm.platforms import current_platform

from ray_hetero.compat.models import torch_operators
from ray_hetero.errors import UnsupportedError
from ray_hetero.log import logger

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def stand_in(vllm_config: VllmConfig) -> None:
    """Define what is missing of vLLM's operators for CPUs, and say so in the log.

    Args:
        vllm_config: of the rank; the model is not loaded yet.

    Raises:
        UnsupportedError: operators are missing, and the model needs more than these.

    """
    current_platform.import_kernels()
    missing = torch_operators.define_missing()
    if not missing:
        return
    if what := needs_more(vllm_config):
        raise UnsupportedError(
            "vLLM has no compiled operators for CPUs here, and PyTorch does not stand in for those "
            f"of {what}. Type: ray-hetero install-cpu-kernels"
        )
    logger.warning(
        "vLLM has no compiled operators for CPUs here: PyTorch computes %s in their place, prompts "
        "most of all take longer",
        ", ".join(missing),
    )


def needs_more(vllm_config: VllmConfig) -> str:
    """Words for what needs other operators than those that PyTorch stands in for; or "".

    Args:
        vllm_config: of the rank.

    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    if model.use_mla:
        return "latent attention"
    if model.has_inner_state:
        return "layers with a state (Mamba, Gated DeltaNet)"
    if model.get_num_experts() and model.dtype != torch.bfloat16:
        return (
            f"a mixture of experts in {str(model.dtype).removeprefix('torch.')} (--dtype bfloat16)"
        )
    if vllm_config.speculative_config is not None:
        return "speculative decoding (leave --speculative-config out)"
    if cache.cache_dtype.startswith("fp8"):
        return f"a KV cache in {cache.cache_dtype} (leave --kv-cache-dtype out)"
    return ""

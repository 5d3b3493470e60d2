"""vLLM's model with random weights, in a process that is its only rank."""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.parallel_state import (
    ensure_model_parallel_initialized,
    init_distributed_environment,
)
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
from vllm.utils.torch_utils import set_default_torch_dtype


def random_model(vllm_config: Any) -> Any:
    """vLLM's model of a configuration, the current one of this process, with random weights."""
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    init_distributed_environment(1, 0, "env://", 0, "gloo")
    ensure_model_parallel_initialized(1, 1)
    torch.manual_seed(0)
    with set_default_torch_dtype(torch.bfloat16):
        model = initialize_model(vllm_config=vllm_config)
    for name, weight in model.named_parameters():
        if name.endswith("A_log"):
            # Decays of a Gated DeltaNet.
            torch.nn.init.uniform_(weight, -2, 1)
        elif name.endswith("mamba.A"):
            torch.nn.init.uniform_(weight, -2, -0.1)
        elif name.endswith("conv1d.bias"):
            torch.nn.init.zeros_(weight)
        elif weight.ndim >= 2:
            torch.nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
        elif "norm" in name:
            torch.nn.init.ones_(weight)
    process_weights_after_loading(model, vllm_config.model_config, torch.device("cpu"))
    return model

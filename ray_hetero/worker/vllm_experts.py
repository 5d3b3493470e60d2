"""The experts of a model in an expert rank: made, loaded and sliced by vLLM, without the rest.

Everything of the model that is no expert is made without memory (torch's device `meta`), so that
vLLM's own loading finds its names and knows every checkpoint; safetensors read what is used only.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from ray_hetero.compat.models import quantised_kernels, remote_experts
from ray_hetero.compat.models.custom_ops import has_cpu_kernels
from ray_hetero.compat.models.routed_experts import routed_layers
from ray_hetero.compat.worker import layer_partition
from ray_hetero.distributed.expert_service import HeldLayer
from ray_hetero.distributed.stage_experts import are_remote
from ray_hetero.errors import UnsupportedError
from ray_hetero.kernels.experts import expert_layers
from ray_hetero.kernels.experts.expert_layers import ExpertLayers
from ray_hetero.kernels.experts.expert_room import Room, room_to_share
from ray_hetero.kernels.linear import quantised_linear, streaming_linear
from ray_hetero.log import logger
from ray_hetero.preflight.platform import check_platform

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs

    from ray_hetero.config import HeteroConfig
    from ray_hetero.world import RankSpec


def load(rank: RankSpec, args: EngineArgs, number: int, ranks: int) -> dict[str, HeldLayer]:
    """Load an expert rank's slices of all remote experts.

    Args:
        rank: the expert rank.
        args: of its engine.
        number: of this rank among the expert ranks.
        ranks: how many of them there are.

    Returns:
        The layers by vLLM's name.

    Raises:
        UnsupportedError: see `load_experts`, and `check_platform`.
        Whatever vLLM raises for options that its CPU platform does not take.

    """
    from vllm.config import set_current_vllm_config

    check_platform(rank)
    vllm_config = _single_rank_config(rank, args)
    hidden_layers = vllm_config.model_config.get_total_num_hidden_layers()
    is_remote = are_remote(rank.world.expert_layers, hidden_layers)
    # The driver's environment has those of the stages.
    layer_partition.set_partition((hidden_layers,))
    with set_current_vllm_config(vllm_config):
        _make_groups_of_one()
        return load_experts(vllm_config, rank.engine.config, is_remote, number, ranks)


def load_experts(
    vllm_config: VllmConfig,
    config: HeteroConfig,
    is_remote: remote_experts.IsRemote,
    number: int,
    ranks: int,
) -> dict[str, HeldLayer]:
    """Load this rank's slices of all remote experts.

    Args:
        vllm_config: of a single CPU rank; the current one of this process.
        config: which kernel computes, in which format.
        is_remote: which layers.
        number: of this rank among the expert ranks.
        ranks: how many of them there are.

    Returns:
        The layers by vLLM's name.

    Raises:
        UnsupportedError: the model has no such layer, or nothing on a CPU computes its experts.

    """
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    is_quantised = bool(vllm_config.model_config.quantization)
    kernel, own = streaming_linear.for_experts(config.cpu, is_quantised=is_quantised), None
    if kernel is not None:
        own = ExpertLayers(
            config.cpu, kernel, room_to_share if config.experts.is_read_by_gpus else Room
        )
        # Linear layers are made too, without memory, and each asks for a kernel of its format.
        quantised_kernels.offer_kernels(quantised_linear.KERNELS, is_first=True)
    remote_experts.hold_slices(is_remote, number, ranks)
    model_config = vllm_config.model_config
    with set_default_torch_dtype(model_config.dtype):
        with torch.device("meta"):
            model = initialize_model(vllm_config=vllm_config, model_config=model_config)
        layers = {
            layer.layer_name: layer for layer in routed_layers(model) if is_remote(layer.layer_name)
        }
        if not layers:
            raise UnsupportedError(
                f"experts.ranks is {ranks}, but {model_config.model} has no layer of routed "
                "experts that vLLM knows. Leave experts out."
            )
        get_model_loader(vllm_config.load_config).load_weights(model, model_config)
        for name, layer in layers.items():
            _refuse_kernel_of_gpus(name, layer)
            layer.quant_method.process_weights_after_loading(layer)
    if own is not None:
        # Those that stay with the stages have no memory here.
        own.loaded(torch.nn.ModuleList(layers.values()))
    _check_kernels(layers)
    logger.info("slices %d of %d of the experts of %d layers", number + 1, ranks, len(layers))
    return {name: _held(layer, model_config.dtype) for name, layer in layers.items()}


def _refuse_kernel_of_gpus(name: str, layer: Any) -> None:
    """Raise UnsupportedError for a layer whose experts vLLM computes on GPUs only."""
    if others := remote_experts.kernel_of_other_devices(layer):
        raise UnsupportedError(
            f"{name}: vLLM computes its experts with {others}, on GPUs only, so no expert rank can "
            "hold them. Leave experts.ranks out."
        )


def _check_kernels(layers: Mapping[str, Any]) -> None:
    """Raise for a layer that only vLLM's kernels could compute, where these are not.

    Raises:
        UnsupportedError: names it, and what to type.

    """
    for name, layer in layers.items():
        if expert_layers.held_by(layer) is None and not has_cpu_kernels():
            raise UnsupportedError(
                f"{name}: this project's kernels do not compute these experts (the log says why), "
                "and vLLM's for CPUs are not installed on this node. Type: "
                "ray-hetero install-cpu-kernels"
            )


def _held(layer: Any, dtype: torch.dtype) -> HeldLayer:
    def compute(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        # Rows that only fill a captured step up have no experts, which vLLM's kernels cannot say.
        is_none = ids < 0
        weights, ids = weights.masked_fill(is_none, 0), ids.masked_fill(is_none, 0)
        sums: torch.Tensor = remote_experts.computed_by(layer, x, weights, ids)
        return sums

    experts = expert_layers.held_by(layer)
    call = None if experts is None else experts.call
    count = layer.global_num_experts
    return HeldLayer(layer.hidden_size, dtype, compute, call, experts, layer.top_k, count)


def _single_rank_config(rank: RankSpec, args: EngineArgs) -> VllmConfig:
    """The engine's configuration as that of one CPU rank, which holds all layers.

    Raises:
        Whatever vLLM raises for options that its CPU platform does not take.

    """
    args = copy.copy(args)
    args.distributed_executor_backend = None
    args.pipeline_parallel_size = args.tensor_parallel_size = args.data_parallel_size = 1
    args.dtype = rank.shared.dtype
    args.max_model_len = rank.shared.max_model_len
    args.seed = rank.shared.seed
    args.max_num_batched_tokens = rank.shared.max_num_batched_tokens
    args.max_num_seqs = rank.shared.max_num_seqs
    # Of what follows an expert rank has nothing, and CPUs not all.
    args.block_size = None
    args.kv_cache_dtype = "auto"
    args.kv_cache_memory_bytes = 1 << 30
    args.enforce_eager = True
    args.async_scheduling = False
    args.enable_lora = False
    args.speculative_config = args.kv_transfer_config = None
    args.additional_config = {}
    return args.create_engine_config()


def _make_groups_of_one() -> None:
    """The groups that vLLM's models ask for; nobody else is in them."""
    from vllm.distributed.parallel_state import (
        ensure_model_parallel_initialized,
        init_distributed_environment,
    )

    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    init_distributed_environment(1, 0, "env://", 0, "gloo")
    ensure_model_parallel_initialized(1, 1)

"""The experts of a model in an expert rank: made, loaded and sliced by vLLM, without the rest.

Everything of the model that is no expert is made without memory (torch's device `meta`), so that
vLLM's own loading finds its names and knows every checkpoint; safetensors read what is used only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from placement.plan.devices import DeviceFigures, Links
from placement.plan.expert_slots import SlotRates
from placement.units import GIB
from ray_hetero.compat.models import quantised_kernels, remote_experts
from ray_hetero.compat.models.custom_ops import has_cpu_kernels
from ray_hetero.compat.models.routed_experts import routed_layers
from ray_hetero.distributed.expert_memory import MOST_TOKENS
from ray_hetero.distributed.expert_service import HeldLayer
from ray_hetero.errors import UnsupportedError
from ray_hetero.kernels.experts import expert_layers, expert_rates
from ray_hetero.kernels.experts.expert_layers import ExpertLayers
from ray_hetero.kernels.experts.expert_rates import CoreRates
from ray_hetero.kernels.experts.expert_room import Room, room_to_share
from ray_hetero.kernels.linear import quantised_linear, streaming_linear
from ray_hetero.kernels.linear.streaming_linear import StreamingLinear
from ray_hetero.log import logger
from ray_hetero.offload.experts import linked_experts
from ray_hetero.runtime.shared_pages import SharedPages

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from ray_hetero.config import HeteroConfig


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

    kernel, own = _kernel(vllm_config, config), None
    if kernel is not None:
        own = ExpertLayers(
            config.cpu, kernel, room_to_share if config.experts.prefill_on_gpu else Room
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
            if others := remote_experts.kernel_of_other_devices(layer):
                raise UnsupportedError(
                    f"{name}: vLLM computes its experts with {others}, on GPUs only, so no expert "
                    "rank can hold them. Leave experts.ranks out."
                )
            layer.quant_method.process_weights_after_loading(layer)
    if own is not None:
        # Those that stay with the stages have no memory here.
        own.loaded(torch.nn.ModuleList(layers.values()))
    _check_kernels(layers)
    logger.info("slices %d of %d of the experts of %d layers", number + 1, ranks, len(layers))
    return {name: _held(layer, model_config.dtype) for name, layer in layers.items()}


def _kernel(vllm_config: VllmConfig, config: HeteroConfig) -> StreamingLinear | None:
    """This project's kernels; None for vLLM's."""
    kernel = streaming_linear.choose(config.cpu)
    if config.cpu.linear_kernel == "auto" and vllm_config.model_config.quantization:
        # As for linear layers: vLLM's own kernels of most formats need AMX.
        kernel = kernel or streaming_linear.at_hand()
    return kernel


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


def shared_pages(layers: Mapping[str, HeldLayer]) -> dict[str, SharedPages]:
    """Seal what stages can read of these layers; by vLLM's name."""
    found: dict[str, SharedPages] = {}
    try:
        for name, layer in layers.items():
            pages = None if layer.experts is None else linked_experts.shared(layer.experts)
            if pages is not None:
                found[name] = pages
    except OSError as error:
        logger.warning("no GPU can read these experts in prompts: %s", error)
        return {}
    if found:
        total = sum(pages.prepared_bytes for pages in found.values())
        huge = sum(pages.huge_bytes for pages in found.values())
        logger.info(
            "experts of %d layers lie in %.1f GiB of memory that GPUs can read in prompts, %.0f %% "
            "of it in huge pages (experts.prefill_on_gpu)",
            len(found),
            total / GIB,
            100 * huge / max(1, total),
        )
    return found


def core_rates(layers: Mapping[str, HeldLayer], tokens: int) -> CoreRates | None:
    """How long this rank's cores take for a layer, measured with the first one that they compute.

    Args:
        layers: of this rank.
        tokens: most of a step.

    """
    layer = next((one for one in layers.values() if one.experts is not None), None)
    if layer is None or layer.experts is None:
        return None
    most = min(tokens, MOST_TOKENS)
    experts = layer.experts

    return expert_rates.measured(
        experts, hidden=layer.hidden, experts=experts.count, chosen=layer.chosen,
        tokens=sorted({max(1, most // 4), most}),
    )  # fmt: skip


def slot_rates(
    layers: Mapping[str, HeldLayer], ranks: int, gpu: DeviceFigures | None
) -> SlotRates | None:
    """Rates of a GPU that would have slots for these experts; None where nothing is known of it.

    Args:
        layers: of this rank.
        ranks: expert ranks, each with a slice of every expert.
        gpu: of the first stage, as the plan knows it.

    """
    held = [layer for layer in layers.values() if layer.experts is not None]
    if gpu is None or gpu.host_link is None or not held:
        return None
    slices = sum(layer.experts.nbytes for layer in held if layer.experts is not None)
    return SlotRates(
        expert_bytes=ranks * slices / sum(layer.count for layer in held),
        gpu_bandwidth=gpu.read_bandwidth,
        link_bandwidth=gpu.host_link,
        layer_s=Links().handover.latency_s,
    )

"""vLLM's routed experts where their weights lie on expert ranks: in a rank of a stage, which has
none of them, and in an expert rank, which has a slice of each.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ray_hetero.compat.patching import original, replace

IsRemote = Callable[[str], bool]
"""Whether the experts of vLLM's layer of that name lie on expert ranks."""
Compute = Callable[[Any, Any, Any, Callable[[], None]], Any]
"""Sums [M, hidden] from tokens [M, hidden], weights and ids [M, chosen]; calls what may be computed
meanwhile, once."""


def hand_experts_over(is_remote: IsRemote, take: Callable[[Any], Compute]) -> None:
    """In a rank of a stage: load no weights of remote experts, and have others compute them.

    Replaces: `RoutedExperts._get_quant_method`.
    Uses: `SharedExpertsOrder.MK_INTERNAL_OVERLAPPED`.
    Why: a layer's method is chosen by its format and the platform, and each of them holds weights.
    Can go when: methods of experts can be registered for layers by name.

    Args:
        is_remote: which layers.
        take: given each such layer, of which no weights are there, what computes it.

    """
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    remote = _remote_method()

    def choosing(choose: Any) -> Any:
        @functools.wraps(choose)
        def _get_quant_method(self: Any, prefix: str, quant_config: Any, moe_config: Any) -> Any:
            stock = choose(self, prefix, quant_config, moe_config)
            return remote(stock, moe_config, take) if is_remote(self.layer_name) else stock

        return _get_quant_method

    replace(RoutedExperts, "_get_quant_method", choosing)


def _load_nothing(*args: Any, return_success: bool = False, **how: Any) -> bool | None:
    return True if return_success else None


# Asked by loaders of fused experts.
_load_nothing.supports_moe_loading = True  # type: ignore[attr-defined]


@functools.cache
def _remote_method() -> Any:
    import torch
    from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
    from vllm.model_executor.layers.fused_moe.runner.shared_experts import SharedExpertsOrder

    meanwhile = original(SharedExpertsOrder, "MK_INTERNAL_OVERLAPPED")

    class RemoteExpertsMethod(FusedMoEMethodBase):  # type: ignore[misc]
        """Experts that others compute.

        Args:
            stock: vLLM's own method, which knows what a checkpoint holds.
            moe: vLLM's configuration of the layer.
            take: as for `hand_experts_over`.

        """

        def __init__(self, stock: Any, moe: Any, take: Callable[[Any], Compute]) -> None:
            super().__init__(moe)
            self._stock = stock
            self._take = take
            self._compute: Compute | None = None

        def create_weights(self, layer: Any, *args: Any, **how: Any) -> None:
            # Models look their parameters up by name to load them.
            with torch.device("meta"):
                self._stock.create_weights(layer, *args, **how | {"weight_loader": _load_nothing})
            self._compute = self._take(layer)

        def maybe_roundup_sizes(
            self,
            hidden_size: int,
            intermediate_size_per_partition: int,
            act_dtype: Any,
            moe_parallel_config: Any,
        ) -> tuple[int, int]:
            return hidden_size, intermediate_size_per_partition

        def uses_weight_scale_2_pattern(self) -> bool:
            return bool(self._stock.uses_weight_scale_2_pattern())

        def process_weights_after_loading(self, layer: Any) -> None:
            for name in list(layer._parameters):
                delattr(layer, name)

        def get_fused_moe_quant_config(self, layer: Any) -> None:
            return None

        @property
        def topk_indices_dtype(self) -> Any:
            return torch.int32

        @property
        def mk_can_overlap_shared_experts(self) -> bool:
            """Shared experts are left to `apply`."""
            return True

        def apply(
            self,
            layer: Any,
            x: Any,
            topk_weights: Any,
            topk_ids: Any,
            shared_experts: Any,
            shared_experts_input: Any,
        ) -> Any:
            def compute_shared() -> None:
                if shared_experts is not None:
                    shared_experts(shared_experts_input, meanwhile)

            assert self._compute is not None, "weights are created before anything is computed"
            if layer.apply_router_weight_on_input:
                # As vLLM does it, of one expert a token; what is handed over adds up as it is.
                assert topk_ids.shape[1] == 1, "vLLM applies weights to inputs of one expert only"
                x = x * topk_weights.to(x.dtype)
                topk_weights = topk_weights.new_ones(topk_weights.shape)
            return self._compute(x, topk_weights, topk_ids, compute_shared)

    return RemoteExpertsMethod


def hold_slices(is_remote: IsRemote, number: int, ranks: int) -> None:
    """In an expert rank: have remote experts made as one rank's slices, all else without memory.

    The model is to be made on the device `meta`.

    Replaces: `FusedMoEParallelConfig.flatten_tp_across_dp_and_pcp`, `RoutedExperts.__init__`.
    Why: vLLM slices experts as it slices everything of a rank, and here only experts are there.
    Can go when: experts can be made and loaded without their model.

    Args:
        is_remote: which layers.
        number: of this rank among the expert ranks.
        ranks: how many of them there are.

    """
    import torch
    from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    def slicing(flatten: Any) -> Any:
        @functools.wraps(flatten)
        def flatten_tp_across_dp_and_pcp(*sizes: int, **named: int) -> tuple[int, int]:
            return ranks, number

        return flatten_tp_across_dp_and_pcp

    def placing(init: Any) -> Any:
        @functools.wraps(init)
        def __init__(self: Any, layer_name: str, *args: Any, **how: Any) -> None:  # noqa: N807
            with torch.device("cpu" if is_remote(layer_name) else "meta"):
                init(self, layer_name, *args, **how)

        return __init__

    replace(FusedMoEParallelConfig, "flatten_tp_across_dp_and_pcp", slicing)
    replace(RoutedExperts, "__init__", placing)


def kernel_of_other_devices(layer: Any) -> str:
    """Name of vLLM's kernel for a layer's experts, where this device cannot run it; else "".

    Uses: `FusedMoEExperts._supports_current_device` of the class that a layer's method has chosen.

    Args:
        layer: of `routed_experts.routed_layers`.

    """
    experts = getattr(layer.quant_method, "experts_cls", None)
    if experts is None or original(experts, "_supports_current_device")():
        return ""
    return str(experts.__name__)


def computed_by(layer: Any, x: Any, weights: Any, ids: Any) -> Any:
    """Sums of vLLM's own layer of experts, whose weights are prepared.

    Uses: `RoutedExperts.forward_modular`, `RoutedExperts._ensure_moe_quant_config_init`.

    Args:
        layer: of `routed_experts.routed_layers`.
        x: [M, hidden].
        weights: [M, chosen], float32.
        ids: [M, chosen], int32.

    """
    original(layer, "_ensure_moe_quant_config_init")()
    return original(layer, "forward_modular")(x=x, topk_weights=weights, topk_ids=ids)

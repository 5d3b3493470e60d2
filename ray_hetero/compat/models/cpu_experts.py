"""vLLM's routed experts on a CPU rank."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from ray_hetero.compat.models.routed_experts import number_of, routed_layers, without_memory
from ray_hetero.compat.patching import STOCK, original, replace

if TYPE_CHECKING:
    import torch


def use_experts(
    kernel: Callable[..., None], take: Callable[[Any], int | None], activations: Collection[str]
) -> None:
    """Compute a CPU rank's routed experts that are not quantised with another kernel.

    Replaces: `CPUUnquantizedExperts.process_weights_after_loading`, `CPUUnquantizedExperts.apply`,
    `CPUUnquantizedExperts._supports_activation`, `CPUUnquantizedExperts._supports_no_act_and_mul`,
    `CPUUnquantizedExperts._supports_grouped_gemm`, `FusedMoEConfig.__post_init__`.
    Why: UnquantizedFusedMoEMethod chooses among vLLM's kernels only, which know four activations,
    drop their limits in silence, and no experts without a gate.
    Can go when: kernels of experts can be registered, as quantisation methods can.

    Args:
        kernel: (out [M, hidden], x [M, hidden], weights [M, chosen] or None, ids [M, chosen],
            number of the layer); writes `out`.  A negative id is an expert that is not here.
        take: given each layer, whose weights are loaded; gives its number, or None to leave it
            to vLLM.  The layer's weights are freed afterwards.
        activations: values of vLLM's MoEActivation that the kernel computes.

    """
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    def taking(prepare: Any) -> Any:
        def process_weights_after_loading(self: Any, layer: Any) -> None:
            self.layer_number = take(layer)
            if self.layer_number is None:
                prepare(self, layer)
                return
            for name in ("w13_weight", "w2_weight"):
                # Who calls the kernel looks at the shapes.
                setattr(layer, name, without_memory(getattr(layer, name).data))

        return process_weights_after_loading

    replace(CPUUnquantizedExperts, "process_weights_after_loading", taking)
    replace(CPUUnquantizedExperts, "apply", computing(kernel))
    support_activations(CPUUnquantizedExperts, activations)
    replace(CPUUnquantizedExperts, "_supports_grouped_gemm", _any_sizes)
    replace(FusedMoEConfig, "__post_init__", _without_gates_too)


def _any_sizes(_stock: Any) -> Any:
    return classmethod(lambda _class, _moe_config: (True, None))


def _without_gates_too(stock: Any) -> Any:
    """Experts without a gate, which vLLM refuses on CPUs once all else of them is settled."""

    @functools.wraps(stock)
    def __post_init__(self: Any) -> None:  # noqa: N807
        try:
            stock(self)
        except NotImplementedError:
            if self.is_act_and_mul:
                raise

    return __post_init__


def support_activations(experts: Any, activations: Collection[str]) -> None:
    """Offer a class of vLLM's experts for more activations, also for those without a gate.

    Args:
        experts: the class.
        activations: values of vLLM's MoEActivation.

    """
    replace(
        experts, "_supports_activation",
        lambda _stock: staticmethod(lambda activation: activation.value in activations),
    )  # fmt: skip
    replace(experts, "_supports_no_act_and_mul", lambda _stock: staticmethod(lambda: True))


def has_kernel(layer: Any) -> bool:
    """Whether vLLM's own kernel takes a layer's experts, which are not quantised.

    It knows no limits of activations, which is left to the caller.

    Args:
        layer: of `routed_experts.routed_layers`.

    """
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    def stock(name: str) -> Any:
        found = original(CPUUnquantizedExperts, name)
        return getattr(found, STOCK, found)

    takes_sizes: bool = stock("_supports_grouped_gemm")(layer.moe_config)[0]
    return takes_sizes and bool(stock("_supports_activation")(layer.activation))


def computing(kernel: Callable[..., None]) -> Callable[[Any], Any]:
    """A patch of an experts class's `apply` that calls a kernel where the experts have a number.

    Args:
        kernel: see `use_experts`.

    """

    def patch(apply: Any) -> Any:
        def apply_or_leave(
            self: Any,
            output: torch.Tensor,
            hidden_states: torch.Tensor,
            w1: torch.Tensor,
            w2: torch.Tensor,
            topk_weights: torch.Tensor,
            topk_ids: torch.Tensor,
            activation: Any,
            global_num_experts: int,
            expert_map: torch.Tensor | None,
            a1q_scale: torch.Tensor | None,
            a2_scale: torch.Tensor | None,
            workspace13: torch.Tensor,
            workspace2: torch.Tensor,
            expert_tokens_meta: Any,
            apply_router_weight_on_input: bool,
        ) -> None:
            # Weights that come in vLLM's own layout are not prepared.
            number = getattr(self, "layer_number", None)
            if number is None:
                apply(
                    self, output, hidden_states, w1, w2, topk_weights, topk_ids, activation,
                    global_num_experts, expert_map, a1q_scale, a2_scale, workspace13, workspace2,
                    expert_tokens_meta, apply_router_weight_on_input,
                )  # fmt: skip
                return
            ids = topk_ids if expert_map is None else expert_map[topk_ids.long()]
            weights = None if apply_router_weight_on_input else topk_weights
            kernel(output, hidden_states, weights, ids, number)

        return apply_or_leave

    return patch


def other_methods(model: Any) -> Counter[str]:
    """Quantised layers of routed experts that are left to vLLM, by vLLM's class for them."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
        UnquantizedFusedMoEMethod,
    )

    return Counter(
        type(layer.quant_method).__name__
        for layer in routed_layers(model)
        if not isinstance(layer.quant_method, UnquantizedFusedMoEMethod)
        and number_of(layer) is None
    )

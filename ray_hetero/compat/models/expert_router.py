"""vLLM's choice of experts on a CPU rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from ray_hetero.compat.patching import replace

if TYPE_CHECKING:
    import torch


Route = Callable[..., Any]
"""Function with the arguments and the result of `kernels.experts.routing.route`."""


class RoutingRule(NamedTuple):
    """Rule by which a layer chooses experts."""

    chosen: int
    """Experts of a token."""
    scoring: str = "softmax"
    """Name of the function of logits."""
    is_renormalised: bool = True
    """Whether a token's weights are divided by their sum."""
    scale: float = 1.0
    """Factor of all weights."""
    groups: tuple[int, int] | None = None
    """Groups of neighbouring experts, and of how many of them a token's experts come."""


def use_routing(route: Route) -> None:
    """Choose experts on a CPU rank by another function.

    Replaces: `CPURouter._compute_routing`, `zero_expert_router.fused_topk_bias`,
    `zero_expert_router.zero_experts_compute_triton`.
    Uses: what both routers keep of their arguments.
    Why: CPURouter asserts softmax where no groups are (MiniMax-M2 has sigmoids), drops a bias and a
    factor without groups, and rounds weights to bf16; its assertions end an engine that has loaded
    all weights.  Experts that compute nothing (LongCat) need Triton.
    Can go when: vLLM's router for CPUs does what its routers for GPUs do.

    Args:
        route: how experts are chosen where a model has no function of its own.

    """
    from vllm.model_executor.layers.fused_moe.router import zero_expert_router
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

    def routing(stock: Any) -> Any:
        def _compute_routing(
            self: Any,
            hidden_states: torch.Tensor,
            router_logits: torch.Tensor,
            indices_type: torch.dtype | None,
            *,
            input_ids: torch.Tensor | None = None,
        ) -> Any:
            if self.custom_routing_function is not None and not self.use_grouped_topk:
                return stock(self, hidden_states, router_logits, indices_type, input_ids=input_ids)
            # Those for GPUs apply the factor where there are groups, a bias or a table, and nowhere
            # else (`FusedTopKRouter` is not given it).
            groups = (self.num_expert_group, self.topk_group) if self.use_grouped_topk else None
            bias, table = self.e_score_correction_bias, self._hash_indices_table
            has_factor = groups is not None or bias is not None or table is not None
            scale = self.routed_scaling_factor if has_factor else 1.0
            rule = RoutingRule(self.top_k, self.scoring_func, self.renormalize, scale, groups)
            return route(
                router_logits,
                input_ids,
                rule,
                bias=bias,
                table=table,
            )

        return _compute_routing

    def with_bias(_stock: Any) -> Any:
        def fused_topk_bias(
            hidden_states: torch.Tensor,
            gating_output: torch.Tensor,
            scoring_func: str,
            e_score_correction_bias: torch.Tensor,
            topk: int,
            renormalize: bool,
            indices_type: torch.dtype | None = None,
        ) -> Any:
            return route(
                gating_output, None, RoutingRule(topk, scoring_func, renormalize),
                bias=e_score_correction_bias,
            )  # fmt: skip

        return fused_topk_bias

    replace(CPURouter, "_compute_routing", routing)
    replace(zero_expert_router, "fused_topk_bias", with_bias)
    replace(zero_expert_router, "zero_experts_compute_triton", lambda _stock: _of_idle_experts)


def _of_idle_experts(
    expert_indices: torch.Tensor,
    expert_scales: torch.Tensor,
    num_experts: int,
    zero_expert_type: str,
    hidden_states: torch.Tensor,
) -> torch.Tensor:
    """Tokens times the weights of their experts behind the last one, which compute nothing."""
    if zero_expert_type != "identity":
        return hidden_states.new_zeros(hidden_states.shape)
    idle = expert_scales.masked_fill(expert_indices < num_experts, 0).sum(-1, keepdim=True)
    return (hidden_states.float() * idle).to(hidden_states.dtype)

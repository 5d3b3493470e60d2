"""Experts are chosen on CPU ranks as vLLM's routers for GPUs and the models' papers say."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from vllm.model_executor.layers.fused_moe.router import (  # noqa: E402
    cpu_router,
    grouped_topk_router,
    zero_expert_router,
)
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter  # noqa: E402
from vllm.model_executor.layers.fused_moe.router.router_factory import (  # noqa: E402
    create_fused_moe_router,
)

from ray_hetero.compat.models import expert_router  # noqa: E402
from ray_hetero.compat.models.expert_router import RoutingRule  # noqa: E402
from ray_hetero.kernels.experts.routing import SCORES, route  # noqa: E402

TOKENS, EXPERTS, CHOSEN = 40, 16, 4


@pytest.fixture(autouse=True)
def patched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CPURouter, "_compute_routing", CPURouter._compute_routing)
    for name in ("fused_topk_bias", "zero_experts_compute_triton"):
        monkeypatch.setattr(zero_expert_router, name, getattr(zero_expert_router, name))
    torch.manual_seed(0)
    expert_router.use_routing(route)


def by_expert(weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """[M, experts]: the weight of each, whatever their order."""
    return torch.zeros(len(ids), EXPERTS).scatter_add_(1, ids.long(), weights)


def routed(logits: torch.Tensor, ids: Any = None, **how: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """What a router that vLLM makes for a CPU chooses."""
    router = create_fused_moe_router(top_k=CHOSEN, global_num_experts=EXPERTS, **how)
    assert isinstance(router, CPURouter)
    found: tuple[torch.Tensor, torch.Tensor] = router.select_experts(
        logits.new_zeros(len(logits), 8), logits, torch.int32, input_ids=ids
    )
    return found


def by_hand(logits: torch.Tensor, scoring: str, bias: Any, *, renormalise: bool) -> torch.Tensor:
    """One token and one expert after the other."""
    found = torch.zeros(logits.shape)
    for token, row in enumerate(logits.tolist()):
        values = torch.tensor(row, dtype=torch.float64)
        if scoring == "softmax":
            scores = values.exp() / values.exp().sum()
        elif scoring == "sigmoid":
            scores = 1 / (1 + (-values).exp())
        else:
            scores = (1 + values.exp()).log().sqrt()
        order = sorted(range(EXPERTS), key=lambda one: -float(scores[one] + bias[one]))[:CHOSEN]
        total = sum(float(scores[one]) for one in order) if renormalise else 1.0
        for one in order:
            found[token, one] = float(scores[one]) / total
    return found


@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("scoring", SCORES)
def test_scores_biases_and_factors(scoring: str, has_bias: bool, renormalise: bool) -> None:
    """MiniMax-M2 has sigmoids with a bias, ERNIE 4.5 softmax with one; neither has groups."""
    if scoring == "sqrtsoftplus" and not has_bias:
        pytest.skip("vLLM has no such router")
    logits = torch.randn(TOKENS, EXPERTS)
    bias = torch.randn(EXPERTS) * 0.3 if has_bias else torch.zeros(EXPERTS)
    weights, ids = routed(
        logits, scoring_func=scoring, renormalize=renormalise, routed_scaling_factor=2.5,
        e_score_correction_bias=bias if has_bias else None,
    )  # fmt: skip
    assert (weights.dtype, ids.dtype) == (torch.float32, torch.int32)
    # Without a bias vLLM's routers for GPUs are not given the factor.
    factor = 2.5 if has_bias else 1.0
    expected = by_hand(logits, scoring, bias, renormalise=renormalise) * factor
    torch.testing.assert_close(by_expert(weights, ids), expected)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("groups", [(4, 2), (1, 1), (3, 1), (16, 4)])
def test_groups_are_those_of_vllms_router_for_gpus(
    groups: tuple[int, int], has_bias: bool, scoring: str
) -> None:
    logits = torch.randn(TOKENS, EXPERTS)
    bias = torch.randn(EXPERTS) * 0.3 if has_bias else None
    count, most = groups
    weights, ids = routed(
        logits, scoring_func=scoring, use_grouped_topk=True, num_expert_group=count,
        topk_group=most, e_score_correction_bias=bias, routed_scaling_factor=2.5,
    )  # fmt: skip
    if EXPERTS % count or count == EXPERTS:
        # As without groups.
        biases = torch.zeros(EXPERTS) if bias is None else bias
        expected = 2.5 * by_hand(logits, scoring, biases, renormalise=True)
        torch.testing.assert_close(by_expert(weights, ids), expected)
        return
    theirs = inspect.unwrap(grouped_topk_router.grouped_topk)(
        torch.zeros(TOKENS, 8), logits, CHOSEN, True, count, most, scoring, 2.5, bias
    )
    torch.testing.assert_close(by_expert(weights, ids), by_expert(*theirs))


def test_a_table_says_the_experts_of_each_token_id() -> None:
    table = torch.stack([torch.randperm(EXPERTS)[:CHOSEN] for _ in range(100)]).int()
    logits, tokens = torch.randn(TOKENS, EXPERTS), torch.randint(100, (TOKENS,))
    weights, ids = routed(
        logits, tokens, scoring_func="sqrtsoftplus", hash_indices_table=table,
        routed_scaling_factor=1.5,
    )  # fmt: skip
    assert torch.equal(ids, table[tokens])
    scores = torch.nn.functional.softplus(logits).sqrt().gather(1, ids.long())
    torch.testing.assert_close(weights, 1.5 * scores / scores.sum(-1, keepdim=True))


def test_a_function_of_the_models_own_stays() -> None:
    def last(**given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (len(given["gating_output"]), given["topk"])
        return torch.full(shape, 0.5, dtype=torch.bfloat16), torch.full(shape, EXPERTS - 1)

    weights, ids = routed(torch.randn(3, EXPERTS), custom_routing_function=last)
    assert weights.dtype == torch.float32
    assert bool((weights == 0.5).all())
    assert bool((ids == EXPERTS - 1).all())


def test_weights_of_logits_in_bfloat16_are_not_rounded() -> None:
    logits = torch.randn(TOKENS, EXPERTS).bfloat16()
    weights, ids = routed(logits)
    expected = by_hand(logits.float(), "softmax", torch.zeros(EXPERTS), renormalise=True)
    torch.testing.assert_close(by_expert(weights, ids), expected)


def test_experts_that_compute_nothing_pass_tokens_on() -> None:
    """LongCat has such experts behind the others."""
    real = EXPERTS - 4
    router = create_fused_moe_router(
        top_k=CHOSEN, global_num_experts=EXPERTS, zero_expert_type="identity",
        num_logical_experts=real, e_score_correction_bias=torch.randn(EXPERTS) * 0.1,
        routed_scaling_factor=2.0, renormalize=False,
    )  # fmt: skip
    hidden, logits = torch.randn(TOKENS, 8), torch.randn(TOKENS, EXPERTS)
    weights, ids = router.select_experts(hidden, logits, torch.int32)
    all_weights = 2.0 * by_hand(
        logits, "softmax", router.e_score_correction_bias, renormalise=False
    )
    expected = hidden * all_weights[:, real:].sum(-1, keepdim=True)
    torch.testing.assert_close(router.zero_expert_output, expected)
    assert bool((ids < real).all())
    torch.testing.assert_close(by_expert(weights, ids)[:, :real], all_weights[:, :real])


def test_compiled_it_chooses_the_same() -> None:
    bias, logits = torch.randn(EXPERTS), torch.randn(TOKENS, EXPERTS)

    def choose(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return route(logits, None, RoutingRule(CHOSEN, "sigmoid", groups=(4, 2)), bias=bias)

    compiled = torch.compile(choose, fullgraph=True, backend="eager")
    assert all(map(torch.equal, compiled(logits), choose(logits)))


def test_vllms_router_still_asserts() -> None:
    """Otherwise the patch can go."""
    assert 'assert self.scoring_func == "softmax"' in inspect.getsource(cpu_router)

"""Which experts each token of a CPU rank goes to, and with which weights.

vLLM's routers for GPUs say what is meant; its router for CPUs has softmax only, drops a bias
without groups, and asserts in the place of the rest.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ray_hetero.compat.models.expert_router import RoutingRule

SCORES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "softmax": lambda logits: logits.softmax(-1),
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": lambda logits: torch.nn.functional.softplus(logits).sqrt(),
}
"""Functions of logits, float32, by the name that vLLM has for them.  A new one is added here."""


def route(
    logits: torch.Tensor,
    ids: torch.Tensor | None,
    rule: RoutingRule,
    *,
    bias: torch.Tensor | None = None,
    table: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose experts; torch.compile traces this.

    Args:
        logits: [M, experts].
        ids: [M], the tokens' ids, where there is a table.
        rule: of the layer.
        bias: [experts], added to scores where experts are chosen, and not in weights.
        table: [vocabulary, chosen]: experts of each token id, which scores do not choose then.

    Returns:
        Weights [M, chosen], float32, and experts [M, chosen], int32.

    """
    scores = SCORES[rule.scoring](logits.float())
    if table is not None:
        assert ids is not None, "vLLM hands token ids to layers with a table"
        experts = table[ids].long()
    else:
        preferred = scores if bias is None else scores + bias.float()
        if rule.groups is not None:
            preferred = _in_best_groups(preferred, *rule.groups, has_bias=bias is not None)
        experts = preferred.topk(rule.chosen, dim=-1).indices
    weights = scores.gather(1, experts)
    if rule.is_renormalised:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * rule.scale if rule.scale != 1.0 else weights, experts.int()


def _in_best_groups(scores: torch.Tensor, count: int, most: int, *, has_bias: bool) -> torch.Tensor:
    """Scores, infinitely low in groups that a token does not go to.

    A group is as good as its best expert, with a bias as its two best together; experts that
    groups do not divide have none.
    """
    tokens, experts = scores.shape
    if experts <= count or experts % count:
        return scores
    by_group = scores.view(tokens, count, -1)
    best = by_group.topk(2, dim=-1).values.sum(-1) if has_bias else by_group.amax(-1)
    is_left_out = torch.ones_like(best, dtype=torch.bool)
    is_left_out = is_left_out.scatter(1, best.topk(most, dim=-1).indices, value=False)
    return by_group.masked_fill(is_left_out.unsqueeze(-1), float("-inf")).view(tokens, experts)

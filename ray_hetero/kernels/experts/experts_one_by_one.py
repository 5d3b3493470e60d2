"""Experts of a layer multiplied one after the other by PyTorch, where there is no GPU for vLLM's
kernel: tests compute with the same pieces and expansions then.
"""

from __future__ import annotations

import torch

from ray_hetero.kernels.experts.linked_experts import INTERLEAVED


def multiplied_one_by_one(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    *,
    activation: str,
    count: int,
    places: torch.Tensor | None = None,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """What `fused_experts` computes, one expert after the other, where there is no GPU."""
    found = torch.zeros(x.shape)
    places = torch.arange(count) if places is None else places
    for expert, place in enumerate(places.tolist()):
        tokens, choices = (ids == expert).nonzero(as_tuple=True)
        if place < 0 or not len(tokens):
            continue
        both = x[tokens].float() @ w13[place].float().t()
        if w13_bias is not None:
            both += w13_bias[place].float()
        if activation == INTERLEAVED:
            gate, up = both.unflatten(1, (-1, 2)).unbind(2)
            gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0) + 1
            between = gate * torch.sigmoid(1.702 * gate) * up
        else:
            gate, up = both.chunk(2, dim=1)
            between = torch.nn.functional.silu(gate) * up
        out = between.to(x.dtype).float() @ w2[place].float().t()
        if w2_bias is not None:
            out += w2_bias[place].float()
        found.index_add_(0, tokens, out * weights[tokens, choices, None])
    return found.to(x.dtype)

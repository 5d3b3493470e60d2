"""Numbers of tokens for which vLLM's kernel of routed experts is compiled, each in its own form."""

from __future__ import annotations

import functools

import torch
from vllm.model_executor.layers.fused_moe import fused_moe

from ray_hetero.compat.models.fused_experts import kernel_tokens

SHAPES = (128, 1536, 2048), (128, 2048, 768)
CHOSEN = 8


def test_all_tiles_that_a_step_may_have_are_among_them() -> None:
    # What vLLM looks the tiles for bfloat16 up with.
    assert fused_moe._get_config_dtype_str(dtype=torch.bfloat16) is None
    sizes = kernel_tokens(*SHAPES, CHOSEN, 48, 2048)
    tiles = functools.partial(fused_moe.try_get_optimal_moe_config, *SHAPES, CHOSEN, None)
    assert sizes[0] == 48
    # With eight experts a token, odd numbers of tokens give no multiple of 16 rows.
    forms = [(tiles(size), size % 2) for size in sizes]
    assert all((tiles(tokens), tokens % 2) in forms for tokens in range(48, 2049))
    assert len(forms) < 20


def test_none_is_there_twice() -> None:
    sizes = kernel_tokens(*SHAPES, CHOSEN, 64, 64)
    assert sizes == [64]

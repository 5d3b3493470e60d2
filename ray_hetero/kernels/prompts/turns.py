"""From how many tokens of a step on two stages take turns on their GPU.

Where the GPU computes a step for longer than it reads weights for it, two stages that compute at
once only share it, and going back and forth between their processes takes time.  Where it reads for
longer, as for a short chunk of a prompt, one stage's products fill the time in which the other's
weights cross the link; a turn would have the link wait for them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ray_hetero.kernels.prompts.link_reader import current
from ray_hetero.log import logger

if TYPE_CHECKING:
    from ray_hetero.kernels.prompts.gpu_prefill import GpuPrefill

SHARE = 0.65
"""Share of the tokens whose products take as long as their weights on the link, from which turns
are taken.  An estimate from timelines of 8,192 tokens on an H100, whose layers took 101 ms and
their weights 97: two stages at once take some 7 % longer than one after the other, which takes no
longer than the link if an eighth of the weights comes in the other's turn and layers take 0.77 of
the link's time.  They take 1.2 times that of their products."""


def turns_from(gpu: GpuPrefill) -> int:
    """Tokens of a step from which the GPU's stages take turns; measured.

    Args:
        gpu: that computes nothing meanwhile.

    Raises:
        RuntimeError: what CUDA says.

    """
    gpu.settle()
    with torch.inference_mode(), current(gpu.computing):
        x = gpu.memory.to_multiply(gpu.tokens, gpu.reader.largest.inputs)
        # Not torch's own: the ranks of a group are to sample the same tokens later.
        x.normal_(generator=torch.Generator(gpu.device).manual_seed(0))

        def multiply(weight: torch.Tensor) -> None:
            torch.mm(x, weight.t(), out=gpu.memory.products(gpu.tokens, len(weight)))

        link, products = gpu.reader.seconds(multiply)
    tokens = int(SHARE * gpu.tokens * link / products)
    logger.info(
        "the next stage computes on the same GPU: steps of %d tokens and more take turns there "
        "(a piece of weights takes %.2f ms over the link, and products of %d tokens with it "
        "%.2f ms)",
        tokens,
        1e3 * link,
        gpu.tokens,
        1e3 * products,
    )
    return tokens

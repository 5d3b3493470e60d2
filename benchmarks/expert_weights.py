"""Weights of routed experts as benchmarks make them: random, a few experts and copies of these.

Weights are heavy-tailed, as trained ones are (Student's t with 5 degrees of freedom).  In FP8 they
have a scale for each block of 128 outputs and 128 inputs, as DeepSeek's checkpoints do.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

DEGREES = 5
VARIANTS = 4
"""Experts of different values; the others are copies of these."""
SCALE_BLOCK = 128
"""Outputs, and inputs, that share a scale of FP8."""


@dataclass(frozen=True)
class Shape:
    """A layer's experts."""

    experts: int
    hidden: int
    inner: int
    chosen: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        """From experts x hidden x inner x experts of a token."""
        return cls(*map(int, text.split("x")))

    @property
    def weights(self) -> int:
        """Of one expert."""
        return 3 * self.hidden * self.inner

    def route(self, tokens: int) -> torch.Tensor:
        """Ids [tokens, chosen] of experts that are chosen evenly, none twice by a token."""
        return torch.rand(tokens, self.experts).topk(self.chosen).indices.int()


def heavy_tailed(outputs: int, inputs: int) -> torch.Tensor:
    """Random weights [outputs, inputs], bf16."""
    values = torch.distributions.StudentT(float(DEGREES)).sample((outputs, inputs))
    return (values * inputs**-0.5).bfloat16()


@functools.cache
def experts_of(shape: Shape) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Gate and up [2 · inner, hidden] and down [hidden, inner] of some experts, made once."""
    return (
        [heavy_tailed(2 * shape.inner, shape.hidden) for _ in range(VARIANTS)],
        [heavy_tailed(shape.hidden, shape.inner) for _ in range(VARIANTS)],
    )


@dataclass(frozen=True)
class BlockScaled:
    """A weight in FP8."""

    codes: torch.Tensor
    """[outputs, inputs], E4M3."""
    scales: torch.Tensor
    """[outputs / 128, inputs / 128], float32: the largest code of each block is E4M3's largest."""

    @classmethod
    def of(cls, weight: torch.Tensor) -> BlockScaled:
        """A weight [outputs, inputs] to the nearest codes.

        Raises:
            ValueError: outputs or inputs that do not fill blocks.

        """
        outputs, inputs = weight.shape
        if outputs % SCALE_BLOCK or inputs % SCALE_BLOCK:
            raise ValueError(
                f"FP8 in blocks: expected outputs and inputs in multiples of {SCALE_BLOCK}, got "
                f"{outputs} and {inputs}"
            )
        blocks = weight.float().view(
            outputs // SCALE_BLOCK, SCALE_BLOCK, inputs // SCALE_BLOCK, SCALE_BLOCK
        )
        scales = blocks.abs().amax((1, 3)) / torch.finfo(torch.float8_e4m3fn).max
        codes = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
        return cls(codes.view(outputs, inputs), scales)

    @property
    def nbytes(self) -> int:
        """Of codes and scales."""
        return int(self.codes.nbytes + self.scales.nbytes)


@functools.cache
def fp8_experts_of(shape: Shape) -> tuple[list[BlockScaled], list[BlockScaled]]:
    """The experts of `experts_of` in FP8, made once."""
    gate_ups, downs = experts_of(shape)
    return [BlockScaled.of(one) for one in gate_ups], [BlockScaled.of(one) for one in downs]


class Repeated:
    """Experts [E, …] that take the memory of a few; iterated over by who packs them."""

    def __init__(self, few: list[torch.Tensor], count: int) -> None:
        self._few = few
        self.shape = (count, *few[0].shape)

    def __iter__(self) -> Iterator[torch.Tensor]:
        for number in range(self.shape[0]):
            yield self._few[number % len(self._few)]

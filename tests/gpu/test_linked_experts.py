"""Experts that a real GPU reads over its link, by layers; engines are in test_gpu_experts.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from gpu_host import IS_PRETENDED, needs_gpus

sys.path.append(str(Path(__file__).parents[1] / "unit"))
pytest.register_assert_rewrite("linked_layers")

from linked_layers import ACTIVATIONS, CHOSEN, Layer, assert_close, routed  # noqa: E402
from native_module import needs_native  # noqa: E402

from placement.units import GIB  # noqa: E402
from ray_hetero.kernels.experts.quantised_experts import KINDS  # noqa: E402
from ray_hetero.kernels.formats import FORMATS  # noqa: E402
from ray_hetero.offload.experts.expert_expansion import sizes_of  # noqa: E402
from ray_hetero.offload.experts.gpu_experts import GpuExperts  # noqa: E402

pytestmark = [pytest.mark.gpu, needs_gpus(1), needs_native]
GPU = torch.device("cpu" if IS_PRETENDED else "cuda:0")


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("kind", [*FORMATS, *KINDS])
def test_sums_are_those_of_a_reference(kind: str, ranks: int, activation: str) -> None:
    torch.manual_seed(0)
    layers = [Layer(kind, ranks, activation) for _ in range(3)]
    slices = [layer.slices for layer in layers]
    sizes = sizes_of(slices)
    for pieces in (2, 7):
        # Pages are locked once.
        if pieces > 2:
            layers = [Layer(kind, ranks, activation) for _ in range(3)]
            slices = [layer.slices for layer in layers]
        gpu = GpuExperts(GPU, slices, CHOSEN, (sizes.beside + pieces * sizes.each) / GIB)
        for tokens in (1, 70, 2000):
            x, weights, ids = routed(tokens)
            ids[0] = -1
            for number, layer in enumerate(layers):
                given = (x.to(GPU), weights.to(GPU), ids.to(GPU))
                gpu.begin(given[2], number)
                found = gpu.sums(*given, number)
                assert_close(found.cpu(), layer.expected(x, weights, ids))
                assert not found[0].any()
                gpu.begin(given[2], number)
                assert torch.equal(found, gpu.sums(*given, number))
                # Some of them, beside what the cores make of the others.
                left = ids.masked_fill(ids < 3, -1)
                others = sum(rank(x, weights, left) for rank in layer.ranks).to(GPU)
                gpu.begin(given[2], number, 3)
                found = gpu.sums(*given, number, 3, lambda others=others: others)
                assert_close(found.cpu(), layer.expected(x, weights, ids))

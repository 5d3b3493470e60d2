"""Experts in slots of a real GPU, in CUDA graphs that are replayed while slots change."""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_host import IS_PRETENDED, needs_gpus

sys.path.append(str(Path(__file__).parents[1] / "unit"))
pytest.register_assert_rewrite("linked_layers")

from linked_layers import EXPERTS, Layer, assert_close, routed  # noqa: E402
from native_module import needs_native  # noqa: E402

from ray_hetero.kernels.experts.quantised_experts import KINDS  # noqa: E402
from ray_hetero.kernels.formats import FORMATS  # noqa: E402
from ray_hetero.offload.experts.expert_expansion import sizes_of  # noqa: E402
from ray_hetero.offload.experts.expert_slots import ExpertSlots, expert_bytes  # noqa: E402

pytestmark = [pytest.mark.gpu, needs_gpus(1), needs_native]
GPU = torch.device("cpu" if IS_PRETENDED else "cuda:0")
SLOTS, TOKENS, STEPS = 3, 5, 200


class Orders:
    """Orders of a book that the test keeps."""

    def __init__(self) -> None:
        self.given: deque[tuple[int, int, int]] = deque()
        self.slot_sums = [0] * 7

    def make_slots(self, slots: int) -> None:
        self.slots = slots

    def follow(self, is_following: bool) -> None:
        self.is_following = is_following

    def take_orders(self, most: int) -> Sequence[Sequence[int]]:
        return [self.given.popleft() for _ in range(min(most, len(self.given)))]


def captured(step: Callable[[], None]) -> Callable[[], None]:
    """Function that runs a step: the replay of its graph."""
    if IS_PRETENDED:
        return step
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", [*FORMATS, *KINDS])
@torch.inference_mode()
def test_steps_of_a_graph_are_right_whatever_slots_hold_meanwhile(kind: str, ranks: int) -> None:
    torch.manual_seed(0)
    layer = Layer(kind, ranks, "swigluoai" if kind == "mxfp4" else "silu", inner=64 * ranks)
    sizes, orders = sizes_of([layer.slices]), Orders()
    budget = sizes.beside + sizes.each + SLOTS * expert_bytes(layer.slices)
    slots = ExpertSlots(GPU, [layer.slices], budget, orders)
    given = routed(TOKENS)
    x, weights, ids = (one.to(GPU) for one in given)
    found: list[Any] = [None, None]

    def step() -> None:
        found[0] = slots.told(ids, 0)
        found[1] = slots.sums(x, weights, ids, 0)

    run, rng = captured(step), random.Random(0)
    kept = []
    for _ in range(STEPS):
        # Not waited for: copies and steps of the GPU are under way while the host goes on.
        orders.given.append((0, rng.randrange(EXPERTS), rng.randrange(SLOTS)))
        slots.begin_step(TOKENS)
        run()
        kept.append(tuple(one.clone() for one in found))
    # Of each choice alone: sums of all steps are made of these.
    of_choices = [
        layer.expected(given[0], given[1] * one_hot, given[2])
        for one_hot in torch.eye(given[1].shape[1])
    ]
    held = set()
    for told, sums in kept:
        is_held = told.cpu() < -1
        assert torch.equal(told.cpu(), torch.where(is_held, -2 - given[2], given[2]))
        expected = sum(one * is_held[:, [at]] for at, one in enumerate(of_choices))
        assert_close(sums.cpu(), expected)
        held |= set(given[2][is_held].tolist())
    # Each of them has been there for a while.
    assert held == set(given[2].flatten().tolist())
    assert slots.copied > EXPERTS
